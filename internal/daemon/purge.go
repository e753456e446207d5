package daemon

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A purge deletes rules one by one that its configuration does not have, canaryd's marks among
// them: Puppet's firewall module does, and so does `iptables-save | grep KUBE | sed s/-A/-D/`.
// Without the marks each deletion looks like a decision of the rules' owner. A process that deletes
// marks by name owns none of those rules, so whatever it deleted by name is a loss: before the
// marks, when it was learned as a decision, and after them.

const (
	// purgeKept is for how long canaryd remembers what owners removed. A purge that comes to the
	// marks later than that after its last deletion keeps what it deleted before.
	purgeKept = time.Minute
	// purgeRules bounds the rules, and purgeRemovals the removals, that are remembered.
	purgeRules    = 100_000
	purgeRemovals = 1024
	// purgeQuiet is how long a purge must rest until what its process deletes is a decision again.
	purgeQuiet = 10 * time.Second
	// purgeGap is how far apart two deletions of one purge may be of which the process is not
	// known. A chain that was emptied is learned 2 s later.
	purgeGap = 3 * time.Second
	// purgeRest is how long a purge must rest until its flush record is closed, and purgeTry how
	// often its damage is repaired meanwhile. purgeMost bounds that.
	purgeRest = 800 * time.Millisecond
	purgeTry  = 900 * time.Millisecond
	purgeMost = 2 * time.Minute
)

// purges is what the loop knows of purges.
type purges struct {
	removals []removed // what was learned to be removed, oldest first
	rules    int       // of all
	open     *purge    // nil: no process deletes marks
}

// A removed is what a change that was learned took, and who did that.
type removed struct {
	reload.Removal
	by map[string][]watch.Doer // of each chain; on legacy "" has who held the lock meanwhile
}

// A purge is what one process, or several, do that delete marks by name.
type purge struct {
	by       []watch.Doer
	commit   nft.Commit // that deleted the first mark; zero on legacy
	program  watch.Program
	rival    bool      // another process is known to have executed it, too
	began    time.Time // when a mark was found deleted
	last     time.Time // when it was last found to have deleted something
	recalled map[rules.TableID]reload.Recalled
}

// current returns the purge that is under way; nil if there is none.
func (p *purges) current(now time.Time) *purge {
	if p.open != nil && now.Sub(p.open.last) > purgeQuiet {
		p.open = nil
	}
	return p.open
}

// forget forgets what was removed too long ago, or is too much.
func (p *purges) forget(now time.Time) {
	n := 0
	for n < len(p.removals) && (now.Sub(p.removals[n].Time) > purgeKept || p.rules > purgeRules || len(p.removals)-n > purgeRemovals) {
		p.rules -= p.removals[n].Rules()
		n++
	}
	p.removals = slices.Delete(p.removals, 0, n)
}

// noteRemoval remembers what was learned to be removed from a table, and reports whether a purge
// may have removed it, which executes a command for each rule.
func (d *Daemon) noteRemoval(st *state, id rules.TableID, was, is rules.Section, now time.Time) (single bool) {
	r := removed{Removal: reload.RemovalOf(id, was, is, now)}
	if r.Empty() {
		return false
	}
	fs, q := st.families[id.Family], d.inquire(context.Background())
	if q.legacy {
		r.by = map[string][]watch.Doer{"": q.lockDoers(fs.examined.before.at)}
	} else {
		r.by = q.takers(id, r.In(), uint32(fs.examined.before.digest))
	}
	st.purges.removals = append(st.purges.removals, r)
	st.purges.rules += r.Rules()
	st.purges.forget(now)
	for _, doers := range r.by {
		single = single || len(doers) == 0 || slices.ContainsFunc(doers, func(by watch.Doer) bool {
			return by.Program != watch.Restore
		})
	}
	return single
}

// noticePurge finds out whether the process that took marks deleted them by name, and reports
// whether it is one that was not known yet. Then recallPurged follows.
func (d *Daemon) noticePurge(ctx context.Context, st *state) (began bool) {
	now, q := time.Now(), d.inquire(ctx)
	p := st.purges.current(now)
	p.identify(q)
	for _, w := range d.purgers(st, q) {
		if p != nil && p.of([]watch.Doer{w.Doer()}) != another {
			continue
		}
		if p == nil {
			p = &purge{program: w.Doer().Program, commit: nft.Commit{Genid: w.Genid, PID: w.PID, Comm: w.Comm}, recalled: map[rules.TableID]reload.Recalled{}}
			st.purges.open = p
		}
		p.by, p.began, p.last, began = append(p.by, w.Doer()), now, now, true
		st.flushLog(ctx).Info("A process deletes rules by name, and canaryd's marks among them; all that it deletes so is a loss",
			"flush", st.loss.record.ID, "by", culpritText(api.CulpritOf(w.OfDoer(w.Doer()))))
	}
	return began
}

// purgers returns the processes that deleted a mark by name, and nothing else in the same commit.
// On legacy it is known of commands that were read while they held the lock. Of others, the one
// that held it last is the likeliest.
func (d *Daemon) purgers(st *state, q inquiry) (list []watch.Writer) {
	if st.loss.drill != nil || st.drill != nil {
		return nil
	}
	if q.legacy {
		for _, w := range lastOf(q.writers.Holders(st.loss.record.Time.Add(-holderWindow))) {
			if !q.own(w.PID) && d.deletesMarks(w.Command) {
				list = append(list, w)
			}
		}
		if len(list) > 0 || !st.loss.byName {
			return list
		}
		likeliest := watch.Writer{}
		for _, w := range q.holders(st.loss) {
			if !q.own(w.PID) && !onlyReads(w.Command) && (w.Doer().Known() || !likeliest.Doer().Known()) {
				likeliest = w
			}
		}
		return []watch.Writer{likeliest}
	}
	want := st.want()
	for _, k := range q.takings.List {
		// A flush of a table in which nothing but the mark stands looks the same.
		if !nft.Newer(k.Commit.Genid, st.loss.intact) || !q.foreign(k) || k.Deleted || k.Count != 1 {
			continue
		}
		id := k.Family.Table(k.Table)
		if want[id].RuleCount() == 0 && !slices.ContainsFunc(st.purges.removals, func(r removed) bool { return r.Table == id }) {
			continue
		}
		if slices.ContainsFunc(k.Rules, func(r iptables.TakenRule) bool { return r.Comment != "" }) {
			list = append(list, q.ofBurst(k.Commit))
		}
	}
	return list
}

