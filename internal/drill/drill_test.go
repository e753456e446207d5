package drill

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

var nat = rules.IPv4.Table(rules.Nat)

// begun returns a drill that removed something from nat.
func begun(t *testing.T, request api.DrillRequest) (*Drills, *Drill) {
	t.Helper()
	x, err := New(request, Guarded{Iptables: true})
	if err != nil {
		t.Fatal(err)
	}
	done := reload.Drilled{Marks: canary.Marks{nat: canary.Mark{}}, Written: time.Unix(1e9, 0)}
	s := &Drills{}
	x.Took(done)
	s.Begin(x, done, time.Second)
	return s, x
}

// TestHowADrillEnds: a drill has passed if its loss is a drill's and the replay was proved.
func TestHowADrillEnds(t *testing.T) {
	for name, test := range map[string]struct {
		course Course
		want   api.DrillResult
		flush  string
	}{
		"proved":                  {Course{Recorded: true, Record: api.Flush{ID: "f1", Drill: api.DrillCanary, Outcome: reload.Proved}}, api.DrillPassed, "f1"},
		"another process flushed": {Course{Recorded: true, Record: api.Flush{ID: "f1", Outcome: reload.Proved}}, api.DrillVoid, "f1"},
		"put back by another one": {Course{Record: api.Flush{ID: "f1", Drill: api.DrillCanary}}, api.DrillFailed, ""},
		"not proved":              {Course{Recorded: true, Record: api.Flush{ID: "f1", Drill: api.DrillCanary, Outcome: reload.Failed}}, api.DrillFailed, "f1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, x := begun(t, api.DrillRequest{})
			got, why := x.Answered(test.course)
			if got != test.want || (why == "") != (got == api.DrillPassed) {
				t.Errorf("it ended as %s because %q, want %s", got, why, test.want)
			}
			if diff := cmp.Diff(test.flush, x.Reply.Flush); diff != "" {
				t.Errorf("the flush (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWhatADrillExplains: a drill for real removed the jumps of one chain, and only their loss
// is no flush.
func TestWhatADrillExplains(t *testing.T) {
	jumps := canary.Finding{Verdict: canary.JumpsMissing, Witnesses: []string{Chain}}
	emptied := jumps
	emptied.Emptied = []string{"KUBE-SERVICES"}
	elsewhere := jumps
	elsewhere.Witnesses = []string{"OUTPUT"}
	_, forReal := begun(t, api.DrillRequest{ForReal: true})
	_, quiet := begun(t, api.DrillRequest{})
	for name, test := range map[string]struct {
		drill   *Drill
		id      rules.TableID
		finding canary.Finding
		want    bool
	}{
		"its jumps":               {forReal, nat, jumps, true},
		"of another table":        {forReal, rules.IPv4.Table(rules.Filter), jumps, false},
		"of another chain":        {forReal, nat, elsewhere, false},
		"a chain was emptied too": {forReal, nat, emptied, false},
		"a drill of the canary":   {quiet, nat, jumps, false},
		"no drill":                {nil, nat, jumps, false},
	} {
		if got := test.drill.Explains(test.id, flushes.Hit{Verdict: test.finding.Verdict, Finding: test.finding}); got != test.want {
			t.Errorf("%s: explained: %t, want %t", name, got, test.want)
		}
	}
}

// TestWhenADrillIsPlanned: the first drill starts at a random time. Each other one starts a
// period after the last, but not right after a start of canaryd.
func TestWhenADrillIsPlanned(t *testing.T) {
	now := time.Unix(1e9, 0)
	plan := func(every time.Duration, last *api.DrillEnd) time.Time {
		var s Drills
		s.Plan(every, last, now)
		return s.At
	}
	if at := plan(0, nil); !at.IsZero() {
		t.Errorf("planned at %v without a period", at)
	}
	if at := plan(time.Hour, nil); at.Before(now) || !at.Before(now.Add(time.Hour)) {
		t.Errorf("the first one is planned at %v", at)
	}
	if at := plan(time.Hour, &api.DrillEnd{Time: now.Add(-time.Minute)}); !at.Equal(now.Add(59 * time.Minute)) {
		t.Errorf("a minute after the last one the next is planned at %v", at)
	}
	if at := plan(time.Hour, &api.DrillEnd{Time: now.Add(-24 * time.Hour)}); !at.Equal(now.Add(6 * time.Minute)) {
		t.Errorf("long after the last one the next is planned at %v", at)
	}
}

// TestTheTablesOfADrill: a drill tries the tables that it was asked for, or else all kinds that are
// guarded. A kind of damage that only one of them knows is a request for that one.
func TestTheTablesOfADrill(t *testing.T) {
	type tried struct {
		iptables, native canary.Verdict
		table            rules.TableName
		kind             canary.Verdict
	}
	both, only, neither := Guarded{Iptables: true, Native: true}, Guarded{Native: true}, Guarded{}
	for name, test := range map[string]struct {
		request api.DrillRequest
		has     Guarded
		want    tried
	}{
		"both":                       {api.DrillRequest{}, both, tried{canary.ChainDeleted, canary.TableDeleted, rules.Nat, canary.ChainDeleted}},
		"only native":                {api.DrillRequest{}, only, tried{"", canary.TableDeleted, api.DrillNative, canary.TableDeleted}},
		"nothing":                    {api.DrillRequest{}, neither, tried{canary.ChainDeleted, "", rules.Nat, canary.ChainDeleted}},
		"a table":                    {api.DrillRequest{Table: rules.Filter}, both, tried{canary.ChainDeleted, "", rules.Filter, canary.ChainDeleted}},
		"native by name":             {api.DrillRequest{Table: api.DrillNative}, both, tried{"", canary.TableDeleted, api.DrillNative, canary.TableDeleted}},
		"native where there is none": {api.DrillRequest{Table: api.DrillNative}, neither, tried{"", canary.TableDeleted, api.DrillNative, canary.TableDeleted}},
		"a kind of both":             {api.DrillRequest{Kind: canary.Emptied}, both, tried{canary.Emptied, canary.Emptied, rules.Nat, canary.Emptied}},
		"a kind of canaries":         {api.DrillRequest{Kind: canary.ChainDeleted}, both, tried{canary.ChainDeleted, "", rules.Nat, canary.ChainDeleted}},
		"a kind of native tables":    {api.DrillRequest{Kind: canary.TableDeleted}, both, tried{"", canary.TableDeleted, api.DrillNative, canary.TableDeleted}},
		"a kind of neither":          {api.DrillRequest{Kind: canary.Drifted}, both, tried{canary.Drifted, canary.Drifted, rules.Nat, canary.Drifted}},
		"for real":                   {api.DrillRequest{ForReal: true}, both, tried{canary.JumpsMissing, "", rules.Nat, canary.JumpsMissing}},
	} {
		x, err := New(test.request, test.has)
		if err != nil {
			t.Fatal(err)
		}
		if got := (tried{x.kinds.iptables, x.kinds.native, x.Reply.Table, x.Reply.Kind}); got != test.want || x.Native() != (test.want.iptables == "") {
			t.Errorf("%s: it tries %+v, want %+v", name, got, test.want)
		}
		now := time.Unix(1e9, 0)
		if goesOn := x.MayGoOn(now); goesOn != (test.want.iptables != "" && test.want.native != "") || goesOn && (!x.GoesOnAt().Equal(now) || x.At(false)) {
			t.Errorf("%s: it goes on: %t, at %v", name, goesOn, x.GoesOnAt())
		}
		if x.GoOn(); !x.At(true) || x.MayGoOn(now) {
			t.Errorf("%s: it does not end with native tables", name)
		}
	}
}
