package daemon

import (
	"errors"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStoppedLearning: each source of a finding has its own effect on a table whose learning is
// stopped.
func TestStoppedLearning(t *testing.T) {
	d := configure(t, loadedFake(t, iptables.NFT), setup{}).d
	id := rules.IPv4.Table(rules.Nat)
	snapshot, err := d.cfg.Kernel.Read(t.Context(), id.Family)
	must(t, err)
	full, flushed := snapshot.Tables[id.Name], rules.NewTable(id.Name)
	services := *full.Chain("KUBE-SERVICES")
	unknown := canary.Finding{Verdict: canary.Unknown, Err: errors.New("unread")}
	for _, test := range []struct {
		name    string
		finding tableFinding
		want    canary.Verdict
		stopped bool
	}{
		{"a probe of the marks that stand", tableFinding{finding: canary.Finding{Verdict: canary.Intact}}, canary.Emptied, true},
		{"a probe of the marks that are lost once more", tableFinding{finding: canary.Finding{Verdict: canary.TableDeleted}}, canary.TableDeleted, true},
		{"observe mode reads it again", tableFinding{source: watching, finding: canary.Finding{Verdict: canary.ChainDeleted}}, canary.ChainDeleted, true},
		{"it cannot be read", tableFinding{source: readInFull, finding: unknown}, canary.Emptied, true},
		{"its marks stand, its rules do not", tableFinding{source: readInFull, finding: canary.Finding{Verdict: canary.Changed}, table: flushed, read: true}, canary.Emptied, true},
		{"its marks are lost once more", tableFinding{source: readInFull, finding: canary.Finding{Verdict: canary.Replaced, MarkLost: true}, table: flushed, read: true}, canary.Replaced, true},
		{"its owner has put its rules back", tableFinding{source: readInFull, finding: canary.Finding{Verdict: canary.Changed}, table: full, read: true}, canary.Intact, false},
		{"a write is proved", tableFinding{source: readInFull, finding: canary.Finding{Verdict: canary.Emptied}, table: full, read: true, proved: true}, canary.Intact, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			st := d.newState()
			st.generation.learned.Generation = rules.Generation{id: rules.Section{Chains: []rules.Chain{services}}}
			d.take(st, tableFinding{id: id, source: watching, finding: canary.Finding{Verdict: canary.Emptied}})
			test.finding.id = id
			judged := d.take(st, test.finding)
			ts := st.table(id)
			if ts.verdict != test.want || ts.learningStopped != test.stopped {
				t.Errorf("%s, learning stopped: %t; want %s and %t", ts.verdict, ts.learningStopped, test.want, test.stopped)
			}
			if full := test.finding.source == readInFull; judged != (!full || !test.stopped || test.finding.finding.MarkLost) {
				t.Errorf("something follows from the finding: %t", judged)
			}
		})
	}
}

// TestReminder: a trouble that lasts is logged again after 30 s, and another error at once.
func TestReminder(t *testing.T) {
	var tr pace.Trouble
	a, b := errors.New("a"), errors.New("b")
	start := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, step := range []struct {
		second int
		err    error
		want   bool
	}{{0, a, true}, {1, a, false}, {29, a, false}, {30, a, true}, {31, b, true}, {32, a, true}, {33, a, false}} {
		if got := tr.MetAgain(step.err, start.Add(time.Duration(step.second)*time.Second)); got != step.want {
			t.Errorf("second %d: the log has it: %t", step.second, got)
		}
	}
}
