package canary

import (
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const old = Nonce("fedcba9876543210")

func TestEveryNonceIsNew(t *testing.T) {
	a, b := NewNonce(), NewNonce()
	if a == b || !regexp.MustCompile(`^[0-9a-f]{16}$`).MatchString(string(a)) {
		t.Errorf("nonces %q and %q", a, b)
	}
}

func TestIsMarkKnowsOurRulesAndNoOthers(t *testing.T) {
	tests := []struct {
		spec          string
		mark, witness bool
	}{
		{nonce.Rule().Spec, true, false},
		{nonce.Witness().Spec, true, true},
		{old.Witness().Spec, true, true},
		{`-m comment --comment canaryd-witness:1`, true, true},
		{`-m comment --comment "canaryd-witness:1" -j DROP`, false, false},
		{`-s 10.0.0.1/32 -m comment --comment "canaryd-witness:1"`, false, false},
		{`-m comment --comment "not canaryd-witness:1"`, false, false},
		{`-m comment --comment "canaryd-other:1"`, false, false},
		{`-m comment --comment "canaryd-canary:1" -m comment --comment "canaryd-witness:1"`, false, false},
		{`-m comment --comment "kubernetes"`, false, false},
		{"", false, false},
	}
	for _, test := range tests {
		r, err := rules.ParseRule(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := IsMark(r); got != test.mark {
			t.Errorf("IsMark(%s) = %v", test.spec, got)
		}
		if got := IsWitness(r); got != test.witness {
			t.Errorf("IsWitness(%s) = %v", test.spec, got)
		}
	}
}

func TestOnlyKeepsWhatWasPlantedInTheTablesAsked(t *testing.T) {
	marks := Marks{
		rules.IPv4.Table(rules.Nat): {Nonce: nonce, Witnessed: []string{"OUTPUT"}}, rules.IPv4.Table(rules.Filter): {Nonce: old}, rules.IPv4.Table(rules.Mangle): {},
		rules.IPv6.Table(rules.Nat): {Nonce: old},
	}
	some := marks.Only(rules.IPv4, []rules.TableName{rules.Mangle, rules.Nat})
	want := Marks{rules.IPv4.Table(rules.Nat): {Nonce: nonce, Witnessed: []string{"OUTPUT"}}}
	if diff := cmp.Diff(want, some); diff != "" {
		t.Errorf("marks (-want +got):\n%s", diff)
	}
	seen := iptables.Probed{Holdings: map[iptables.Place]iptables.Holding{
		{Table: rules.Nat, Chain: DefaultChain}: {Presence: iptables.Present, Rules: 1, Comments: []string{nonce.Comment()}},
		{Table: rules.Nat, Chain: "OUTPUT"}:     {Presence: iptables.Present, Rules: 1, Comments: []string{nonce.WitnessComment()}},
	}}
	if !some.Standing(rules.IPv4, DefaultChain, seen) {
		t.Error("the mark stands, whatever became of those that were not asked for")
	}
}

func TestResolveTellsWhichOfTwoPlantingsStands(t *testing.T) {
	mark := Mark{Nonce: old, Witnessed: []string{"INPUT"}}
	next := Mark{Nonce: nonce, Witnessed: []string{"OUTPUT"}, Tried: &Mark{Nonce: "never"}}
	tried := mark.Trying(next)
	landed := Mark{Nonce: nonce, Witnessed: []string{"OUTPUT"}}
	if mark.Tried != nil {
		t.Fatal("Trying changed the mark that it was called on")
	}
	tests := []struct {
		name  string
		mark  Mark
		table *rules.Table
		want  Mark
	}{
		{"the write landed", tried, tableOf(t, node), landed},
		{"the write did not land", tried, tableOf(t, replaced(string(nonce), string(old))(node)), tried},
		{"a third canary stands", tried, tableOf(t, replaced(string(nonce), "0")(node)), tried},
		{"the canary was emptied", tried, tableOf(t, flushed()(node)), tried},
		{"the canary is one of two rules", tried, tableOf(t, with("-A KUBE-CANARYD-CANARY -j RETURN")(node)), tried},
		{"the table is gone", tried, nil, tried},
		{"nothing was tried", mark, tableOf(t, node), mark},
	}
	for _, test := range tests {
		if d := cmp.Diff(test.want, test.mark.Resolve(DefaultChain, test.table)); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
	}
}

func TestWithLeavesTheMarksAlone(t *testing.T) {
	m := Marks{rules.IPv4.Table(rules.Nat): {Nonce: old}}
	got := m.With(rules.IPv4.Table(rules.Nat), Mark{Nonce: nonce}).With(rules.IPv6.Table(rules.Filter), Mark{Nonce: nonce})
	if d := cmp.Diff(Marks{rules.IPv4.Table(rules.Nat): {Nonce: old}}, m); d != "" {
		t.Errorf("the original (-want +got):\n%s", d)
	}
	want := Marks{rules.IPv4.Table(rules.Nat): {Nonce: nonce}, rules.IPv6.Table(rules.Filter): {Nonce: nonce}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestAProbeLooksAtEveryCanaryAndEveryWitness(t *testing.T) {
	m := Marks{rules.IPv4.Table(rules.Filter): {Nonce: nonce, Witnessed: []string{"INPUT", "FORWARD"}},
		rules.IPv4.Table(rules.Mangle): {Nonce: nonce}}
	want := []iptables.Place{
		{Table: rules.Mangle, Chain: "C"}, {Table: rules.Filter, Chain: "C"},
		{Table: rules.Filter, Chain: "INPUT"}, {Table: rules.Filter, Chain: "FORWARD"},
	}
	if d := cmp.Diff(want, m.Places(rules.IPv4, "C")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	m[rules.IPv4.Table(rules.Filter)] = m[rules.IPv4.Table(rules.Filter)].Trying(Mark{Nonce: old, Witnessed: []string{"FORWARD", "OUTPUT"}})
	want = append(want, iptables.Place{Table: rules.Filter, Chain: "OUTPUT"})
	if d := cmp.Diff(want, m.Places(rules.IPv4, "C")); d != "" {
		t.Errorf("while others are tried (-want +got):\n%s", d)
	}
	if got := m.Places(rules.IPv6, "C"); got != nil {
		t.Errorf("places of a family without marks: %v", got)
	}
}

func TestVerdictsOfMarks(t *testing.T) {
	const f = rules.IPv4
	m := Marks{f.Table(rules.Nat): {Nonce: nonce, Witnessed: []string{"OUTPUT"}}}
	canary, out := iptables.Place{Table: rules.Nat, Chain: DefaultChain}, iptables.Place{Table: rules.Nat, Chain: "OUTPUT"}
	present := func(rules int, comments ...string) iptables.Holding {
		return iptables.Holding{Presence: iptables.Present, Rules: rules, Comments: comments}
	}
	good, witness := present(1, nonce.Comment()), present(9, "another rule's", nonce.WitnessComment())
	tests := []struct {
		name string
		seen map[iptables.Place]iptables.Holding
		want Verdict
	}{
		{"all stand", map[iptables.Place]iptables.Holding{canary: good, out: witness}, Intact},
		{"the table is gone", map[iptables.Place]iptables.Holding{canary: {Presence: iptables.NoTable}, out: {Presence: iptables.NoTable}}, TableDeleted},
		{"the probe did not look", nil, TableDeleted},
		{"the chain is gone", map[iptables.Place]iptables.Holding{canary: {Presence: iptables.NoChain}, out: witness}, ChainDeleted},
		{"the chain is empty", map[iptables.Place]iptables.Holding{canary: present(0), out: witness}, Emptied},
		{"another nonce", map[iptables.Place]iptables.Holding{canary: present(1, old.Comment()), out: witness}, Replaced},
		{"a rule more", map[iptables.Place]iptables.Holding{canary: present(2, nonce.Comment()), out: witness}, Replaced},
		{"a comment more", map[iptables.Place]iptables.Holding{canary: present(2, nonce.Comment(), "x"), out: witness}, Replaced},
		{"a rule without a comment", map[iptables.Place]iptables.Holding{canary: present(1), out: witness}, Replaced},
		{"the witness is gone", map[iptables.Place]iptables.Holding{canary: good, out: present(3, "another rule's")}, JumpsMissing},
		{"the witness is old", map[iptables.Place]iptables.Holding{canary: good, out: present(1, old.WitnessComment())}, JumpsMissing},
		{"the built-in chain is gone", map[iptables.Place]iptables.Holding{canary: good, out: {Presence: iptables.NoChain}}, JumpsMissing},
	}
	for _, test := range tests {
		seen := iptables.Probed{Holdings: test.seen}
		want := map[rules.TableName]Verdict{rules.Nat: test.want}
		if d := cmp.Diff(want, m.Verdicts(f, DefaultChain, seen)); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
		if got := m.Standing(f, DefaultChain, seen); got != (test.want == Intact) {
			t.Errorf("%s: Standing is %v", test.name, got)
		}
		if got := m.CanaryPresent(f, rules.Nat, DefaultChain, seen); got != (test.want == Intact || test.want == JumpsMissing) {
			t.Errorf("%s: CanaryPresent is %v", test.name, got)
		}
	}
	if m.CanaryPresent(f, rules.Filter, DefaultChain, iptables.Probed{}) {
		t.Error("a canary that was never planted is present")
	}
}

// TestVerdictsKnowWhatWasTried: a write of canaryd with an unknown result must not count as a
// flush, whether the kernel accepted it or not.
func TestVerdictsKnowWhatWasTried(t *testing.T) {
	const f, tried = rules.IPv4, Nonce("00000000000000ff")
	mark := Mark{Nonce: nonce, Witnessed: []string{"OUTPUT"}}
	m := Marks{f.Table(rules.Nat): mark.Trying(Mark{Nonce: tried, Witnessed: []string{"INPUT"}})}
	place := func(chain string) iptables.Place { return iptables.Place{Table: rules.Nat, Chain: chain} }
	probed := func(inCanary, inOutput, inInput string) iptables.Probed {
		h := map[iptables.Place]iptables.Holding{}
		for chain, comment := range map[string]string{DefaultChain: inCanary, "OUTPUT": inOutput, "INPUT": inInput} {
			h[place(chain)] = iptables.Holding{Presence: iptables.Present, Rules: 1, Comments: []string{comment}}
		}
		return iptables.Probed{Holdings: h}
	}
	for _, test := range []struct {
		name string
		seen iptables.Probed
		want Verdict
	}{
		{"it came about", probed(tried.Comment(), "-", tried.WitnessComment()), Intact},
		{"it did not", probed(nonce.Comment(), nonce.WitnessComment(), "-"), Intact},
		{"it came about, and the witness was flushed", probed(tried.Comment(), nonce.WitnessComment(), "-"), JumpsMissing},
		{"it did not, and the witness was flushed", probed(nonce.Comment(), "-", tried.WitnessComment()), JumpsMissing},
		{"neither stands", probed(old.Comment(), nonce.WitnessComment(), tried.WitnessComment()), Replaced},
	} {
		if got := m.Verdicts(f, DefaultChain, test.seen)[rules.Nat]; got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
		if got := m.CanaryPresent(f, rules.Nat, DefaultChain, test.seen); got != (test.want != Replaced) {
			t.Errorf("%s: CanaryPresent is %v", test.name, got)
		}
	}
}
