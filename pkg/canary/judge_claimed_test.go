package canary

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

// claimedHere reports the chains of node that a declared source owns in these tests. The others
// were learned.
func claimedHere(chain string) bool {
	return chain == "KUBE-SERVICES" || strings.HasPrefix(chain, "KUBE-SVC-") || strings.HasPrefix(chain, "KUBE-SEP-")
}

// judged judges node after edits.
func judged(t *testing.T, claimed func(string) bool, quiet bool, edits ...edit) Finding {
	t.Helper()
	text := node
	for _, e := range edits {
		text = e(text)
	}
	want := wantedOf(t, node)
	want.Claimed = claimed
	seen := seenTable(tableOf(t, text))
	seen.Quiet = quiet
	return Judge(want, seen)
}

const other = "KUBE-SVC-BBBBBBBBBBBBBBBB"

func TestWhatIsClaimedMustBeExactlyAsDeclared(t *testing.T) {
	toSVC := "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j " + svc
	toNodePorts := "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS"
	otherRules := "KUBE-SERVICES holds other rules"
	tests := []struct {
		name  string
		edits []edit
		want  []string
	}{
		{"a rule changed", []edit{replaced("10.1.0.1:80", "10.1.0.2:80")}, []string{sep + " holds other rules"}},
		{"a rule deleted", []edit{without(toSVC)}, []string{otherRules}},
		{"a rule added", []edit{with("-A " + svc + " -j RETURN")}, []string{svc + " holds other rules"}},
		{"a rule doubled", []edit{with(toSVC)}, []string{otherRules}},
		{"a jump to a chain of another owner", []edit{with(":corp - [0:0]", "-A KUBE-SERVICES -j corp")}, []string{otherRules}},
		{"another order", []edit{without(toSVC), with(toSVC)}, []string{otherRules}},
		{"a chain emptied that its owner may empty", []edit{flushed(sep)}, []string{sep + " holds other rules"}},
		{"a chain emptied that is never empty", []edit{flushed("KUBE-SERVICES")}, []string{otherRules}},
		{"a chain removed with what jumps to it", []edit{flushed(svc), deleted(sep)}, []string{sep + " is missing", svc + " holds other rules"}},
		{"an undeclared chain", []edit{with(":" + other + " - [0:0]")}, []string{other + " is not declared"}},
		{"two that are tied together", []edit{with(":"+other+" - [0:0]", ":KUBE-SEP-B - [0:0]", "-A "+other+" -j KUBE-SEP-B", "-A KUBE-SEP-B -j "+svc)},
			[]string{other + " is not declared", "KUBE-SEP-B is not declared"}},
		{"a jump deleted by name", []edit{without(jumpPre)}, []string{"jumps differ"}},
		{"a jump more in a jumped chain", []edit{with("-A OUTPUT -p tcp -j KUBE-SERVICES")}, []string{"jumps differ"}},
		{"a jump more in another chain", []edit{with("-A INPUT -j " + svc)}, []string{"jumps differ"}},
		{"a jump doubled", []edit{with(jumpOut)}, []string{"jumps differ"}},
		{"a jump reworded", []edit{without(jumpOut), with("-A OUTPUT -p tcp -j KUBE-SERVICES")}, []string{"jumps differ"}},
		{"a jump moved to another chain", []edit{without(jumpOut), with("-A INPUT -j KUBE-SERVICES")}, []string{"jumps differ"}},
		{"much at once", []edit{without(toNodePorts, jumpPre), with("-A " + sep + " -j RETURN")}, []string{sep + " holds other rules", otherRules, "jumps differ"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			for _, quiet := range []bool{false, true} {
				got := judged(t, claimedHere, quiet, test.edits...)
				if d := cmp.Diff(slices.Sorted(slices.Values(test.want)), inShort(got.Drift)); d != "" {
					t.Errorf("quiet %t (-want +got):\n%s", quiet, d)
				}
				got.Drift = nil
				if d := cmp.Diff(Finding{Verdict: Drifted}, got, cmpopts.EquateEmpty()); d != "" {
					t.Errorf("quiet %t, besides (-want +got):\n%s", quiet, d)
				}
				// Without a source that claims the chain, the same is its owner's decision, or
				// a loss of another kind.
				if got := judged(t, nil, quiet, test.edits...); got.Verdict == Drifted || got.Drift != nil {
					t.Errorf("quiet %t, unclaimed: %s, %v", quiet, got.Verdict, got.Drift)
				}
			}
		})
	}
}

