package daemon

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A press receives a daemon's reports of flushes.
type press struct {
	mu    sync.Mutex
	lines []string
	ids   map[string]int // numbers of IDs, in order of arrival
}

// reported follows the rig's reports until the returned function is called. A line has the
// flush's number, whether it is final, and the outcome.
func (r *rig) reported() (p *press, end func()) {
	p = &press{ids: map[string]int{}}
	ctx, cancel := context.WithCancel(r.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.d.Report(ctx, func(f api.Flush, stage api.Stage) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.ids[f.ID] == 0 {
				p.ids[f.ID] = len(p.ids) + 1
			}
			line := f.Line("", stage)
			p.lines = append(p.lines, fmt.Sprintf("flush %d final %t: %s", p.ids[f.ID], line.Final, line.Outcome))
		})
	}()
	synctest.Wait()
	return p, sync.OnceFunc(func() {
		cancel()
		<-ended
	})
}

func (p *press) want(t *testing.T, when string, want ...string) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if diff := cmp.Diff(want, p.lines); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

// TestReportsOfFlushes: a flush has one line when it is over. It has another one when it begins
// to wait, or when its replays have failed for ten seconds.
func TestReportsOfFlushes(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		p, end := r.reported()
		r.after(time.Hour)
		p.want(t, "an hour without a flush")
		r.flushNat()
		r.settled()
		lines := []string{"flush 1 final true: proved"}
		p.want(t, "a flush that is repaired", lines...)

		r.fake.FailRestores(-1, iptables.ReasonOther)
		r.flushNat()
		r.after(9 * time.Second)
		p.want(t, "a replay that fails for nine seconds", lines...)
		r.after(time.Minute)
		lines = append(lines, "flush 2 final false: failed")
		p.want(t, "a replay that fails for a minute", lines...)
		r.fake.FailRestores(0, "")
		r.after(time.Minute)
		lines = append(lines, "flush 2 final true: proved")
		p.want(t, "it succeeds", lines...)

		r.pause(time.Minute)
		r.flushNat()
		r.settled()
		lines = append(lines, "flush 3 final false: waiting: paused")
		p.want(t, "a flush in a pause", lines...)
		r.after(2 * time.Minute)
		lines = append(lines, "flush 3 final true: proved")
		p.want(t, "the pause is over", lines...)

		r.flushNat()
		r.settled()
		end()
		r.after(time.Minute)
		r.flushNat()
		r.settled()
		p.want(t, "nothing is reported any more", append(lines, "flush 4 final true: proved")...)
	})
}

// TestReportsInObserveMode: a flush waits for the rules' owner. Its line is final once the
// rules are back.
func TestReportsInObserveMode(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{mode: api.Observe})
		p, end := r.reported()
		defer end()
		r.flushNat()
		r.settled()
		p.want(t, "a flush", "flush 1 final false: waiting: observe")
		must(t, scenario.Load(t.Context(), r.programs(), rules.IPv4))
		r.after(time.Minute)
		p.want(t, "its owner has put it back", "flush 1 final false: waiting: observe", "flush 1 final true: skipped")
	})
}

// TestReportsAfterARestart: a run does not repeat the reports of an earlier one. A flush that
// still waits has a line in each run's output, and one more when it is over.
func TestReportsAfterARestart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		fake := loadedFake(t, backend)
		r := startOn(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
		r.flushNat()
		r.settled()
		r.stop()
		must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
		time.Sleep(time.Hour)
		r = run(t, fake, setup{store: openStore(t, dir, identity(backend)), journal: dir})
		p, end := r.reported()
		defer end()
		r.after(time.Minute)
		p.want(t, "a loss that was found at the start", "flush 1 final false: waiting: decision")
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.after(time.Minute)
		p.want(t, "it is accepted", "flush 1 final false: waiting: decision", "flush 1 final true: dismissed")
	})
}

// TestReportsOfNativeTables: flushes of native tables have the same lines.
func TestReportsOfNativeTables(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		p, end := r.reported()
		defer end()
		k.flushRuleset()
		r.settled()
		p.want(t, "a flush of the ruleset", "flush 1 final true: proved")
		k.deleteTable(proxyTable)
		r.after(time.Minute)
		p.want(t, "a table that is deleted alone", "flush 1 final true: proved", "flush 2 final false: waiting: decision")
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.after(time.Minute)
		p.want(t, "that is accepted", "flush 1 final true: proved", "flush 2 final false: waiting: decision", "flush 2 final true: dismissed")
	})
}

// TestReportsOfAWar: a process flushes without end. There are no more lines than records, and a
// slow reader does not delay the loop.
func TestReportsOfAWar(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		block := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan int)
		go func() {
			n := 0
			r.d.Report(ctx, func(api.Flush, api.Stage) {
				if n++; n == 1 {
					<-block
				}
			})
			ended <- n
		}()
		synctest.Wait()
		for range 300 {
			r.flushNat()
			r.after(700 * time.Millisecond)
		}
		r.after(time.Minute)
		r.wantReady()
		close(block)
		r.after(time.Minute)
		cancel()
		if n := <-ended; n < 2 || n > 300 {
			t.Errorf("%d lines", n)
		}
	})
}
