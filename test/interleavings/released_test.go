package interleavings

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTheCheckerKnowsWhatStaysAwayWithAChain: canaryd restores a chain without jumps to chains
// that their owners have removed. The result may equal an older version. It does not count as
// that version, and excuses nothing else.
func TestTheCheckerKnowsWhatStaysAwayWithAChain(t *testing.T) {
	const chain, a, b = "KUBE-SERVICES", "KUBE-SVC-AAAAAAAAAAAAAAAA", "KUBE-SVC-BBBBBBBBBBBBBBBB"
	selector, err := protect.NewSelector(scenario.Protect)
	if err != nil {
		t.Fatal(err)
	}
	nat := func(lines ...string) *rules.Table {
		set := savefile.Tables(t, section(rules.Nat, lines...))
		return set[rules.Nat]
	}
	of := func(targets ...string) []rules.Rule {
		lines := []string{":" + chain + " - [0:0]"}
		for _, target := range targets {
			lines = append(lines, "-A "+chain+" -j "+target)
		}
		return content(nat(lines...).Chain(chain))
	}
	known := &chapter{versions: [][]rules.Rule{nil, of("RETURN"), of(a, b, "RETURN")}, captured: 2}
	for _, test := range []struct {
		name   string
		outage string
		read   *rules.Table
		now    []rules.Rule
		want   bool
	}{
		{"both were removed", "emptied", nat(":" + chain + " - [0:0]"), of("RETURN"), true},
		{"one was, the other comes back", "emptied", nat(":" + b + " - [0:0]"), of(b, "RETURN"), true},
		{"one was, and the other stays away, too", "emptied", nat(":" + b + " - [0:0]"), of("RETURN"), false},
		{"none was", "emptied", nat(":"+a+" - [0:0]", ":"+b+" - [0:0]"), of("RETURN"), false},
		{"a rule that leads to no chain of theirs stays away", "emptied", nat(":"+a+" - [0:0]", ":"+b+" - [0:0]"), of(a, b), false},
		{"nothing shows who removed them", "deleted", nat(":" + chain + " - [0:0]"), of("RETURN"), false},
		{"there was no flush", "", nat(":" + chain + " - [0:0]"), of("RETURN"), false},
	} {
		p := place{rules.IPv4, rules.Nat, chain}
		l := &ledger{
			protects: selector.Protects, outage: map[place]string{{rules.IPv4, rules.Nat, ""}: test.outage},
			read: map[rules.Family]rules.Ruleset{rules.IPv4: {rules.Nat: test.read}},
		}
		if got := l.released(p, known, test.now); got != test.want {
			t.Errorf("%s: %t, want %t", test.name, got, test.want)
		}
	}
}
