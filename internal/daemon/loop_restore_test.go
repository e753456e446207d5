package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// startEmpty runs a Daemon that first learned an empty node, before its owners wrote rules. It
// returns the ID of the empty generation on disk.
func startEmpty(t *testing.T, backend iptables.Backend) (r *rig, empty string) {
	t.Helper()
	fake := iptablestest.NewFake(backend)
	r = run(t, fake, setup{store: openStore(t, t.TempDir(), identity(backend)), journal: t.TempDir()})
	r.after(5 * time.Second)
	empty = r.d.Status().Generation.ID
	must(t, scenario.Load(t.Context(), scenario.FakePrograms{Fake: fake}, rules.Families()...))
	r.after(10 * time.Second)
	r.wantReady()
	return r, empty
}

func (r *rig) restore(request api.RestoreRequest) api.RestoreReply {
	r.t.Helper()
	reply, err := r.d.Restore(r.t.Context(), request)
	must(r.t, err)
	return reply
}

// wantUntouched fails unless a restore was refused and changed nothing.
func (r *rig) wantUntouched(reply api.RestoreReply, before string) {
	r.t.Helper()
	if reply.Refused == "" || len(reply.Outcomes) > 0 || reply.Proved() {
		r.t.Errorf("not refused: %+v", reply)
	}
	if diff := cmp.Diff(before, without(r.tables())); diff != "" {
		r.t.Errorf("a refused restore wrote (-before +now):\n%s", diff)
	}
}

// TestRestoreRemovesNothingUnasked: an old empty generation removes no rule without an
// agreement. With it the removal is recorded and logged, and the record names the way back.
func TestRestoreRemovesNothingUnasked(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r, empty := startEmpty(t, backend)
		held, before, id := r.d.Status().Generation, without(r.tables()), r.d.Status().Generation.ID
		r.wantUntouched(r.restore(api.RestoreRequest{Generation: empty}), before)

		preview := r.restore(api.RestoreRequest{Generation: empty, DryRun: true})
		if n := preview.Removes(); n.Rules != held.Rules || n.Chains != held.Chains {
			t.Errorf("it would remove %+v, want all of %+v", n, held)
		}
		lines := 0
		for _, c := range preview.Changes {
			lines += len(c.Lines) + c.More
			if c.Adds != (api.Counts{}) {
				t.Errorf("an empty generation adds %+v", c)
			}
		}
		if lines != held.Rules+held.Chains {
			t.Errorf("%d lines, want one for each of %d rules and %d chains", lines, held.Rules, held.Chains)
		}
		if diff := cmp.Diff(before, without(r.tables())); diff != "" || len(r.records(0)) > 0 {
			t.Errorf("a dry run wrote (-before +now):\n%s", diff)
		}

		moved := r.moved(func() {
			reply := r.restore(api.RestoreRequest{Generation: empty, Agreed: preview.Agreement()})
			if !reply.Proved() || reply.Undo != id || reply.Removes() != preview.Removes() {
				t.Errorf("the reply is %+v", reply)
			}
			r.after(5 * time.Second)
		}, "flush", "loss_since")
		wantMoved(t, moved, series{})
		if strings.Contains(without(r.tables()), "KUBE-SERVICES") {
			t.Error("KUBE-SERVICES is still there")
		}
		r.wantBare()
		record := r.oneRecord()
		if record.Kind != api.Removed || record.Outcome != api.Requested || record.Lost.Rules != held.Rules || !strings.Contains(record.Detail, "--generation "+id) {
			t.Errorf("the record is %+v", record)
		}
		r.wantLog("Protected rules were removed on request")
		if said := linesOf(r.log.String(), "Restored on request"); !strings.Contains(said, `undo="`+id+`"`) {
			t.Errorf("the log says %q, without the way back", said)
		}
		if told := r.full("1"); !strings.Contains(fmt.Sprint(told.Diff), "-:KUBE-MARK-MASQ - [0:0]") {
			t.Errorf("the diff lacks a chain: %+v", told)
		}

		// The way back only adds, so it needs no agreement.
		if reply := r.restore(api.RestoreRequest{Generation: id}); !reply.Proved() {
			t.Errorf("the way back: %+v", reply)
		}
		r.after(5 * time.Second)
		if got, want := protectedOf(without(r.tables())), protectedOf(before); got != want {
			t.Errorf("%d lines name a protected chain, before it was %d", got, want)
		}
		r.wantReady()
		r.oneRecord()
	})
}

// protectedOf counts the lines of a text that name a protected chain.
func protectedOf(text string) int {
	return strings.Count(text, "KUBE-") + strings.Count(text, "CNI-")
}

// TestRestoreHoldsForWhatIsWritten: an agreement covers only the shown changes. A restore does
// not remove rules that an owner wrote since, in the same tables or in others.
func TestRestoreHoldsForWhatIsWritten(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r, empty := startEmpty(t, backend)
		preview := r.restore(api.RestoreRequest{Generation: empty, DryRun: true})
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		before := without(r.tables())
		r.wantUntouched(r.restore(api.RestoreRequest{Generation: empty, Agreed: preview.Agreement()}), before)
		r.after(5 * time.Second)
		r.wantReady()
		if len(r.records(0)) > 0 {
			t.Errorf("records: %+v", r.records(0))
		}
	})
}

