package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/pkg/rules"
)

// secret is in all text that an archive must not show.
const secret = "hunter2"

// dumping makes a cluster whose nodes answer with secrets wherever rules may be quoted.
func dumping(t *testing.T) *cluster {
	c := newCluster(t)
	s := healthy(460)
	s.Flushes = []api.Flush{flushOf("a1", "nft", "puppet.service", time.Hour)}
	s.Flushes[0].Detail = "-A X -m comment --comment " + secret
	s.Quarantined = []api.Quarantined{{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-SERVICES", Rule: "-d " + secret, Reason: secret}}
	s.DeclaredRefused = []api.Refused{{Family: rules.IPv4, Table: rules.Nat, Rule: secret, Reason: secret, Meaning: "an address is wrong"}}
	s.SourceErrors = []api.SourceError{{Source: "manifest", Where: "a.yaml:3", Reason: secret, InForce: api.LastGood}}
	pod := c.node("node-1", s)
	c.pods[0]["status"].(map[string]any)["containerStatuses"].([]any)[0].(map[string]any)["restartCount"] = 2
	c.write(pod, "version", 0, `{"version":"0.1.0","commit":"0123456789ab","go":"go1.26","secret":"`+secret+`"}`, "")
	c.write(pod, "logs", 0, strings.Join([]string{
		`W1127 11:00:00.000001       1 loop.go:99] "Rules are being flushed" flush="660c8b90ccb7b" tables="ipv4 nat emptied" noticedAfter="320µs" next="replaying the generation"`,
		`W1127 11:00:00.000002       1 loop.go:101] "Rules were lost" flush="660c8b90ccb7b" rules=174 chains=60 by="pid 13626 (nft -f ` + secret + `)"`,
		`E1127 11:00:00.000003       1 loop.go:103] "A rule is in quarantine" err="line 3: -A X -d ` + secret + `" rules=["-A X -s ` + secret + `"] table="nat" left=3`,
		`{"time":"2026-11-27T11:00:00Z","level":"err","caller":"loop.go:1","msg":"A rule is in quarantine","reason":"` + secret + `","rules":["` + secret + `"],"table":"nat","` + secret + ` ":1}`,
		`{"event":"flush","node":"node-1","final":true,"id":"a1","time":"2026-11-27T11:00:00Z","kind":"emptied","culprit":{"pid":7,"comm":"nft","command":"nft ` + secret + `"},"detail":"` + secret + `","outcome":"proved","` + secret + `":1}`,
		`iptables-restore: line 7 failed: -A X -d ` + secret,
		`panic: runtime error: index out of range [` + secret,
		"",
		"goroutine 1 [running]:",
		"main.main(" + secret + ")",
		"\t/src/cmd/canaryd/main.go:139 +0x1d",
		`I1127 11:00:00.000004       1 loop.go:105] "Broken` + secret,
		`I1127 11:00:00.000005       1 loop.go:105] "It is odd" table=nat ` + secret + ` rules=1`,
		`I1127 11:00:00.000006       1 loop.go:105] "It is odd" rules="` + secret + `"`,
		"",
	}, "\n"), "")
	c.write(pod, "previous", 0, `I1127 10:00:00.000000       1 main.go:1] "Canaries are planted" family="ipv4"`+"\n", "")

	pod = c.node("../../etc/passwd", healthy(1))
	c.write(pod, "version", 0, "{}", "")
	c.write(pod, "logs", 0, "\x1b[2J\n", "")
	c.write(c.pod("silent", running), "status", 1, "", "Error from server: error dialing backend: dial tcp 10.1.2.3:10250: connect: connection refused\n")
	return c
}

// TestWithoutAddresses: addresses and URLs are removed; times, versions and numbers stay.
func TestWithoutAddresses(t *testing.T) {
	for text, want := range map[string]string{
		"dial tcp 10.1.2.3:10250: refused":       "dial tcp (address) refused",
		"dial tcp [fd00::1]:10250: refused":      "dial tcp [(address)]:10250: refused",
		"at 10.1.2.3.":                           "at (address)",
		`Get "https://api.example/x": EOF`:       `Get "(address)": EOF`,
		"at ::1, fe80::1 and ::ffff:10.0.0.1":    "at (address), (address) and (address)",
		"2026-11-27T11:00:00Z 11:00:00.5 1.8.11": "2026-11-27T11:00:00Z 11:00:00.5 1.8.11",
		"660c8b90ccb7b 0.002 abc.def a:b":        "660c8b90ccb7b 0.002 abc.def a:b",
		// The letters before a colon belong to a word.
		"node:10.1.2.3 code:10.1.2.3:53.": "node:(address) code:(address)",
		"10.1.2.3:dead face.10.1.2.3":     "(address):dead face.(address)",
		"node:2001:db8:0:0:0:0:0:1":       "node:(address)",
	} {
		if got := string(withoutAddresses([]byte(text))); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}

// TestSysdump: the archive has the files of each node, lists the nodes with missing files, and
// shows nothing that HTTP does not.
func TestSysdump(t *testing.T) {
	c := dumping(t)
	path := filepath.Join(c.dir, "dump.tar.gz")
	code, out, said := c.run(3, "", "sysdump", "--file="+path)
	if code != exitError {
		t.Errorf("exit code %d, want %d\n%s", code, exitError, said)
	}
	if !strings.Contains(out, "3 nodes") || !strings.Contains(out, "of 1 something is missing") {
		t.Errorf("printed %q", out)
	}
	files := unpacked(t, path)
	var all strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		all.WriteString("=== " + name + "\n" + files[name])
	}
	if strings.Contains(all.String(), secret) {
		t.Error("the archive has secrets")
	}
	golden.Compare(t, "sysdump.golden", []byte(strings.ReplaceAll(all.String(), built(), "VERSION")))

	if code, _, said := c.run(3, "", "sysdump", "--file="+path); code != exitError || !strings.Contains(said, "file exists") {
		t.Errorf("over a file that is there: exit code %d, %s", code, said)
	}
	if diff := cmp.Diff(files, unpacked(t, path)); diff != "" {
		t.Errorf("the first archive has changed:\n%s", diff)
	}
	info, err := os.Stat(path)
	c.must(err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("the archive has the mode %o", info.Mode().Perm())
	}
}

// TestUnredacted: with --unredacted the archive has everything, and says so.
func TestUnredacted(t *testing.T) {
	c := dumping(t)
	path := filepath.Join(c.dir, "dump.tar.gz")
	if code, _, said := c.run(3, "", "sysdump", "--file="+path, "--unredacted", "node-1"); code != exitOK {
		t.Errorf("exit code %d: %s", code, said)
	}
	files := unpacked(t, path)
	for _, name := range []string{"status.json", "flushes.json", "log.txt"} {
		if !strings.Contains(files["canaryd-sysdump/nodes/node-1/"+name], secret) {
			t.Errorf("%s is redacted", name)
		}
	}
	if !strings.Contains(files["canaryd-sysdump/README.txt"], "NOTHING is redacted") {
		t.Error("README.txt does not say that nothing is redacted")
	}
}

// TestNoArchive: if the archive cannot be written, no part of it is left.
func TestNoArchive(t *testing.T) {
	c := dumping(t)
	code, _, said := c.run(3, "", "sysdump", "--file="+filepath.Join(c.dir, "no", "folder.tar.gz"))
	if code != exitError || !strings.Contains(said, "no such file or directory") {
		t.Errorf("exit code %d: %s", code, said)
	}
}

// built returns the version of this test, and the commit.
func built() string {
	number, commit := version()
	return number + ", commit " + commit
}

// unpacked returns the files of an archive by their paths. No path leads out of it.
func unpacked(t *testing.T, path string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	zip, err := gzip.NewReader(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for archive := tar.NewReader(zip); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		if !filepath.IsLocal(header.Name) || !strings.HasPrefix(header.Name, "canaryd-sysdump/") || files[header.Name] != "" {
			t.Errorf("a file is called %q", header.Name)
		}
		all, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		files[header.Name] = string(all)
	}
}

// FuzzRedact: a redacted log is printable, and has no word that the line has only in places
// where rules may be quoted. Each line of a message has one line.
func FuzzRedact(f *testing.F) {
	f.Add("-A X -d 10.0.0.1", "rules")
	f.Add(`a" table="b`, "err")
	f.Add("\\\" x=\x1b[2J", "by")
	f.Add(`]}{["`, "reason")
	f.Fuzz(func(t *testing.T, text, key string) {
		const mark = "s3cr3tm4rk"
		at := `I1127 11:00:00.000004       1 loop.go:105] `
		words := []string{
			at + `"A message" err=` + strconv.Quote(text+mark) + ` table="nat" rules=` + strconv.Quote(mark+text),
			at + `"A message" by=[` + strconv.Quote(mark) + `] rules={"a":` + strconv.Quote(text+mark) + `}`,
			at + `"A message" reason=` + mark + text,
			text + mark,
			`{"level":"err","msg":"A message","reason":` + strconv.Quote(text+mark) + `}`,
			`{"event":"flush","culprit":{"pid":1,"comm":"x","command":` + strconv.Quote(text+mark) + `},"detail":` + strconv.Quote(mark) + `}`,
		}
		if harmless[key] == nil {
			words = append(words, `{"level":"err","msg":"A message",`+strconv.Quote(key)+`:`+strconv.Quote(mark)+`}`)
		}
		for _, word := range words {
			if strings.Contains(text, at) || strings.Contains(key, mark) {
				continue
			}
			got := string(redactLog([]byte(word), false))
			if strings.Contains(got, mark) {
				t.Errorf("%q becomes %q", word, got)
			}
			for line := range strings.Lines(got) {
				if strings.ContainsAny(strings.TrimSuffix(line, "\n"), "\x1b\r\n\x07") {
					t.Errorf("%q becomes %q", word, got)
				}
			}
		}
		redactLog([]byte(text), false)
		redactLog([]byte(text), true)
		if objects, values := sizes([]byte(text)); objects > values || values > len(text) {
			t.Errorf("%d objects, %d values in %q", objects, values, text)
		}
	})
}
