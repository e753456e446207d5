package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/baseline"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// poison is a rule that another process adds to a chain of kube-proxy's.
const poison = "-s 203.0.113.7/32 -m comment --comment SECRET -j ACCEPT"

func (r *rig) baseline(request api.BaselineRequest) api.BaselineReply {
	r.t.Helper()
	reply, err := r.d.Baseline(r.t.Context(), request)
	must(r.t, err)
	return reply
}

// poisoned has another process write to KUBE-FORWARD, and waits until canaryd has learned the
// rule.
func (r *rig) poisoned() {
	r.t.Helper()
	r.write(rules.Filter, "-A KUBE-FORWARD "+poison)
	r.after(10 * time.Second)
}

// wantSince fails unless the status counts that since the baseline.
func (r *rig) wantSince(when string, rules, chains, gone int) {
	r.t.Helper()
	b := r.d.Status().Baseline
	if b == nil || b.Error != "" || b.AppearedRules != rules || b.AppearedChains != chains || b.GoneRules != gone {
		r.t.Errorf("%s: the status says %+v; want %d rules in %d chains, and %d gone", when, b, rules, chains, gone)
	}
}

// TestPoisonedGeneration: a flush takes a rule that another process added to a protected chain,
// and canaryd restores it as ever. Status, record and preview say that it is newer than the
// baseline, also after a restart. Nothing else happens to it.
func TestPoisonedGeneration(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{store: openStore(t, dir, identity(backend)), journal: t.TempDir()})
		none := r.baseline(api.BaselineRequest{})
		if none.Baseline != nil || len(none.Changes) > 0 || none.Present.ID != r.d.Status().Generation.ID || r.d.Status().Baseline != nil {
			t.Errorf("without a baseline: %+v, %+v", none, r.d.Status().Baseline)
		}
		confirmed := r.baseline(api.BaselineRequest{Confirm: true})
		clean := r.d.Status().Generation
		if b := confirmed.Baseline; b == nil || b.Generation != clean.ID || b.Rules != clean.Rules || b.Chains != clean.Chains || confirmed.Replaced != nil {
			t.Errorf("confirmed: %+v, of %+v", confirmed, clean)
		}
		r.wantSince("once it is confirmed", 0, 0, 0)
		r.wantLog("A baseline was confirmed on request")

		r.poisoned()
		r.wantSince("once another process has written", 1, 1, 0)
		r.wantReady()
		want := []api.BaselineChange{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Known: true, Appeared: 1, Rules: []string{"-A KUBE-FORWARD " + poison}}}
		if d := cmp.Diff(want, r.baseline(api.BaselineRequest{}).Changes); d != "" {
			t.Errorf("what appeared (-want +got):\n%s", d)
		}

		flushed := func(when string) {
			t.Helper()
			seen := len(r.records(0))
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Filter, ""))
			r.after(10 * time.Second)
			if chain := fmt.Sprint(r.chain(rules.IPv4, rules.Filter, "KUBE-FORWARD")); !strings.Contains(chain, poison) {
				t.Errorf("%s: what was learned is not back: %s", when, chain)
			}
			record := r.records(seen)[0]
			n := record.NotInBaseline
			if n == nil || n.Generation != clean.ID || n.Rules != 1 || n.More != 0 {
				t.Fatalf("%s: the record says %+v", when, n)
			}
			if d := cmp.Diff([]api.ChainName{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Rules: 1}}, n.Chains); d != "" || record.Outcome != reload.Proved {
				t.Errorf("%s: %s, chains of the record (-want +got):\n%s", when, record.Outcome, d)
			}
			if told := r.full(record.ID); told.Flush.NotInBaseline == nil || told.Flush.NotInBaseline.Rules != 1 {
				t.Errorf("%s: the journal has %+v", when, told.Flush.NotInBaseline)
			}
		}
		flushed("a flush")
		text, err := json.Marshal(r.d.Status().Public())
		must(t, err)
		if s := string(text); !strings.Contains(s, `"appearedRules":1`) || strings.Contains(s, "SECRET") || strings.Contains(s, "203.0.113.7") {
			t.Errorf("over TCP: %s", s)
		}
		for _, f := range r.d.Status().Public().Flushes {
			if n := f.NotInBaseline; n == nil || n.Rules != 1 || n.More != 1 || n.Chains != nil {
				t.Errorf("over TCP a record has %+v", n)
			}
		}

		r.restart(t, backend, dir)
		r.wantSince("after a restart", 1, 1, 0)
		flushed("a flush after a restart")

		forgotten := r.baseline(api.BaselineRequest{Forget: true})
		if forgotten.Replaced == nil || forgotten.Replaced.Generation != clean.ID || r.d.Status().Baseline != nil {
			t.Errorf("forgotten: %+v, the status has %+v", forgotten, r.d.Status().Baseline)
		}
		if _, err := os.Stat(filepath.Join(dir, "baseline.json")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file is still there: %v", err)
		}
	})
}

