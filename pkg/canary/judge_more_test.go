package canary

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestJudgeOfATableThatIsGone(t *testing.T) {
	got := summarize(Judge(wantedOf(t, node), Seen{}))
	want := summary{TableDeleted, true, jumped, jumps3, nil, nil, chains}
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestWhatCannotBeReadIsUnknownAndNeverLoss(t *testing.T) {
	broken := errors.New("permission denied")
	for name, seen := range map[string]Seen{
		"nothing was read":         {Err: broken},
		"a flushed table with it":  {Err: broken, Table: tableOf(t, flushed()(node))},
		"an untouched one with it": {Err: broken, Table: tableOf(t, node), Quiet: true},
	} {
		got := Judge(wantedOf(t, node), seen)
		if d := cmp.Diff(Finding{Verdict: Unknown, Err: broken}, got, cmpopts.EquateErrors()); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
		if got.Verdict.Loss() {
			t.Errorf("%s: it counts as loss", name)
		}
	}
}

func TestWhatWasNeverPlantedIsUnknown(t *testing.T) {
	want := wantedOf(t, node)
	want.Mark = Mark{}
	for name, seen := range map[string]Seen{
		"no table": {}, "a table": seenTable(tableOf(t, node)), "a flushed one": seenTable(tableOf(t, flushed()(node))),
	} {
		if d := cmp.Diff(Finding{Verdict: Unknown}, Judge(want, seen)); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

func TestFilterHasItsOwnChainsThatAreNeverEmpty(t *testing.T) {
	text := `*filter
:INPUT ACCEPT [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-FORWARD -j DROP
-A KUBE-FIREWALL -j DROP
-A KUBE-SERVICES -j REJECT --reject-with icmp-port-unreachable
COMMIT
`
	for chain, want := range map[string]Verdict{"KUBE-FORWARD": Emptied, "KUBE-FIREWALL": Emptied, "KUBE-SERVICES": Changed} {
		if got := Judge(wantedOf(t, text), seenTable(tableOf(t, flushed(chain)(text)))).Verdict; got != want {
			t.Errorf("%s emptied: %s, want %s", chain, got, want)
		}
		// In mangle these names have no meaning.
		mangle := strings.Replace(text, "*filter", "*mangle", 1)
		if got := Judge(wantedOf(t, mangle), seenTable(tableOf(t, flushed(chain)(mangle)))).Verdict; got != Changed {
			t.Errorf("%s emptied in mangle: %s, want %s", chain, got, Changed)
		}
	}
}

func TestAJumpThatIsWantedTwiceAndStandsOnceIsMissingOnce(t *testing.T) {
	twice := with(jumpOut)(node)
	seen := seenTable(tableOf(t, node))
	seen.Quiet = true
	got := summarize(Judge(wantedOf(t, twice), seen))
	want := summary{Verdict: JumpsMissing, Jumps: []string{jumpOut}}
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestAJumpIntoAnEmptyChainIsNotPutBack(t *testing.T) {
	before := with("-A INPUT -j KUBE-NODEPORTS", "-A INPUT "+nonce.Witness().Spec)(node)
	after := flushed("KUBE-NODEPORTS")(without("-A INPUT -j KUBE-NODEPORTS")(before))
	seen := seenTable(tableOf(t, after))
	seen.Quiet = true
	if d := cmp.Diff(summary{Verdict: Changed}, summarize(Judge(wantedOf(t, before), seen))); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestOnlyUnknownIntactAndChangedAreNoLoss(t *testing.T) {
	for _, v := range []Verdict{Unknown, Intact, Changed} {
		if v.Loss() || slices.Contains(LossKinds(), v) {
			t.Errorf("%s counts as loss", v)
		}
	}
	for _, v := range []Verdict{JumpsMissing, Emptied, ChainDeleted, TableDeleted, Replaced, Drifted} {
		if !v.Loss() || !slices.Contains(LossKinds(), v) {
			t.Errorf("%s does not count as loss", v)
		}
	}
}

func TestCoversWhenTheOwnerHasPutItsRulesBack(t *testing.T) {
	want := wantedOf(t, node).Section
	tests := []struct {
		name  string
		edits []edit
		want  bool
	}{
		{"everything stands", nil, true},
		{"canary and witnesses are gone, the rules are back", []edit{deleted(DefaultChain), replaced("canaryd-witness:", "was-")}, true},
		{"the owner writes something else than before", []edit{replaced("10.1.0.1:80", "10.1.0.2:80"), deleted("KUBE-NODEPORTS")}, true},
		{"a jump is missing", []edit{without(jumpPre)}, false},
		{"a jump is written in other words", []edit{replaced(jumpOut, "-A OUTPUT -p tcp -j KUBE-SERVICES")}, true},
		{"jumps stand before an empty chain", []edit{flushed("KUBE-SERVICES")}, false},
		{"everything is empty", []edit{flushed()}, false},
	}
	for _, test := range tests {
		text := node
		for _, e := range test.edits {
			text = e(text)
		}
		if got := Covers(want, tableOf(t, text)); got != test.want {
			t.Errorf("%s: Covers is %v", test.name, got)
		}
	}
	if Covers(want, nil) {
		t.Error("a table that does not exist covers something")
	}
}

// TestJudgeLetsAReplacedJumpGoHoweverLate: an upgraded owner inserts its jump in other words,
// and deletes the old jump much later. By then both jumps are part of the generation.
func TestJudgeLetsAReplacedJumpGoHoweverLate(t *testing.T) {
	reworded := "-A OUTPUT -p tcp -j KUBE-SERVICES"
	both := strings.Replace(node, jumpOut, jumpOut+"\n"+reworded, 1)
	table := tableOf(t, without(jumpOut)(both))
	seen := seenTable(table)
	seen.Quiet = true
	got := Judge(wantedOf(t, both), seen)
	if got.Verdict != Changed || len(got.Jumps) > 0 {
		t.Errorf("verdict %s with jumps %v: want changed, and nothing put back", got.Verdict, got.Jumps)
	}
}
