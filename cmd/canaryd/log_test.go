package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// forged may be the name of a process, or part of a rule or an error. It looks like a line of
// the journal, of the log and of a flush.
const forged = "evil\n<0>E0101 00:00:00.000000 1 x.go:1] \"all is lost\"\n{\"event\":\"flush\"}\r\x1b[2J\u009b\u202e\xff"

// sayAll logs a line of each kind.
func sayAll(log klog.Logger) {
	log.Info("Canaries are planted", "rules", 62, "families", rules.Families(), "after", 1500*time.Millisecond)
	severity.Warnings(log).Info("Rules were lost", "by", forged, "kind", canary.Emptied, "names", []string{"A", forged})
	log.Error(fmt.Errorf("ipv4 nat: %w", errors.New(forged)), "Rules are still missing", "reason", errors.New(forged))
	severity.Notices(log).Info("The rules are back", "absent", time.Duration(0), "nothing", nil, "error", error(nil), "list", []string(nil), "undo", "",
		"lastSaved", time.Date(2026, 3, 4, 6, 6, 7, 8, time.FixedZone("", 3600)), "never", time.Time{})
	severity.Infos(log).Error(errors.New("of another boot"), "The stored generation is not used")
	severity.Warnings(log.WithValues("flush", "f1").WithName("loop")).Error(nil, "kube-proxy's rules have no owner")
	severity.Errors(log).Info("A rule is in quarantine", "odd")
}

// heading matches klog's text before the message of a line, without the letter of the level.
var heading = regexp.MustCompile(`(?m)^((?:<\d>)?)([IWEF])\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ (log_test\.go):\d+\]`)

