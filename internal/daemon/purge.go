package daemon

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A purge deletes, one by one, all rules that its configuration lacks, canaryd's marks among them:
// Puppet's firewall module does, and so does a script of `iptables -D`. Without the marks each
// deletion looks like a decision of the rules' owner. An agent or a script that deletes marks by
// name owns none of those rules. So every rule that it deleted by name is lost: those before the
// marks, whose deletion was learned as a decision, and those after them. Deletions by other
// processes are their decisions.

const (
	// purgeKept is for how long canaryd remembers removals. Rules that a purge deleted longer than
	// that before it came to the marks stay deleted.
	purgeKept = time.Minute
	// purgeRules bounds the rules, and purgeRemovals the removals, that are remembered.
	purgeRules    = 100_000
	purgeRemovals = 1024
	// purgeQuiet is how long a purge must rest until deletions by its process are decisions again.
	purgeQuiet = 10 * time.Second
	// purgeGap is the longest time between a command of a purge and one by an unknown process that
	// counts for it.
	purgeGap = time.Second
	// purgeRest is how long a purge must rest until its flush record is closed, and purgeTry the
	// time between two replays meanwhile. purgeMost bounds both.
	purgeRest = 1200 * time.Millisecond
	purgeTry  = 900 * time.Millisecond
	purgeMost = 2 * time.Minute
)

// purges is the loop's knowledge of purges.
type purges struct {
	removals []removed        // learned as decisions, oldest first
	rules    int              // of all
	open     *purge           // nil: no process deletes marks
	flushed  flushes.Verdicts // the tables of the last loss
	backAt   time.Time        // when these were back; zero: no loss has ended
}

// A removed is a learned removal and the time in which it happened.
type removed struct {
	reload.Removal
	span
}

// A purge is the work of one or several processes that delete marks by name.
type purge struct {
	by       []watch.Doer
	last     time.Time // of its last deletion that is known
	read     time.Time // when the tables were read last
	unsure   bool      // that read was too soon to know all processes that wrote before it
	recalled map[rules.TableID]reload.Recalled
}

// current returns the purge that is under way; nil if there is none.
func (p *purges) current(now time.Time) *purge {
	if p.open != nil && now.Sub(p.open.last) > purgeQuiet {
		p.open = nil
	}
	return p.open
}

// forget forgets old removals, and the oldest of too many.
func (p *purges) forget(now time.Time) {
	n := 0
	for n < len(p.removals) && (now.Sub(p.removals[n].Time) > purgeKept || p.rules > purgeRules || len(p.removals)-n > purgeRemovals) {
		p.rules -= p.removals[n].Rules()
		n++
	}
	p.removals = slices.Delete(p.removals, 0, n)
}

// noteRemoval remembers a removal from a table that was learned. It reports whether an agent or a
// script may have removed the rules and may come to the marks next; true if the process is not
// known.
func (d *Daemon) noteRemoval(st *state, id rules.TableID, was, is rules.Section, now time.Time) (mayPurge bool) {
	r := removed{Removal: reload.RemovalOf(id, was, is, now)}
	if r.Empty() {
		return false
	}
	fs, q := st.families[id.Family], d.inquire(context.Background())
	r.span = span{st.table(id).settled, read{fs.examined.digest, time.Now()}}
	by := q.touched(id, r.span)
	for _, chain := range r.In() {
		deeds := by.of(chain)
		mayPurge = mayPurge || len(deeds) == 0 || slices.ContainsFunc(deeds, func(x deed) bool {
			return x.by.OneJob() || !x.by.Known() && onlyOneRule(x.by.Comm)
		})
	}
	if st.purges.current(now) != nil {
		fs.examined.plan(r.upto.at.Add(purgeGap + purgeGap/4))
	}
	st.purges.removals = append(st.purges.removals, r)
	st.purges.rules += r.Rules()
	st.purges.forget(now)
	return mayPurge
}

// noticePurge finds the processes that deleted marks by name. It reports whether rules that they
// deleted before were learned as removed, and are expected again.
func (d *Daemon) noticePurge(ctx context.Context, st *state) (recalled bool) {
	now, q := time.Now(), d.inquire(ctx)
	p := st.purges.current(now)
	for _, w := range d.purgers(st, q) {
		if p == nil {
			p = &purge{recalled: map[rules.TableID]reload.Recalled{}}
			st.purges.open = p
		}
		if p.is(w.Doer()) {
			continue
		}
		p.by, p.last = append(p.by, w.Doer()), now
		severity.Warnings(st.flushLog(ctx)).Info("A process deletes rules by name, and canaryd's marks among them; all that it deletes so is a loss",
			"flush", st.loss.record.ID, "by", flushes.CulpritText(api.CulpritOf(w.OfDoer(w.Doer()))))
	}
	return p != nil && d.recallPurged(st, p, q)
}

