package quarantine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

var (
	filter = tableid.IPv4.Table(rules.Filter)
	fw     = tableid.Inet.Table("fw")
)

// A step gives a table other parts. Those in back stand in the table. A part in upper case waits.
type step struct {
	by    quarantine.Cause
	flush string
	parts string // a letter each
	back  string
}

// do takes a step for one kind of table.
func do(s *quarantine.State, native bool, at step) {
	has := func(name string) bool { return slices.Contains(letters(at.back), name) }
	if native {
		s.SetHeld(fw, heldOf(at.parts), at.by, at.flush, heldIn(has))
	} else {
		s.SetRules(filter, rulesOf(at.parts), at.by, at.flush, func(h reload.QuarantinedRule) bool { return has(h.Rule.Target) })
	}
}

func letters(text string) (list []string) {
	for _, r := range text {
		list = append(list, string(r))
	}
	return list
}

func waits(name string) bool { return name < "a" }

func rulesOf(text string) (list []reload.QuarantinedRule) {
	for _, name := range letters(text) {
		list = append(list, reload.QuarantinedRule{Chain: "INPUT", Rule: rules.Rule{Spec: "-j " + name, Target: name}, Waits: waits(name)})
	}
	return list
}

func heldOf(text string) (list []native.Held) {
	for _, name := range letters(text) {
		list = append(list, native.Held{Kind: nft.Rules, Name: "input", Text: name, Waits: waits(name)})
	}
	return list
}

func heldIn(has func(string) bool) func(native.Held) bool {
	return func(h native.Held) bool { return has(h.Text) }
}

// TestRecordsEnd: the record of a flush ends when its last part has left the quarantine, whatever
// kind of table the part is of. Its outcome is the worst fate of its parts.
func TestRecordsEnd(t *testing.T) {
	for _, test := range []struct {
		name  string
		steps []step
		want  string
	}{
		{"all are back", []step{{quarantine.Replay, "1", "ab", ""}, {quarantine.Replay, "", "b", "a"}, {quarantine.Owner, "", "", "ab"}}, "1: proved"},
		{"one is not back yet", []step{{quarantine.Replay, "1", "ab", ""}, {quarantine.Replay, "", "b", "a"}}, ""},
		{"two copies of a rule, one is back", []step{{quarantine.Replay, "1", "aa", ""}, {quarantine.Replay, "", "a", "a"}}, ""},
		{"an owner decides about the first", []step{{quarantine.Replay, "1", "ab", ""}, {quarantine.Owner, "", "b", ""}, {quarantine.Replay, "", "", "b"}}, "1: owner's decision"},
		{"an operator has decided", []step{{quarantine.Replay, "1", "ab", ""}, {quarantine.Operator, "", "b", ""}, {quarantine.Owner, "", "", ""}}, "1: dismissed"},
		{"one is given up", []step{{quarantine.Replay, "1", "ab", ""}, {quarantine.GivenUp, "", "b", ""}, {quarantine.Replay, "", "", "b"}}, "1: partial"},
		{"a later flush took another", []step{{quarantine.Replay, "1", "a", ""}, {quarantine.Replay, "2", "ab", ""}, {quarantine.Replay, "", "a", "b"}}, "2: proved"},
		{"without a flush", []step{{quarantine.Replay, "", "a", ""}, {quarantine.Replay, "", "", "a"}}, ""},
		{"from disk, without a flush", []step{{quarantine.Recall, "", "a", ""}, {quarantine.Replay, "1", "ab", ""}, {quarantine.Replay, "", "b", "a"}}, ""},
	} {
		for _, native := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, native %t", test.name, native), func(t *testing.T) {
				var s quarantine.State
				got := ""
				for _, at := range test.steps {
					do(&s, native, at)
					for _, e := range s.Take(t.Context()) {
						got += e.Flush + ": " + string(e.Outcome)
					}
				}
				if got != test.want {
					t.Errorf("records end as %q, want %q", got, test.want)
				}
			})
		}
	}
}

