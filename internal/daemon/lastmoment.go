package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// read reads a family, and learns the rules that owners wrote right before a flush that it
// shows.
func (d *Daemon) read(ctx context.Context, st *state, f rules.Family) (iptables.Snapshot, error) {
	snapshot, err := d.cfg.Kernel.Read(ctx, f)
	if err == nil {
		d.learnLastMoment(st, f, snapshot.Digest)
	}
	return snapshot, err
}

// latest returns the function that gives a replay the generation after each read; see
// reload.Job.
func (d *Daemon) latest(st *state) func(rules.Family, uint64) rules.Generation {
	return func(f rules.Family, digest uint64) rules.Generation {
		d.learnLastMoment(st, f, digest)
		return protect.DetachAll(st.want(), st.loss.gone)
	}
}

// learnLastMoment takes into the generation the rules that owners wrote and removed between the
// last read of a table and a flush. The flush is a commit that took marks, jumps or all rules of a
// chain, and that a read with that digest shows. On nft the kernel's notifications show the table
// right before it. A removal counts only if its process is known to own the chain: it may be half
// of a flush. learnLastMoment learns nothing of a table that was lost then: the table may hold
// rules of a saved file.
func (d *Daemon) learnLastMoment(st *state, f rules.Family, digest uint64) {
	fs, now := st.families[f], time.Now()
	for t, before := range d.cfg.Kernel.Before(f, digest) {
		id, ts := f.Table(t), fs.tables[t]
		learned := st.generation.learned
		if ts == nil || !learned.Knows(f, t) || ts.standing.table == nil || before.Older(ts.standing.digest) {
			continue
		}
		x := d.examiner(st).Examine(before, d.job(st, f))[t]
		if v := x.Finding.Verdict; x.Finding.Err != nil || v != canary.Intact && v != canary.Changed {
			continue
		}
		_, seen := x.Section.Split(st.declared.now.Claims)
		was := learned.Generation[id]
		next := reload.Grown(was, seen)
		if len(st.quarantine.rules[id]) == 0 { // else seen lacks rules that no process removed
			q, upto := d.inquire(context.Background()), culprit.Read{Digest: before.Digest, At: now}
			next = reload.Cut(next, seen, func(chain, target string) bool { return q.ByOwner(id, ts.settled, upto, chain, target) })
		}
		if next.Equal(was) {
			continue
		}
		st.accept(id, was, next, now)
		learned.Generation = learned.Generation.With(id, next)
		st.generation.made = reload.MadeByOwners
		st.relearn(learned, now, fs)
	}
}
