package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A pause is for planned work. One that outlasts a day has been forgotten, and
// leaves the node without a guard.
const (
	leastPause = time.Second
	mostPause  = 24 * time.Hour
)

// pause is until when replays wait.
type pause struct {
	until time.Time // zero: not paused
}

// on reports whether replays are paused.
func (p *pause) on() bool { return !p.until.IsZero() }

// CheckPause returns an error, about what is called so, unless a pause may last
// that long.
func CheckPause(what string, length time.Duration) error {
	if length < leastPause || length > mostPause {
		return fmt.Errorf("%s is %s: want at least %s and at most %s", what, length, leastPause, mostPause)
	}
	return nil
}

// Pause holds replays for r.Seconds from now, whether or not they are held
// already. Detection, counting and learning go on. What is asked for by name,
// Restore and Cleanup, is done all the same. A pause is kept nowhere: it ends
// with this process, for nobody remembers one over a restart.
func (d *Daemon) Pause(ctx context.Context, r api.PauseRequest) (api.PauseReply, error) {
	// More seconds than a Duration holds are too many all the same.
	length := time.Duration(min(max(r.Seconds, 0), 1e9) * float64(time.Second))
	if err := CheckPause("the pause", length); err != nil {
		return api.PauseReply{}, err
	}
	var reply api.PauseReply
	var failed error
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if st.removed {
			failed = errStopped
			return
		}
		reply.WasPaused = st.pause.on()
		st.pause.until = time.Now().Add(length)
		reply.Until = st.pause.until
		if st.loss != nil { // it is told, and no longer tried
			st.loss.tryAt = time.Now()
		}
		st.resumeNative()
		klog.FromContext(ctx).Info("Paused on request: what is lost is told, but not replayed",
			"for", length, "until", reply.Until.UTC().Format(time.RFC3339), "wasPaused", reply.WasPaused)
		d.publish(st)
	})
	return reply, errors.Join(err, failed)
}

// Resume ends a pause; what is lost is replayed at once.
func (d *Daemon) Resume(ctx context.Context) (api.PauseReply, error) {
	var reply api.PauseReply
	var failed error
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if st.removed {
			failed = errStopped
			return
		}
		if reply.WasPaused = st.pause.on(); reply.WasPaused {
			d.unpause(ctx, st, "Resumed on request")
		}
		d.publish(st)
	})
	return reply, errors.Join(err, failed)
}

// runOut ends a pause whose time is over.
func (d *Daemon) runOut(ctx context.Context, st *state) { d.unpause(ctx, st, "The pause has run out") }

// unpause lets replays begin again, with what was lost meanwhile.
func (d *Daemon) unpause(ctx context.Context, st *state, why string) {
	st.pause.until = time.Time{}
	next := "nothing is lost"
	if st.native.loss != nil {
		st.resumeNative()
		next = "replaying what is lost"
	}
	if st.loss != nil {
		st.loss.tryAt, next = time.Now(), "replaying what is lost"
		if st.loss.record.Outcome == api.WaitingPaused {
			st.loss.record.Outcome = api.Pending
		}
	}
	klog.FromContext(ctx).Info(why, "next", next)
}

// hold tells what is lost and leaves it so until the pause ends. The marks stay
// as the flush left them: they tell the replay what its owner did not touch.
func (d *Daemon) hold(ctx context.Context, st *state) {
	examined, err := d.readLoss(ctx, st)
	if err != nil {
		d.retry(ctx, st, err)
		return
	}
	found := map[rules.TableID]hit{}
	for id, x := range examined {
		if x.Finding.Verdict.Loss() {
			found[id] = hitOf(x)
			st.families[id.Family].tables[id.Name].verdict = x.Finding.Verdict
		}
	}
	d.tell(ctx, st, found)
	if !st.loss.recorded { // its owner was faster
		st.loss = nil
		// On legacy what it put back may have the digest of before, so that no
		// look calls for it.
		for _, fs := range st.families {
			fs.examined.markDirty(time.Now())
		}
		st.looking.plan(time.Now().Add(d.cfg.PollInterval))
		return
	}
	st.loss.record.Outcome = api.WaitingPaused
	d.keepOpen(ctx, st.loss)
	st.loss.tryAt = st.pause.until
}

// holdMore has a loss that is held told again if it has grown.
func (st *state) holdMore() {
	if !st.pause.on() {
		return
	}
	for f, fs := range st.families {
		for t, ts := range fs.tables {
			if ts.verdict.Loss() && st.loss.hit[f][t] == "" {
				st.loss.tryAt = time.Now()
			}
		}
	}
}