func TestBesideClaimedChainsTheOthersAreJudgedAsEver(t *testing.T) {
	postRule := "-A KUBE-POSTROUTING -j MASQUERADE"
	tests := []struct {
		name  string
		edits []edit
		quiet bool
		want  summary
		drift []string
	}{
		{name: "nothing happened", want: summary{Verdict: Intact}},
		{name: "foreign rules", edits: []edit{without("-A PREROUTING -i lo -j ACCEPT"), with(":corp - [0:0]", "-A PREROUTING -j corp")}, want: summary{Verdict: Intact}},
		{name: "a jump in another place", edits: []edit{without(jumpPre), with(jumpPre)}, want: summary{Verdict: Intact}},
		{name: "chains in another order", edits: []edit{deleted(sep), with(":"+sep+" - [0:0]", "-A "+sep+" -p tcp -m tcp -j DNAT --to-destination 10.1.0.1:80")}, want: summary{Verdict: Intact}},
		{name: "a rule of theirs", edits: []edit{with("-A KUBE-NODEPORTS -j RETURN")}, want: summary{Verdict: Changed}},
		{name: "a chain of theirs", edits: []edit{with(":KUBE-FORWARD - [0:0]")}, want: summary{Verdict: Changed}},
		{name: "a jump of theirs more", edits: []edit{with("-A INPUT -j KUBE-MARK-MASQ")}, want: summary{Verdict: Changed}},
		{name: "a jump of theirs doubled", edits: []edit{with(jumpPost)}, want: summary{Verdict: Changed}},
		{name: "a jump of theirs deleted", edits: []edit{without(jumpPost)}, want: summary{Verdict: Changed, Waiting: []string{jumpPost}}},
		{name: "and left so", edits: []edit{without(jumpPost)}, quiet: true, want: summary{Verdict: JumpsMissing, Jumps: []string{jumpPost}}},
		{name: "a chain of theirs emptied", edits: []edit{flushed("KUBE-POSTROUTING")}, want: summary{Verdict: Emptied, Emptied: []string{"KUBE-POSTROUTING"}}},
		{name: "a chain of theirs emptied that may be", edits: []edit{flushed("KUBE-NODEPORTS")}, want: summary{Verdict: Changed}},

		// Both.
		{
			name: "their rule and ours", edits: []edit{without(postRule), with("-A " + svc + " -j RETURN")},
			want: summary{Verdict: Drifted}, drift: []string{svc + " holds other rules"},
		},
		{
			name: "their jump waits during a drift", edits: []edit{without(jumpPost, jumpPre)},
			want: summary{Verdict: Drifted, Waiting: []string{jumpPost}}, drift: []string{"jumps differ"},
		},
		{
			name: "their loss is the graver", edits: []edit{flushed("KUBE-POSTROUTING"), without(jumpPre)},
			want: summary{Verdict: Emptied, Emptied: []string{"KUBE-POSTROUTING"}}, drift: []string{"jumps differ"},
		},
		{
			name: "a built-in chain flushed: the witness shows it", edits: []edit{flushed("PREROUTING")},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"PREROUTING"}}, drift: []string{"jumps differ"},
		},
		{
			name: "the witness alone", edits: []edit{without(`-A OUTPUT -m comment --comment "canaryd-witness:0123456789abcdef"`)},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"OUTPUT"}},
		},

		// The canary.
		{
			name: "the canary lost, and a rule changed", edits: []edit{flushed(DefaultChain), replaced("10.1.0.1:80", "10.1.0.2:80")},
			want: summary{Verdict: Emptied, MarkLost: true},
		},
		{
			name: "everything flushed", edits: []edit{flushed()},
			want: summary{Emptied, true, jumped, jumps3, nil, chains, nil},
		},
		{
			name: "an old file restored", edits: []edit{replaced(string(nonce), "fedcba9876543210"), with(":" + other + " - [0:0]")},
			want: summary{Verdict: Replaced, MarkLost: true, Witnesses: jumped},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := judged(t, claimedHere, test.quiet, test.edits...)
			if d := cmp.Diff(test.want, summarize(got), cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if d := cmp.Diff(test.drift, inShort(got.Drift), cmpopts.EquateEmpty()); d != "" {
				t.Errorf("drift (-want +got):\n%s", d)
			}
		})
	}
}

func TestAllOrNothingClaimed(t *testing.T) {
	all, none := func(string) bool { return true }, func(string) bool { return false }
	change := with("-A KUBE-NODEPORTS -j RETURN")
	for name, test := range map[string]struct {
		claimed func(string) bool
		want    Verdict
	}{"all": {all, Drifted}, "none": {none, Changed}, "nil": {nil, Changed}} {
		if got := judged(t, test.claimed, false, change).Verdict; got != test.want {
			t.Errorf("%s claimed: %s, want %s", name, got, test.want)
		}
		if got := judged(t, test.claimed, false).Verdict; got != Intact {
			t.Errorf("%s claimed and nothing happened: %s", name, got)
		}
		want := wantedOf(t, node)
		want.Claimed = test.claimed
		broken := errors.New("permission denied")
		if got := Judge(want, Seen{Err: broken, Table: tableOf(t, change(node))}).Verdict; got != Unknown {
			t.Errorf("%s claimed and nothing could be read: %s", name, got)
		}
		if got := Judge(want, Seen{}).Verdict; got != TableDeleted {
			t.Errorf("%s claimed and the table gone: %s", name, got)
		}
		want.Mark = Mark{}
		if got := Judge(want, seenTable(tableOf(t, change(node)))).Verdict; got != Unknown {
			t.Errorf("%s claimed and nothing planted: %s", name, got)
		}
	}
}

// inShort reports a difference once for each chain, and once for all jumps.
func inShort(d rules.Difference) []string {
	var list []string
	for _, v := range d {
		text := v.Chain + " holds other rules"
		switch v.Kind {
		case rules.ChainGone:
			text = v.Chain + " is missing"
		case rules.ChainUnwanted:
			text = v.Chain + " is not declared"
		case rules.JumpMissing, rules.JumpMisplaced, rules.JumpDoubled, rules.JumpUnwanted:
			text = "jumps differ"
		}
		if !slices.Contains(list, text) {
			list = append(list, text)
		}
	}
	slices.Sort(list)
	return list
}