// TestRestoreInObserveMode: an owner has begun to write again before an operator requests a
// replay. Its newer rules stay without an agreement.
func TestRestoreInObserveMode(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		before := r.tables()
		r.flushNat()
		r.settled()
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(time.Second)
		flushed := without(r.tables())
		r.wantUntouched(r.restore(api.RestoreRequest{}), flushed)
		preview := r.restore(api.RestoreRequest{DryRun: true})
		if n := preview.Removes(); n.Rules == 0 || n.Chains == 0 {
			t.Errorf("the owner's new service is not in %+v", preview)
		}
		if reply := r.restore(api.RestoreRequest{Agreed: preview.Agreement()}); !reply.Proved() {
			t.Errorf("agreed to: %+v", reply)
		}
		r.settled()
		r.wantTables(before, r.tables())
	})
}

// TestStoredGenerationsAreDescribed: the status has the size and the origin of each stored
// generation, and lists an empty one last. render shows any of them.
func TestStoredGenerationsAreDescribed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r, empty := startEmpty(t, backend)
		first := r.d.Status().Generation
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(10 * time.Second)
		s := r.d.Status()
		var stored []api.StoredGeneration
		for _, g := range s.Stored {
			if g.ID == empty || g.ID == first.ID || g.ID == s.Generation.ID {
				stored = append(stored, g)
			}
		}
		if len(stored) != 3 || stored[0].ID != s.Generation.ID || stored[1].ID != first.ID || stored[2].ID != empty {
			t.Fatalf("stored are %+v", s.Stored)
		}
		for i, want := range []struct {
			rules  int
			made   reload.Made
			sparse bool
		}{{s.Generation.Rules, reload.MadeByOwners, false}, {first.Rules, reload.MadeByOwners, false}, {0, reload.MadeAtStart, true}} {
			g := stored[i]
			if g.Rules == nil || *g.Rules != want.rules || g.Made != want.made || g.NearlyEmpty != want.sparse || g.Captured.IsZero() || g.Foreign != "" {
				t.Errorf("stored %d is %+v, want %+v", i, g, want)
			}
		}
		for id, want := range map[string]bool{first.ID: true, empty: false} {
			text, err := r.d.Render(t.Context(), api.RenderRequest{Generation: id, Family: rules.IPv4})
			must(t, err)
			if !strings.HasPrefix(text, "# generation "+id) || strings.Contains(text, "KUBE-SERVICES") != want || strings.Contains(text, latecome) {
				t.Errorf("render of %s:\n%s", id, text)
			}
			must(t, iptablestest.NewFake(backend).RestoreNoflush(rules.IPv4, text))
		}
		if _, err := r.d.Render(t.Context(), api.RenderRequest{Generation: "0123456789ab"}); !errors.Is(err, api.ErrNoGeneration) {
			t.Errorf("render of an unknown generation: %v", err)
		}
		if reply := r.restore(api.RestoreRequest{Generation: first.ID}); !strings.Contains(reply.Refused, reload.ErrNotAgreed.Error()) {
			t.Errorf("%+v", reply)
		}
		if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: "0123456789ab"}); err == nil || !strings.Contains(err.Error(), empty+" (nearly empty)") {
			t.Errorf("what is offered: %v", err)
		}
	})
}

// TestGenerationByTheBeginningOfItsID: restore and render take an unambiguous beginning.
func TestGenerationByTheBeginningOfItsID(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
		r.after(5 * time.Second)
		first := r.d.Status().Generation.ID
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		r.after(5 * time.Second)
		if now := r.d.Status().Generation.ID; now == first {
			t.Fatalf("the generation is still %s", first)
		}
		want, err := r.d.Render(t.Context(), api.RenderRequest{Generation: first})
		must(t, err)
		got, err := r.d.Render(t.Context(), api.RenderRequest{Generation: first[:6]})
		must(t, err)
		if got != want || !strings.Contains(got, first) {
			t.Errorf("the beginning of %s renders %.80q", first, got)
		}
		reply := r.restore(api.RestoreRequest{Generation: first[:6], DryRun: true})
		if reply.Removes().Rules == 0 {
			t.Errorf("a dry run of %s: %+v", first[:6], reply)
		}
		if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: "fffffff"}); !errors.Is(err, api.ErrNoGeneration) {
			t.Errorf("the beginning of no ID: %v", err)
		}
	})
}

// TestRestoreOfALossRecordsNoRemoval: in a pause another process restores a file from before
// one pod was added and another one removed. A restore puts back the lost rules, and the
// removed pod's rules are deleted with that. They do not count as removed on request.
func TestRestoreOfALossRecordsNoRemoval(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.addPod("1")
		r.after(5 * time.Second)
		saved := r.fake.SaveTable(rules.IPv4, rules.Nat)
		r.removePod("1")
		r.addPod("2")
		r.after(5 * time.Second)
		before := r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT")
		r.pause(time.Hour)
		must(t, r.fake.As(77, "restorer").Restore(rules.IPv4, saved))
		r.after(5 * time.Second)
		if got := r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT"); slices.Equal(got, before) {
			t.Fatalf("the saved rules do not stand: %q", got)
		}
		if reply := r.restore(api.RestoreRequest{}); !reply.Proved() {
			t.Errorf("the reply is %+v", reply)
		}
		if d := cmp.Diff(before, r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT")); d != "" {
			t.Errorf("CNI-HOSTPORT-DNAT (-want +got):\n%s", d)
		}
		if record := r.oneRecord(); record.Kind == api.Removed {
			t.Errorf("the record is %+v", record)
		}
		if strings.Contains(r.log.String(), "Protected rules were removed on request") {
			t.Error("the log says that rules were removed on request")
		}
	})
}
