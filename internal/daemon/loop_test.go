package daemon

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// eachScenario runs body for every scenario on every backend that it is on.
func eachScenario(t *testing.T, body func(t *testing.T, backend iptables.Backend, s scenario.Scenario)) {
	onScenarios(t, func(iptables.Backend, int) bool { return true }, body)
}

// oneOfEachScenario is eachScenario for a test that does the same on both backends. A scenario
// that both have runs on nft or legacy, and in make test-large on the other.
func oneOfEachScenario(t *testing.T, body func(t *testing.T, backend iptables.Backend, s scenario.Scenario)) {
	onScenarios(t, func(backend iptables.Backend, n int) bool {
		if !scenario.All()[n].On(backend.Other()) {
			return !testkit.IsLarge()
		}
		return (backend == iptables.NFT) == (n%2 == testkit.Size(0, 1))
	}, body)
}

func onScenarios(t *testing.T, wanted func(iptables.Backend, int) bool, body func(t *testing.T, backend iptables.Backend, s scenario.Scenario)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for n, s := range scenario.All() {
			if s.On(backend) && wanted(backend, n) {
				t.Run(string(backend)+"/"+s.Name, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) { body(t, backend, s) })
				})
			}
		}
	}
}

// leftBy returns the tables after a scenario without canaryd.
func leftBy(t *testing.T, backend iptables.Backend, name string) map[rules.Family]rules.Ruleset {
	t.Helper()
	control := &rig{t: t, fake: loadedFake(t, backend)}
	for _, s := range scenario.All() {
		if s.Name != name {
			continue
		}
		if s.Prepare != nil {
			must(t, s.Prepare(t.Context(), control.programs()))
		}
		must(t, s.Do(t.Context(), control.programs()))
	}
	return control.tables()
}

// TestScenarios: canaryd recognises each kind of flush, and restores everything.
func TestScenarios(t *testing.T) {
	eachScenario(t, func(t *testing.T, backend iptables.Backend, s scenario.Scenario) {
		foreign := leftBy(t, backend, s.Name)
		r := start(t, backend, setup{})
		if s.Prepare != nil {
			must(t, s.Prepare(t.Context(), r.programs()))
			r.settled()
		}
		before, generation := r.tables(), r.d.Status().Generation
		lost, times := judged(s), max(s.Times, 1)
		for range times {
			moved := r.moved(func() {
				must(t, s.Do(t.Context(), r.programs()))
				r.settled()
			}, lossMetrics...)
			wantMoved(t, moved, healed(lost, 1))
			r.wantBack(before, foreign)
		}
		records := r.records(0)
		if len(records) != times {
			t.Fatalf("%d flush records for %d flushes", len(records), times)
		}
		for _, record := range records {
			wantRecord(t, record, lost)
			if backend == iptables.NFT && (record.Culprit.PID != 4242 || record.Culprit.Comm != "iptables") {
				t.Errorf("the culprit is %+v", record.Culprit)
			}
		}
		for key, v := range r.metrics("canary_present", "loss_since", "capture_pending") {
			if v != 1 {
				t.Errorf("%s is %v", key, v)
			}
		}
		if n := len(r.metrics("canary_present")); n != 6 {
			t.Errorf("%d canaries are present, want 6", n)
		}
		// Its ID may differ: a jump's anchor depends on the foreign rules.
		if now := r.d.Status().Generation; now.Rules != generation.Rules || now.Chains != generation.Chains {
			t.Errorf("the generation is %+v, was %+v", now, generation)
		}
	})
}

// judged returns canaryd's verdicts on a scenario's loss. A file from before brings the old
// nonce back into each of its tables.
func judged(s scenario.Scenario) scenario.Lost {
	if s.Name != "restore-old" {
		return s.Lost
	}
	lost := scenario.Lost{}
	for _, table := range protect.Always() {
		lost[rules.IPv4.Table(table)] = scenario.Replaced
	}
	return lost
}

// wantRecord fails unless a flush record has the losses of the scenario.
func wantRecord(t *testing.T, record api.Flush, lost scenario.Lost) {
	t.Helper()
	var families []rules.Family
	for _, f := range rules.Families() {
		for _, table := range protect.Always() {
			if kind := lost[f.Table(table)]; kind != "" && kind != string(record.Kind) {
				t.Errorf("the record says %s, want %s", record.Kind, kind)
			}
		}
		if len(tableid.Of(lost, f)) > 0 {
			families = append(families, f)
		}
	}
	if len(record.Families) != len(families) || record.Families[0] != families[0] {
		t.Errorf("the record names %v, want %v", record.Families, families)
	}
	if record.Outcome != reload.Proved || record.Lost.Rules == 0 || record.Detail != "" {
		t.Errorf("the record says %+v", record)
	}
	wantCounts(t, record)
	if absent := time.Duration(record.AbsentSeconds * float64(time.Second)); absent < 20*time.Millisecond || absent > 50*time.Millisecond {
		t.Errorf("the rules were absent for %s, want the 20 ms of settling and little more", absent)
	}
	if record.NoticedSeconds != 0 {
		t.Errorf("noticed after %v s of virtual time", record.NoticedSeconds)
	}
}

// TestPollIsTheFloor: without hints canaryd heals everything within the poll interval. The walk
// sees a legacy rule that replaces another.
func TestPollIsTheFloor(t *testing.T) {
	oneOfEachScenario(t, func(t *testing.T, backend iptables.Backend, s scenario.Scenario) {
		foreign := leftBy(t, backend, s.Name)
		r := start(t, backend, setup{deaf: true})
		if s.Prepare != nil {
			must(t, s.Prepare(t.Context(), r.programs()))
			r.after(3 * time.Second)
		}
		before := r.tables()
		for range max(s.Times, 1) {
			must(t, s.Do(t.Context(), r.programs()))
			r.after(r.d.cfg.PollInterval + 100*time.Millisecond)
			r.wantBack(before, foreign)
		}
		if hints := r.hints.Counts(); hints["nft"]+hints["lock"]+hints["overflow"] != 0 || hints["poll"] == 0 {
			t.Errorf("hints were given: %v", hints)
		}
	})
}

// TestNoFeedback: a flush is healed, and nothing else happens. Only ticks remain, because
// canaryd's own writes are no reason to look.
func TestNoFeedback(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		r.wantReady()
		r.after(time.Second)
		reads, restores, begins, probes, stamps := r.fake.Reads(), r.fake.Restores(), r.fake.Begins(), r.fake.Probes(), r.fake.Stamps()
		hints := r.hints.Counts()
		const quiet = 10 * time.Minute
		r.after(quiet)
		if n := r.fake.Reads() - reads; n != 0 {
			t.Errorf("%d reads in %s of quiet", n, quiet)
		}
		if n := r.fake.Restores() - restores + r.fake.Begins() - begins; n != 0 {
			t.Errorf("%d restores and sessions in %s of quiet", n, quiet)
		}
		walks := 0
		if backend == iptables.Legacy {
			walks = 2 * int(quiet/(30*time.Second))
		}
		if n := r.fake.Probes() - probes; n > walks {
			t.Errorf("%d probes in %s of quiet, want at most %d", n, quiet, walks)
		}
		if n := r.fake.Stamps() - stamps; n > 2*int(quiet/time.Second)+2 {
			t.Errorf("%d stamps in %s of quiet, want one per family and tick", n, quiet)
		}
		now := r.hints.Counts()
		if now["nft"] != hints["nft"] || now["lock"] != hints["lock"] {
			t.Errorf("hints in a quiet time: %v, before %v", now, hints)
		}
	})
}
