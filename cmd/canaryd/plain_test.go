package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"
)

func TestPlain(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", ""},
		{"a rule", `-A X -m comment --comment "a \"b\"" -j Y`, `-A X -m comment --comment "a \"b\"" -j Y`},
		{"other scripts", "größer 東京", "größer 東京"},
		{"a terminal's title", "X\x1b]0;all is well\x07", `X\x1b]0;all is well\a`},
		{"one byte instead of two", "X\u009b2J", `X\u009b2J`},
		{"a line that looks like ours", "X\nipv4    nat     intact", `X\nipv4    nat     intact`},
		{"over what stands there", "lost\rfine", `lost\rfine`},
		{"a column", "a\tb", `a\tb`},
		{"written backwards", "a\u202eb", `a\u202eb`},
		{"no UTF-8", "a\xff\xfeb", `a\xff\xfeb`},
	} {
		if got := plain(test.text); got != test.want {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
	}
}

// FuzzPlain: the result prints, and what prints is left alone.
func FuzzPlain(f *testing.F) {
	for _, seed := range []string{"", "KUBE-SERVICES", "a\x1b[2Jb", "\u009b", "\xff", "\U000e0001", "\ufffd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := plain(text)
		for _, r := range got {
			if !strconv.IsPrint(r) {
				t.Fatalf("%q becomes %q", text, got)
			}
		}
		if again := plain(got); again != got {
			t.Errorf("%q is not left alone: %q", got, again)
		}
		data, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		var want, back string
		if err := errors.Join(json.Unmarshal(data, &want), json.Unmarshal(plainJSON(data), &back)); err != nil || want != back {
			t.Errorf("JSON that prints says %q, %v; want %q", back, err, want)
		}
	})
}

// A recorder is a sink that writes down what klog would be handed.
type recorder struct{ lines *[]string }

func (recorder) Init(klog.RuntimeInfo) {}
func (recorder) Enabled(int) bool      { return true }
func (r recorder) Info(_ int, message string, values ...any) {
	*r.lines = append(*r.lines, fmt.Sprintf("%s: %v", message, values))
}
func (r recorder) Error(err error, message string, values ...any) {
	*r.lines = append(*r.lines, fmt.Sprintf("%s: %v %v", message, err, values))
}
func (r recorder) WithValues(...any) klog.LogSink { return r }
func (r recorder) WithName(string) klog.LogSink   { return r }

// TestLogLinesAreLines: whatever iptables printed, a line of the log is one line.
func TestLogLinesAreLines(t *testing.T) {
	var lines []string
	log := klog.New(plainSink{recorder{&lines}, &logBound{}})
	cause := errors.New("line 3: no chain EVIL\nI0101 00:00:00.000000 1 x.go:1] \"The rules are back and proved\"")
	log.Error(fmt.Errorf("ipv4 nat: %w", cause), "Rules are still missing", "advice", "a\nb", "reason", cause)
	log.WithName("x").V(2).Info("Chains were left", "chains", []string{"A", "B\x1b[2J\nC"}, "count", 2)
	log.Error(nil, "No error is an error too")
	want := []string{
		`Rules are still missing: ipv4 nat: line 3: no chain EVIL; I0101 00:00:00.000000 1 x.go:1] "The rules are back and proved"` +
			` [advice a; b reason line 3: no chain EVIL; I0101 00:00:00.000000 1 x.go:1] "The rules are back and proved"]`,
		`Chains were left: [chains [A B\x1b[2J\nC] count 2]`,
		`No error is an error too: <nil> []`,
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if s := strings.Join(lines, ""); strings.ContainsAny(s, "\n\x1b") {
		t.Errorf("%q", s)
	}
}
