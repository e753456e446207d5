package daemon

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
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
// of a flush. learnLastMoment learns nothing of a table that had lost more than jumps by then: the
// table may hold rules of a saved file.
func (d *Daemon) learnLastMoment(st *state, f rules.Family, digest uint64) {
	for t, moments := range d.cfg.Kernel.Before(f, digest) {
		for _, before := range moments {
			d.learnMoment(st, f.Table(t), before)
		}
	}
}

// learnMoment takes into the generation the rules that owners had written and removed in one table
// before a commit.
func (d *Daemon) learnMoment(st *state, id rules.TableID, before iptables.Snapshot) {
	fs, ts, learned, now := st.families[id.Family], st.table(id), st.generation.learned, time.Now()
	if ts == nil || !learned.Knows(id.Family, id.Name) || ts.standing.table == nil || before.Older(ts.standing.digest) {
		return
	}
	x := d.examiner(st).Examine(before, d.job(st, id.Family))[id.Name]
	v := x.Finding.Verdict
	onlyJumps := v == canary.JumpsMissing && !ts.learningStopped // a flush of a built-in chain
	if x.Finding.Err != nil || v != canary.Intact && v != canary.Changed && !onlyJumps {
		return
	}
	_, seen := x.Section.Split(st.declared.now.Claims)
	was := learned.Generation[id]
	next := reload.Grown(was, seen)
	if st.quarantine.Count(id) == 0 { // else seen lacks rules that no process removed
		q, upto := d.inquire(context.Background()), culprit.Read{Digest: before.Digest, At: now}
		next = reload.Cut(next, seen, func(chain, target string) bool { return q.ByOwner(id, ts.settled, upto, chain, target) })
	}
	if next.Equal(was) {
		return
	}
	st.accept(id, was, next, now)
	learned.Generation = learned.Generation.With(id, next)
	st.generation.made = reload.MadeByOwners
	st.relearn(learned, now, fs)
}

// keepDoubted returns seen with the former rules of doubted chains. Such a chain has fewer rules,
// and no owner is known to have removed these: it may be the first half of a flush. Its
// change is learned after captureQuiet without another one in the family, at the latest after
// captureMost; again is that time, or zero. All changes on legacy are learned so late. Emptied and
// removed chains wait longer, in Learned.Learn.
func (d *Daemon) keepDoubted(st *state, id rules.TableID, seen rules.Section, now time.Time) (kept rules.Section, again time.Time) {
	fs, ts, before := st.families[id.Family], st.table(id), st.generation.learned.Generation[id]
	since, upto := ts.doubted, culprit.Read{Digest: fs.examined.digest, At: now}
	kept, ts.doubted = seen, nil
	if !fs.looked.stamp.Exact || st.quarantine.Count(id) > 0 {
		return kept, again
	}
	inquire := sync.OnceValue(func() culprit.Inquiry { return d.inquire(context.Background()) })
	for _, changed := range rules.ChangedChains(before.Chains, seen.Chains) {
		if changed.Was < 0 || changed.Is < 0 {
			continue
		}
		was, is := before.Chains[changed.Was], seen.Chains[changed.Is]
		if len(is.Rules) == 0 || len(is.Rules) >= len(was.Rules) || was.LeftOut() || is.LeftOut() {
			continue
		}
		first, known := since[is.Name]
		if !known {
			first = fs.examined.since
		}
		over := pace.Earliest(fs.examined.moved.Add(captureQuiet), first.Add(captureMost))
		if !now.Before(over) || inquire().ByOwner(id, ts.settled, upto, is.Name, "") {
			continue
		}
		if ts.doubted == nil {
			ts.doubted, kept.Chains = map[string]time.Time{}, slices.Clone(seen.Chains)
		}
		ts.doubted[is.Name], kept.Chains[changed.Is].Rules = first, was.Rules
		again = pace.Earliest(again, over)
	}
	return kept, again
}