// restart ends the daemon and starts another one on the same kernel and state folder.
func (r *rig) restart(t *testing.T, backend iptables.Backend, dir string) {
	t.Helper()
	r.stop()
	*r = *run(t, r.fake, setup{store: openStore(t, dir, identity(backend)), journal: t.TempDir()})
	r.after(5 * time.Second)
}

// TestPreviewMarksWhatIsNotInTheBaseline: a preview of a restore lists the rules first that
// were never confirmed.
func TestPreviewMarksWhatIsNotInTheBaseline(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend)), mode: api.Observe})
		r.after(5 * time.Second)
		clean := r.baseline(api.BaselineRequest{Confirm: true}).Baseline.Generation
		r.poisoned()
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Filter, ""))
		r.after(time.Second)
		preview := r.restore(api.RestoreRequest{DryRun: true})
		if preview.Baseline == nil || preview.Baseline.Generation != clean {
			t.Fatalf("compared with %+v", preview.Baseline)
		}
		marked := 0
		for _, c := range preview.Changes {
			marked += c.NotInBaseline
			if c.Table == rules.Filter && c.Family == rules.IPv4 {
				if d := cmp.Diff([]string{"+-A KUBE-FORWARD " + poison}, c.Lines[:c.NewLines]); d != "" || strings.Count(strings.Join(c.Lines, "\n"), poison) != 1 {
					t.Errorf("marked (-want +got):\n%s\nof %q", d, c.Lines)
				}
				if len(c.Lines)+c.More != c.Adds.Rules+c.Adds.Chains+c.Removes.Rules+c.Removes.Chains {
					t.Errorf("%d lines and %d more of %+v", len(c.Lines), c.More, c)
				}
			}
		}
		if marked != 1 {
			t.Errorf("%d rules are marked in %+v", marked, preview.Changes)
		}
		if n := r.records(0)[0].NotInBaseline; n == nil || n.Rules != 1 {
			t.Errorf("a record in observe mode has %+v", n)
		}
		if reply := r.restore(api.RestoreRequest{Agreed: preview.Agreement()}); !reply.Proved() {
			t.Errorf("nothing is refused for it: %+v", reply)
		}
		r.baseline(api.BaselineRequest{Forget: true})
		if preview := r.restore(api.RestoreRequest{DryRun: true, Generation: clean}); preview.Baseline != nil {
			t.Errorf("without a baseline: %+v", preview)
		}
	})
}

// TestConfirmWhatWasShown: an operator confirms by its ID the generation that he has seen,
// without the rules that another process added since. Only generations in memory or on disk can
// be confirmed.
func TestConfirmWhatWasShown(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
		r.after(5 * time.Second)
		shown := r.baseline(api.BaselineRequest{}).Present.ID
		r.poisoned()
		must(t, errorOf(r.d.Pause(t.Context(), api.PauseRequest{Seconds: 3600})))
		reply := r.baseline(api.BaselineRequest{Confirm: true, Generation: shown})
		if reply.Baseline.Generation != shown || reply.Baseline.AppearedRules != 1 || len(reply.Changes) != 1 {
			t.Errorf("confirmed: %+v", reply)
		}
		r.wantSince("in a pause", 1, 1, 0)
		present := r.baseline(api.BaselineRequest{Confirm: true, Generation: reply.Present.ID})
		if present.Replaced == nil || present.Replaced.Generation != shown || present.Baseline.AppearedRules != 0 {
			t.Errorf("confirmed next: %+v", present)
		}
		for _, bad := range []api.BaselineRequest{
			{Confirm: true, Generation: "0123456789ab"}, {Confirm: true, Generation: "../state"}, {Confirm: true, Forget: true}, {Generation: shown},
		} {
			if reply, err := r.d.Baseline(t.Context(), bad); err == nil {
				t.Errorf("%+v is answered with %+v", bad, reply)
			}
		}
		r.wantSince("after what was refused", 0, 0, 0)
		if got := r.baseline(api.BaselineRequest{}).Baseline.Generation; got != reply.Present.ID {
			t.Errorf("the baseline is %s, want %s", got, reply.Present.ID)
		}
	})
}

// TestBaselineThatIsBeingRead: until the file is read, the status says that it is being read,
// and not that there is no baseline.
func TestBaselineThatIsBeingRead(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		d, _ := choresWorld(t, backend)
		if b := d.Status().Baseline; b == nil || !b.Reading || b.Generation != "" {
			t.Errorf("before the loop runs: %+v", b)
		}
		st := d.newState()
		d.takeBaseline(t.Context(), st, d.loadBaseline())
		if d.publish(st); d.Status().Baseline != nil {
			t.Errorf("without a file: %+v", d.Status().Baseline)
		}
	})
}

func errorOf[T any](_ T, err error) error { return err }

