package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/api"
)

// Report calls say for each stage that a flush reaches: when it lasts, and when it is over. It
// follows the status and delays no replay. When ctx ends it reports the flushes that have ended
// by then, and returns.
func (d *Daemon) Report(ctx context.Context, say func(api.Flush, api.Stage)) {
	r := reporter{say: say, said: map[string]api.Stage{}}
	now, news, end := d.watchers.follow(d.Status)
	defer end()
	r.see(now.Flushes, time.Now())
	for {
		select {
		case <-ctx.Done():
			r.see(d.Status().Flushes, time.Now())
			return
		case next := <-news:
			r.see(next.Flushes, time.Now())
		}
	}
}

// A reporter knows the stages that it has reported of each flush.
type reporter struct {
	say  func(api.Flush, api.Stage)
	said map[string]api.Stage
}

// see reports the stages that are new in a list of flushes, the newest first. A flush that was
// over before this run began is not reported.
func (r *reporter) see(list []api.Flush, now time.Time) {
	stages := make(map[string]api.Stage, len(list))
	for i := len(list) - 1; i >= 0; i-- {
		f := list[i]
		said, known := r.said[f.ID]
		stage := max(f.Stage(now), said)
		if stages[f.ID] = stage; stage == said || !known && f.Earlier && !f.Open() {
			continue
		}
		r.say(f, stage)
	}
	r.said = stages
}