// deletesMarks reports whether a command line of iptables' deletes a mark by name.
func (d *Daemon) deletesMarks(command string) bool {
	words := strings.Fields(command)
	deletes := slices.ContainsFunc(words, func(w string) bool {
		return slices.Contains([]string{"-D", "--delete", "-F", "--flush", "-X", "--delete-chain"}, w)
	})
	return deletes && slices.ContainsFunc(words, func(w string) bool {
		return w == d.cfg.Canary || canary.IsMarkComment(strings.Trim(w, `"'`))
	})
}

// deletedByName reports whether a probe saw that a mark went by itself. A flush of a table takes
// its canary with its witnesses, and a flush of a built-in chain more than the witness.
func (st *state) deletedByName(marks canary.Marks, f rules.Family, chain string, probed iptables.Probed) bool {
	for id, m := range marks {
		if id.Family != f || m.Nonce == "" {
			continue
		}
		canaryStands, before := marks.CanaryPresent(f, id.Name, chain, probed), st.table(id).standing.table
		for _, w := range m.Witnessed {
			held := probed.Holdings[iptables.Place{Table: id.Name, Chain: w}]
			stands := slices.Contains(held.Comments, m.Nonce.WitnessComment())
			if stands && !canaryStands || !stands && canaryStands && before != nil && held.Rules > 0 && held.Rules == len(before.Rules(w))-1 {
				return true
			}
		}
	}
	return false
}

// recallPurged takes what the purge removed before back into what is learned.
func (d *Daemon) recallPurged(st *state) {
	p := st.purges.open
	st.purges.forget(time.Now())
	lists := map[rules.TableID][]removed{}
	near := p.began
	for _, r := range st.purges.removals {
		for _, doers := range r.by {
			p.meet(doers, r.Time)
		}
	}
	for _, r := range slices.Backward(st.purges.removals) {
		sure := another
		for _, doers := range r.by {
			sure = max(sure, p.of(doers))
		}
		if p.did(sure, near.Sub(r.Time)) {
			near = r.Time
			lists[r.Table] = append(lists[r.Table], r)
		}
	}
	for id, list := range lists {
		var plain []reload.Removal
		for _, r := range list {
			plain = append(plain, r.Removal)
		}
		purged := func(i int, chain, _ string) bool {
			doers, known := list[i].by[chain]
			if !known {
				doers = list[i].by[""]
			}
			return p.of(doers) != another
		}
		learned, recalled := st.generation.learned.Recall(plain, purged, d.cfg.Protection.Piecewise)
		if len(recalled) == 0 {
			continue
		}
		st.relearn(learned, time.Now(), st.families[id.Family])
		p.recalled[id] = p.recalled[id].With(recalled)
		st.accepted.withdraw(id, time.Now().Add(-purgeKept))
		st.purges.removals = slices.DeleteFunc(st.purges.removals, func(r removed) bool { return r.Table == id })
	}
	st.purges.rules = 0
	for _, r := range st.purges.removals {
		st.purges.rules += r.Rules()
	}
}

// purged returns what reports of a read whether a purge took what it does not show; nil while
// none is under way. since is when the read before it of a family was.
func (d *Daemon) purged(st *state, since func(rules.Family) time.Time) func(rules.TableID, string, string) bool {
	p := st.purges.current(time.Now())
	if p == nil {
		return nil
	}
	q := d.inquire(context.Background())
	p.identify(q)
	p.keepAwake(q)
	if q.legacy {
		return func(id rules.TableID, chain, target string) bool {
			if p.recalled[id].Has(chain, target) {
				return true
			}
			return p.did(p.of(q.lockDoers(since(id.Family))), time.Since(p.last))
		}
	}
	return func(id rules.TableID, chain, target string) bool {
		return p.recalled[id].Has(chain, target) || p.tookLast(q, id, chain, target)
	}
}

// tookLast reports whether the last commit that wrote to the chain, or that took the jump, was the
// purge's, and took something.
func (p *purge) tookLast(q inquiry, id rules.TableID, chain, target string) bool {
	for _, k := range slices.Backward(q.takings.List) {
		if k.Family.Table(k.Table) != id || !q.foreign(k) {
			continue
		}
		if target != "" && !k.TookRule(iptables.TakenRule{Chain: chain, Target: target}) || target == "" && !k.Touched(chain) {
			continue
		}
		return k.Took(chain) && p.did(p.of([]watch.Doer{q.writers.Of(k.Commit).Doer()}), time.Since(p.last))
	}
	return false
}

// goesOn reports whether the flush record of a purge stays open although all is back: the process
// has deleted something a moment ago, and more may follow.
func (d *Daemon) goesOn(st *state, now time.Time) bool {
	p := st.purges.current(now)
	if p == nil || now.Sub(st.loss.record.Time) > purgeMost {
		return false
	}
	p.recalled = map[rules.TableID]reload.Recalled{}
	return now.Sub(p.last) < purgeRest
}