// TestARecordOfBothKinds: one flush took parts of both kinds of table, and its replay was raced.
func TestARecordOfBothKinds(t *testing.T) {
	var s quarantine.State
	for _, native := range []bool{false, true} {
		do(&s, native, step{quarantine.Replay, "1", "a", ""})
	}
	s.End("1", reload.Raced)
	do(&s, false, step{quarantine.Replay, "", "", "a"})
	if got := s.Take(t.Context()); len(got) > 0 || !s.Lacks("1") {
		t.Errorf("a part is missing, and the record ends: %v", got)
	}
	do(&s, true, step{quarantine.Replay, "", "", "a"})
	want := []quarantine.Ended{{Flush: "1", Table: fw, Outcome: reload.Raced}}
	if diff := cmp.Diff(want, s.Take(t.Context())); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
}

// TestTries: parts are tried soon after they are new, then at growing intervals, and after a pause
// once their owner has written some. Each table has its own intervals.
func TestTries(t *testing.T) {
	for _, native := range []bool{false, true} {
		var s quarantine.State
		in := func() time.Duration { return time.Until(s.At(!native, native)).Round(50 * time.Millisecond) }
		do(&s, native, step{quarantine.Replay, "", "ab", ""})
		if got := in(); got != pace.FirstTry {
			t.Errorf("native %t: the first try is in %s", native, got)
		}
		if due := s.Due(!native, native, time.Now()); len(due) > 0 {
			t.Errorf("native %t: due are %v", native, due)
		}
		later := time.Now().Add(time.Hour)
		if due := s.Due(native, !native, later); len(due) > 0 {
			t.Errorf("native %t: of the other kind %v are due", native, due)
		}
		for range 20 {
			if due := s.Due(!native, native, later); len(due) != 1 {
				t.Errorf("native %t: due are %v", native, due)
			}
			later = later.Add(pace.LastTry)
		}
		do(&s, native, step{quarantine.Owner, "", "b", "a"})
		if got := in(); got != quarantine.OwnersPause {
			t.Errorf("native %t: after its owner's write the next try is in %s", native, got)
		}
		id := map[bool]tableid.TableID{false: filter, true: fw}[native]
		s.Suspend(id)
		if !s.At(true, true).IsZero() {
			t.Errorf("native %t: a table that is left out is tried", native)
		}
		do(&s, native, step{quarantine.Owner, "", "b", ""})
		if s.At(true, true).IsZero() {
			t.Errorf("native %t: a table that is read again is not tried", native)
		}
	}
}

// TestDismissAndStatus: an operator accepts the loss of parts of both kinds. A status has parts that
// wait behind all others, and counts those that it does not list.
func TestDismissAndStatus(t *testing.T) {
	var s quarantine.State
	do(&s, true, step{quarantine.Replay, "", "Aa", ""})
	do(&s, false, step{quarantine.Replay, "", "Bbcd", ""})
	var status api.Status
	s.Status(&status)
	got := ""
	for _, q := range status.Quarantined {
		got += q.TableName() + " " + q.Rule + ", "
	}
	if want := "inet fw a, ipv4 filter -j b, ipv4 filter -j c, ipv4 filter -j d, inet fw A, ipv4 filter -j B, "; got != want || len(status.WaitingChains) != 2 {
		t.Errorf("listed are %s waiting %v; want %s", got, status.WaitingChains, want)
	}
	lost, waiting, dismissed := s.Dismiss(time.Now())
	if lost != 4 || waiting != 2 || dismissed.Count() != 3 || s.Count(filter) != 1 || s.Count(fw) != 1 {
		t.Errorf("%d were lost, %d of iptables, and %d wait", lost, dismissed.Count(), waiting)
	}
	if lost, waiting, _ := s.Dismiss(time.Now()); lost != 0 || waiting != 2 {
		t.Errorf("again: %d were lost, and %d wait", lost, waiting)
	}
	do(&s, false, step{quarantine.Replay, "", string(slices.Repeat([]byte("x"), 150)), ""})
	if s.Status(&status); len(status.Quarantined) != api.QuarantinedShown || status.QuarantinedMore != 51 {
		t.Errorf("%d are listed, and %d more", len(status.Quarantined), status.QuarantinedMore)
	}
}
