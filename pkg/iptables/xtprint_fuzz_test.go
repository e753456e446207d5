package iptables

import (
	"strings"
	"testing"
)

// FuzzListing: no line of "-S CHAIN NUMBER" is taken for a rule twice, and none
// is split. No line is assigned to a chain that was not requested.
func FuzzListing(f *testing.F) {
	f.Add("-A A -j RETURN\n-A INPUT -j A\n")
	f.Add("-A A -m comment --comment \"x\ny\" -j DROP\n")
	f.Add("-A A\n-A INPUT -j A")
	f.Add("-A A -j A\r\n\x00-A INPUT\n")
	wanted := []ruleAt{{"A", 0}, {"INPUT", 4}}
	f.Fuzz(func(t *testing.T, text string) {
		printed, whole := parseListing([]byte(text), wanted)
		if whole != (len(printed) == len(wanted)) {
			t.Fatalf("%d rules, whole: %t", len(printed), whole)
		}
		if lines := strings.Count(strings.TrimSuffix(text, "\n"), "\n") + 1; whole && lines != len(wanted) {
			t.Errorf("%d rules of %d lines", len(printed), lines)
		}
		for _, r := range printed {
			if strings.ContainsAny(r.Spec, "\n") {
				t.Errorf("over several lines: %q", r.Spec)
			}
		}
	})
}
