package iptables

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// FuzzListing: of what "-S CHAIN" printed no line is taken for a rule twice, none is split, and
// none goes to another chain than those that were asked for.
func FuzzListing(f *testing.F) {
	f.Add("-N A\n-A A -j RETURN\n-P INPUT ACCEPT\n-A INPUT -j A\n")
	f.Add("# Table `filter' contains incompatible base-chains, use 'nft' tool to list them.\n-N A\n-A A -m comment --comment \"x\ny\" -j DROP\n")
	f.Add("-A A -j RETURN\n-N A")
	f.Add("-N A\n-N A\n-A INPUT -j A\n-P INPUT DROP\r\n\x00")
	chains := []printedChain{{place: Place{Table: rules.Filter, Chain: "A"}}, {place: Place{Table: rules.Filter, Chain: "INPUT"}}}
	f.Fuzz(func(t *testing.T, text string) {
		listed, whole := parseListing([]byte(text), chains)
		if len(listed) > len(chains) {
			t.Fatalf("%d chains", len(listed))
		}
		got, appended := 0, strings.Count("\n"+text, "\n-A ")
		for i, l := range listed {
			if l.cut && (whole || i < len(listed)-1) {
				t.Errorf("chain %d is cut and not the last one", i)
			}
			for _, r := range l.rules {
				if got++; strings.ContainsAny(r.Spec, "\n") {
					t.Errorf("over several lines: %q", r.Spec)
				}
			}
		}
		if got > appended || whole && got != appended+strings.Count("\n"+text+"\n", "\n-A\n") {
			t.Errorf("%d rules of %d lines, whole: %t", got, appended, whole)
		}
	})
}