// TestBaselineIsNotBelieved: canaryd reports a baseline file that is damaged, another user's,
// newer or too large. Nothing else changes: it starts, guards, and takes the next confirmation.
func TestBaselineIsNotBelieved(t *testing.T) {
	for name, spoil := range map[string]func(path string) error{
		"torn":      func(path string) error { return os.Truncate(path, 300) },
		"foreign":   func(path string) error { return os.Chown(path, 1234, 0) },
		"newer":     func(path string) error { return os.WriteFile(path, []byte(`{"format":99}`), 0o600) },
		"oversized": func(path string) error { return os.Truncate(path, 65<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				if name == "foreign" && os.Geteuid() != 0 {
					t.Skip("SKIPPED: only root can give a file to another user")
				}
				dir := t.TempDir()
				r := start(t, backend, setup{store: openStore(t, dir, identity(backend)), journal: t.TempDir()})
				r.baseline(api.BaselineRequest{Confirm: true})
				r.stop()
				must(t, spoil(filepath.Join(dir, "baseline.json")))
				r.restart(t, backend, dir)
				r.wantReady()
				r.wantLog("The confirmed baseline cannot be used")
				b := r.d.Status().Baseline
				if b == nil || b.Error == "" || b.Generation != "" || b.Rules != 0 || b.AppearedRules != 0 {
					t.Errorf("the status says %+v", b)
				}
				if public := r.d.Status().Public().Baseline; public == nil || strings.Contains(public.Error, dir) || public.Error == "" {
					t.Errorf("over TCP: %+v", public)
				}
				if reply := r.baseline(api.BaselineRequest{}); reply.Baseline == nil || reply.Baseline.Error == "" || len(reply.Changes) > 0 {
					t.Errorf("asked: %+v", reply)
				}
				if preview := r.restore(api.RestoreRequest{DryRun: true}); preview.Baseline == nil || preview.Baseline.Error == "" {
					t.Errorf("a preview: %+v", preview)
				}
				r.poisoned()
				r.flushNat()
				r.settled()
				if record := r.records(0)[0]; record.Outcome != reload.Proved || record.NotInBaseline != nil {
					t.Errorf("the record is %+v", record)
				}
				r.wantReady()
				reply := r.baseline(api.BaselineRequest{Confirm: true})
				if reply.Replaced == nil || reply.Replaced.Error == "" || reply.Baseline.Error != "" {
					t.Errorf("confirmed: %+v", reply)
				}
				r.wantSince("once it is replaced", 0, 0, 0)
			})
		})
	}
}

// TestBaselineOfManyChanges: an owner changes its rules all the time. Comparisons take 2 % of a
// core at most, and a request gets a present one.
func TestBaselineOfManyChanges(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{store: openStore(t, t.TempDir(), identity(backend))})
		r.baseline(api.BaselineRequest{Confirm: true})
		must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
		var lines []string
		for i := range 700 {
			lines = append(lines, fmt.Sprintf("-A KUBE-FORWARD -s 10.9.%d.%d/32 -j ACCEPT", i/250, i%250))
		}
		r.write(rules.Filter, lines...)
		r.after(20 * time.Second)
		reply := r.baseline(api.BaselineRequest{})
		first := reply.Changes[0]
		for _, c := range reply.Changes {
			if c.Appeared != len(c.Rules)+c.More {
				t.Errorf("%s: %d appeared, %d are listed and %d more", c.Chain, c.Appeared, len(c.Rules), c.More)
			}
			if !c.Known && first.Chain != "KUBE-SERVICES" && first.Chain != "KUBE-FORWARD" {
				t.Errorf("a new chain stands before those that were confirmed: %+v", reply.Changes)
			}
			if c.Chain == "KUBE-FORWARD" && (c.Appeared != 700 || len(c.Rules) != baseline.LinesQuoted/10) {
				t.Errorf("KUBE-FORWARD: %d appeared, %d are listed", c.Appeared, len(c.Rules))
			}
		}
		if b := reply.Baseline; b.AppearedRules <= 700 || b.AppearedChains != len(reply.Changes) {
			t.Errorf("counted %+v in %d chains", b, len(reply.Changes))
		}
	})
}

// TestABaselineHasNoNativeTables: the reply counts the guarded native tables, because the baseline
// has no rules of them.
func TestABaselineHasNoNativeTables(t *testing.T) {
	nativeNode(t, setup{store: openStore(t, t.TempDir(), identity(iptables.NFT))}, func(t *testing.T, r *rig, k *fakeNative) {
		r.baseline(api.BaselineRequest{Confirm: true})
		k.addRule(proxyTable, "poison")
		r.settled()
		if reply := r.baseline(api.BaselineRequest{}); reply.NativeTables != 2 || len(reply.Changes) != 0 {
			t.Errorf("the reply is %+v", reply)
		}
	})
}