// recallPurged takes rules that the purge removed, and whose removal was learned, back into the
// generation. It reports whether there were any.
func (d *Daemon) recallPurged(st *state, p *purge, q inquiry) (found bool) {
	now := time.Now()
	st.purges.forget(now)
	lists, rest := map[rules.TableID][]removed{}, []removed(nil)
	for _, r := range slices.Backward(st.purges.removals) {
		lists[r.Table] = append(lists[r.Table], r)
	}
	for id, list := range lists {
		plain, by, waits := make([]reload.Removal, len(list)), make([]touches, len(list)), map[string]bool{}
		for i, r := range list {
			plain[i], by[i] = r.Removal, q.touched(id, r.span)
			for _, chain := range r.In() {
				waits[chain] = waits[chain] || !r.over()
			}
		}
		purged := func(i int, chain string) bool { return !waits[chain] && p.did(q, by[i].of(chain)) }
		learned, recalled := st.generation.learned.Recall(plain, purged, d.cfg.Protection.Piecewise)
		for i, r := range list {
			r.Removal = r.Without(func(chain string) bool { return purged(i, chain) })
			rest = append(rest, r)
		}
		if len(recalled) == 0 {
			continue
		}
		found = true
		st.relearn(learned, now, st.families[id.Family])
		p.recalled[id] = p.recalled[id].With(recalled)
		st.accepted.withdraw(id, now.Add(-purgeKept))
	}
	st.purges.removals = slices.DeleteFunc(rest, func(r removed) bool { return r.Empty() })
	slices.SortStableFunc(st.purges.removals, func(a, b removed) int { return a.Time.Compare(b.Time) })
	st.purges.rules = 0
	for _, r := range st.purges.removals {
		st.purges.rules += r.Rules()
	}
	return found
}

// swept returns a function that reports whether a flusher deleted HintChain, which a read lacks,
// behind the replay of what it had taken before: -X after -F. A replay leaves it few other chains
// to delete, and those kube-proxy may have deleted as well. nil: no table was flushed lately.
func (st *state) swept(now time.Time) func(rules.TableID, string, string) bool {
	tables := flushes.Verdicts{}
	if now.Sub(st.purges.backAt) <= purgeQuiet {
		maps.Copy(tables, st.purges.flushed)
	}
	if st.loss != nil {
		maps.Copy(tables, st.loss.hit)
	}
	if len(tables) == 0 {
		return nil
	}
	return func(id rules.TableID, chain, target string) bool {
		return chain == owners.HintChain && target == "" && tables[id] != ""
	}
}

// purged returns a function that reports whether a purge took the rules of a chain, or its jump
// to target, that a read lacks, or whether a flusher took the chain; nil while neither is under
// way. On legacy that is known when the lock has been free for a moment.
func (d *Daemon) purged(st *state) func(rules.TableID, string, string) bool {
	p, swept := st.purges.current(time.Now()), st.swept(time.Now())
	if p == nil {
		return swept
	}
	q, known := d.inquire(context.Background()), map[rules.TableID]touches{}
	p.read, p.unsure = time.Now(), false
	p.keepAwake(q)
	return func(id rules.TableID, chain, target string) bool {
		t, asked := known[id]
		if !asked {
			settled := st.table(id).settled
			t = q.touched(id, span{settled, read{digest: settled.digest + 1<<30, at: p.read}})
			if q.legacy && !t.over(p.read) {
				p.unsure = p.unsure || !t.others(p)
				t = touches{}
			}
			known[id] = t
		}
		return p.recalled[id].Has(chain, target) || p.did(q, t.of(chain)) || swept != nil && swept(id, chain, target)
	}
}

// recallLate is recallPurged for removals whose process became known only now.
func (d *Daemon) recallLate(st *state) {
	if p := st.purges.current(time.Now()); p != nil && len(st.purges.removals) > 0 {
		d.recallPurged(st, p, d.inquire(context.Background()))
	}
}

// goesOn reports whether the flush record of a purge stays open although all rules are back: the
// process deleted one a moment before the tables were read, and may delete more.
func (d *Daemon) goesOn(st *state, now time.Time) bool {
	p := st.purges.current(now)
	if p == nil || now.Sub(st.loss.record.Time) > purgeMost {
		return false
	}
	p.recalled = map[rules.TableID]reload.Recalled{}
	return p.unsure || p.read.Sub(p.last) < purgeRest
}
