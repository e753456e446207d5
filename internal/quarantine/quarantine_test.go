package quarantine_test

import (
	"fmt"
	"strings"
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

// A step gives a table other parts, a letter each. A part in upper case waits.
type step struct {
	by    quarantine.Cause
	flush string
	parts string
}

// do takes a step for one kind of table, and returns the flushes that end with it.
func do(t *testing.T, s *quarantine.State, native bool, at step) (ended []string) {
	if native {
		_, ended = s.Set(t.Context(), fw, nil, heldOf(at.parts), at.by, at.flush)
	} else {
		_, ended = s.Set(t.Context(), filter, rulesOf(at.parts), nil, at.by, at.flush)
	}
	return ended
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

// TestRecordsEnd: the record of a flush ends when its last part has left the quarantine, or when an
// operator accepts the loss of one. That holds for each kind of table.
func TestRecordsEnd(t *testing.T) {
	took := step{quarantine.Replay, "1", "ab"}
	for _, test := range []struct {
		name  string
		steps []step
		want  []string // the flush that ends with each step
	}{
		{"all are back", []step{took, {quarantine.Replay, "", "b"}, {quarantine.Replay, "", ""}}, []string{"", "", "1"}},
		{"all at once", []step{took, {quarantine.Owner, "", ""}}, []string{"", "1"}},
		{"two copies of a rule, one is back", []step{{quarantine.Replay, "1", "aa"}, {quarantine.Replay, "", "a"}}, []string{"", ""}},
		{"an operator has decided", []step{took, {quarantine.Operator, "", "b"}, {quarantine.Replay, "", ""}}, []string{"", "1", ""}},
		{"one is given up", []step{took, {quarantine.GivenUp, "", "b"}, {quarantine.Replay, "", ""}}, []string{"", "1", ""}},
		{"a later flush took another", []step{{quarantine.Replay, "1", "a"}, {quarantine.Replay, "2", "ab"}, {quarantine.Replay, "", "a"}}, []string{"", "", "2"}},
		{"without a flush", []step{{quarantine.Replay, "", "a"}, {quarantine.Replay, "", ""}}, []string{"", ""}},
		{"an earlier one is of no flush", []step{{quarantine.Recall, "", "a"}, took, {quarantine.Replay, "", "b"}}, []string{"", "", ""}},
	} {
		for _, native := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, native %t", test.name, native), func(t *testing.T) {
				var s quarantine.State
				var got []string
				for _, at := range test.steps {
					got = append(got, strings.Join(do(t, &s, native, at), ", "))
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("records (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestBothKinds: one flush took parts of both kinds of table. A status has parts that wait behind
// all others, and counts the parts that it does not list.
func TestBothKinds(t *testing.T) {
	var s quarantine.State
	do(t, &s, true, step{quarantine.Replay, "1", "Aa"})
	do(t, &s, false, step{quarantine.Replay, "1", "Bbcd"})
	var status api.Status
	s.Status(&status)
	got := ""
	for _, q := range status.Quarantined {
		got += q.TableName() + " " + q.Rule + ", "
	}
	if want := "inet fw a, ipv4 filter -j b, ipv4 filter -j c, ipv4 filter -j d, inet fw A, ipv4 filter -j B, "; got != want || len(status.WaitingChains) != 2 {
		t.Errorf("listed are %s waiting %v; want %s", got, status.WaitingChains, want)
	}
	if ended := do(t, &s, false, step{quarantine.Replay, "", ""}); len(ended) > 0 || !s.Lacks("1") {
		t.Errorf("parts of the native table are missing, and the record ends: %v", ended)
	}
	if ended := do(t, &s, true, step{quarantine.Replay, "", ""}); len(ended) != 1 {
		t.Errorf("all are back, and ended are %v", ended)
	}
	do(t, &s, false, step{quarantine.Replay, "", strings.Repeat("x", 150)})
	if s.Status(&status); len(status.Quarantined) != api.QuarantinedShown || status.QuarantinedMore != 50 {
		t.Errorf("%d are listed, and %d more", len(status.Quarantined), status.QuarantinedMore)
	}
}

// TestTries: parts are tried soon after they are new, then at growing intervals, and after a pause
// once their owner has written some.
func TestTries(t *testing.T) {
	for _, native := range []bool{false, true} {
		var s quarantine.State
		in := func() time.Duration {
			_, at := s.Next(func(of bool) bool { return of == native })
			return max(0, time.Until(at)).Round(50 * time.Millisecond)
		}
		want := func(when string, want time.Duration) {
			t.Helper()
			if got := in(); got != want {
				t.Errorf("native %t, %s: the next try is in %s, want %s", native, when, got, want)
			}
		}
		do(t, &s, native, step{quarantine.Replay, "", "ab"})
		want("they are new", pace.FirstTry)
		id, at := s.Next(func(bool) bool { return true })
		if _, never := s.Next(func(of bool) bool { return of != native }); !never.IsZero() {
			t.Errorf("native %t: the other kind is tried", native)
		}
		s.Tried(id, at)
		want("after a try", 3*pace.FirstTry)
		do(t, &s, native, step{quarantine.Owner, "", "b"})
		want("after its owner's write", quarantine.OwnersPause)
		s.Plan(id, time.Time{})
		want("it is left out", 0)
		do(t, &s, native, step{quarantine.Owner, "", "b"})
		want("it is read again", quarantine.OwnersPause)
	}
}