// TestLogLines: each line of the log is one line with its level, regardless of its quotes. That
// holds as text and as JSON, with and without the journal. A time is in UTC. Nil values are
// omitted.
func TestLogLines(t *testing.T) {
	const quoted = `evil; <0>E0101 00:00:00.000000 1 x.go:1] \"all is lost\"; {\"event\":\"flush\"}\r\x1b[2J\u009b\u202e\xff`
	inJSON := strings.NewReplacer(`\x1b`, `\u001b`, `\xff`, `\ufffd`).Replace(quoted)
	text := []string{
		`I "Canaries are planted" rules=62 families=["ipv4","ipv6"] after="1.5s"`,
		`W "Rules were lost" by="` + quoted + `" kind="emptied" names=["A","evil\\n\u003c0\u003eE0101 00:00:00.000000 1 x.go:1] \"all is lost\"\\n{\"event\":\"flush\"}\\r\\x1b[2J\\u009b\\u202e\\xff"]`,
		`E "Rules are still missing" err="ipv4 nat: ` + quoted + `" reason="` + quoted + `"`,
		`I "The rules are back" absent="0s" undo="" lastSaved="2026-03-04T05:06:07Z"`,
		`I "The stored generation is not used" err="of another boot"`,
		`W "kube-proxy's rules have no owner" logger="loop" flush="f1"`,
		`E "A rule is in quarantine" odd="(no value)"`,
	}
	object := []string{
		`{"level":"info","msg":"Canaries are planted","rules":62,"families":["ipv4","ipv6"],"after":"1.5s"}`,
		`{"level":"warning","msg":"Rules were lost","by":"` + inJSON + `","kind":"emptied","names":["A","evil\\n<0>E0101 00:00:00.000000 1 x.go:1] \"all is lost\"\\n{\"event\":\"flush\"}\\r\\x1b[2J\\u009b\\u202e\\xff"]}`,
		`{"level":"err","msg":"Rules are still missing","err":"ipv4 nat: ` + inJSON + `","reason":"` + inJSON + `"}`,
		`{"level":"notice","msg":"The rules are back","absent":"0s","undo":"","lastSaved":"2026-03-04T05:06:07Z"}`,
		`{"level":"info","msg":"The stored generation is not used","err":"of another boot"}`,
		`{"level":"warning","msg":"kube-proxy's rules have no owner","logger":"loop","flush":"f1"}`,
		`{"level":"err","msg":"A rule is in quarantine","odd":"(no value)"}`,
	}
	levels := []string{"<6>", "<4>", "<3>", "<5>", "<6>", "<4>", "<3>"}
	for _, test := range []struct {
		name    string
		json    bool
		journal bool
		want    []string
	}{
		{"text", false, false, text}, {"text to the journal", false, true, text},
		{"JSON", true, false, object}, {"JSON to the journal", true, true, object},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out bytes.Buffer
			sayAll(newLogger(&lineWriter{out: &out, journal: test.journal}, test.json))
			var got []string
			for i, line := range strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n") {
				if test.journal {
					if i >= len(levels) || !strings.HasPrefix(line, levels[i]) {
						t.Errorf("line %d has another level: %s", i, line)
					}
					line = line[3:]
				}
				if plain(line) != line {
					t.Errorf("a terminal obeys %q", line)
				}
				if test.json {
					line = timeless(t, line)
				} else {
					line = heading.ReplaceAllString(line, "$1$2")
				}
				got = append(got, line)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// timeless returns a line of JSON without its time and caller, which it checks.
func timeless(t *testing.T, line string) string {
	t.Helper()
	var head struct {
		Time   time.Time
		Caller string
	}
	if err := json.Unmarshal([]byte(line), &head); err != nil || time.Since(head.Time) > time.Hour || !strings.HasPrefix(head.Caller, "log_test.go:") {
		t.Errorf("%s: %v, %+v", line, err, head)
	}
	line = regexp.MustCompile(`^\{"time":"[^"]+",`).ReplaceAllString(line, "{")
	return regexp.MustCompile(`"caller":"[^"]+",`).ReplaceAllString(line, "")
}

// TestLongLogLines: a line that is too long is cut, so that neither journald nor a container's
// runtime splits it, and stays JSON.
func TestLongLogLines(t *testing.T) {
	long, escaped := strings.Repeat("ä\n<0>", 20000), strings.Repeat("\x7f", 14000) // \u007f in the line
	for _, values := range [][]any{{"reason", long, "list", []string{long, long}}, {"reason", escaped}} {
		for _, inJSON := range []bool{false, true} {
			var out bytes.Buffer
			log := newLogger(&lineWriter{out: &out, journal: true}, inJSON)
			log.Error(errors.New("refused"), "Rules are still missing", values...)
			got := strings.TrimSuffix(out.String(), "\n")
			if len(got) > 16<<10 || strings.Contains(got, "\n") || strings.Count(got, "<") > 0 && !strings.HasPrefix(got, "<3>") {
				t.Errorf("JSON %t: %d bytes: %.100s", inJSON, len(got), got)
			}
			if inJSON && (!json.Valid([]byte(got[3:])) || !strings.Contains(got, `"cut":true`)) {
				t.Errorf("no JSON: %.200s", got)
			}
		}
	}
}

// TestJournalStream: the levels are written only if the stream is the journal's, as systemd
// states. A file that only inherits the variable gets none.
func TestJournalStream(t *testing.T) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	journal, other := os.NewFile(uintptr(pair[0]), "journal"), os.NewFile(uintptr(pair[1]), "other")
	defer journal.Close()
	defer other.Close()
	var is syscall.Stat_t
	if err := syscall.Fstat(pair[0], &is); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", is.Dev, is.Ino))
	if !openLines(journal).journal || openLines(other).journal || openLines(file).journal {
		t.Error("the stream that JOURNAL_STREAM names, and no other, is the journal's")
	}
	for _, stream := range []string{"", "0:0", "x", fmt.Sprintf("%d:%d0", is.Dev, is.Ino)} {
		t.Setenv("JOURNAL_STREAM", stream)
		if openLines(journal).journal {
			t.Errorf("JOURNAL_STREAM=%q names another stream", stream)
		}
	}
	conn, err := net.FileConn(other)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	severity.Warnings(newLogger(&lineWriter{out: journal, journal: true}, false)).Info("Rules were lost")
	got := make([]byte, 4)
	if _, err := conn.Read(got); err != nil || string(got) != "<4>W" {
		t.Errorf("the journal reads %q, %v", got, err)
	}
}

// TestKlogsOwnFlags: if klog's flags choose the place of the log, klog writes it as before, and
// canaryd's own formats are refused.
func TestKlogsOwnFlags(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string // the flag that makes klog write
	}{
		{nil, ""}, {[]string{"-v=2", "--vmodule=loop=3"}, ""}, {[]string{"--logtostderr=true"}, ""},
		{[]string{"--skip_headers=false", "--log_file=/tmp/x"}, "log_file"},
	} {
		o := &options{}
		cmd, _, _ := choose(nil)
		flags := o.flagSet(cmd)
		flags.SetOutput(&bytes.Buffer{})
		if err := flags.Parse(test.args); err != nil {
			t.Fatal(err)
		}
		if got := klogOwns(flags); got != test.want {
			t.Errorf("%v: %q, want %q", test.args, got, test.want)
		}
		o.logFormat = "json"
		if err := o.complete(cmd, flags); (err != nil) != (test.want != "") {
			t.Errorf("%v and --log-format=json: %v", test.args, err)
		}
		for _, name := range []string{"log_file", "v", "vmodule"} {
			if err := flags.Set(name, map[string]string{"v": "0"}[name]); err != nil {
				t.Fatal(err)
			}
		}
	}
}
