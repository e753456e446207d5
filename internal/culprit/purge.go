package culprit

import (
	"maps"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A purge deletes, one by one, all rules that its configuration lacks, including canaryd's
// marks. Puppet's firewall module does that, and so does a script of `iptables -D`. Without the
// marks each deletion looks like a decision of the rules' owner. But an agent or script that
// deletes marks by name owns none of those rules, so every rule that it deleted by name is
// lost. That includes rules before the marks, whose deletion was learned as a decision.
// Deletions by other processes are their decisions.

const (
	// PurgeKept is how long canaryd remembers removals. Rules that a purge deleted earlier than
	// that before it reached the marks stay deleted.
	PurgeKept = time.Minute
	// purgeRules bounds the rules, and purgeRemovals the removals, that are remembered.
	purgeRules    = 100_000
	purgeRemovals = 1024
	// purgeQuiet is how long a purge must rest until canaryd takes deletions by its process for
	// decisions again.
	purgeQuiet = 10 * time.Second
	// purgeGap is the longest time between a command of a purge and a command of an unknown
	// process that counts for it.
	purgeGap = time.Second
	// purgeRest is how long a purge must rest until its flush record is closed, and PurgeTry
	// the time between two replays meanwhile. purgeMost bounds both.
	purgeRest = 1200 * time.Millisecond
	PurgeTry  = 900 * time.Millisecond
	purgeMost = 2 * time.Minute
)

// Purges is the loop's knowledge of purges.
type Purges struct {
	removals []removed        // learned as decisions, oldest first
	rules    int              // of all
	open     *Purge           // nil: no process deletes marks
	flushed  flushes.Verdicts // the tables of the last loss
	backAt   time.Time        // when these were back; zero: no loss has ended
}

// A removed is a learned removal and the time in which it happened.
type removed struct {
	reload.Removal
	Span
}

// A Purge is the work of one or several processes that delete marks by name.
type Purge struct {
	by       []watch.Doer
	last     time.Time // of its last known deletion
	read     time.Time // when the tables were read last
	unsure   bool      // that read was too soon to know all writers before it
	recalled map[rules.TableID]reload.Recalled
}

// BackIs notes that the tables of a loss are back in force.
func (p *Purges) BackIs(flushed flushes.Verdicts, at time.Time) { p.flushed, p.backAt = flushed, at }

// WroteAt notes a deletion.
func (p *Purge) WroteAt(at time.Time) { p.last = at }

// Current returns the present purge; nil if there is none. It ends a purge that has written
// nothing for purgeQuiet.
func (p *Purges) Current(now time.Time) *Purge {
	if p.open != nil && now.Sub(p.open.last) > purgeQuiet {
		p.open = nil
	}
	return p.open
}

// forget bounds the memory: it drops removals older than PurgeKept, and the oldest ones if there
// are too many. It runs after a removal was added, and before removals are used.
func (p *Purges) forget(now time.Time) {
	n := 0
	for n < len(p.removals) && (now.Sub(p.removals[n].Time) > PurgeKept || p.rules > purgeRules || len(p.removals)-n > purgeRemovals) {
		p.rules -= p.removals[n].Rules()
		n++
	}
	clear(p.removals[:n])
	p.removals = p.removals[n:]
}

// Note remembers a learned removal from a table. It reports whether an agent or a script may
// have removed the rules and may delete the marks next; true if the process is unknown. again
// is the time of the family's next read; zero if there is no purge.
func (p *Purges) Note(q Inquiry, removal reload.Removal, during Span, now time.Time) (mayPurge bool, again time.Time) {
	r := removed{Removal: removal, Span: during}
	by := q.touched(r.Table, r.Span)
	for _, chain := range r.In() {
		deeds := by.of(chain)
		mayPurge = mayPurge || len(deeds) == 0 || slices.ContainsFunc(deeds, func(x deed) bool {
			return x.by.OneJob() || !x.by.Known() && onlyOneRule(x.by.Comm)
		})
	}
	if p.Current(now) != nil {
		again = r.Upto.At.Add(purgeGap + purgeGap/4)
	}
	p.removals = append(p.removals, r)
	p.rules += r.Rules()
	p.forget(now)
	return mayPurge, again
}

// Notice finds the processes that deleted marks by name within the bounds of a loss, and begins
// a purge by them. byName: a probe showed such a deletion (DeletedByName). It returns the
// commands that reveal new ones.
func (p *Purges) Notice(q Inquiry, b Bounds, byName bool, marks canary.Marks, now time.Time) (fresh []watch.Writer) {
	open := p.Current(now)
	for _, w := range q.purgers(b, byName, marks) {
		if open == nil {
			open = &Purge{recalled: map[rules.TableID]reload.Recalled{}}
			p.open = open
		}
		if open.is(w.Doer()) {
			continue
		}
		open.by, open.last = append(open.by, w.Doer()), now
		fresh = append(fresh, w)
	}
	return fresh
}

// MayRecall reports whether there is a purge now and canaryd remembers removals.
func (p *Purges) MayRecall(now time.Time) bool { return p.Current(now) != nil && len(p.removals) > 0 }

// Recall puts rules back into the learned generation if the purge removed them and the removal
// was learned; a purge must be present. piecewise names chains to which many owners write rules
// of their own. from are the tables of the rules put back, in no order.
func (p *Purges) Recall(q Inquiry, learned reload.Learned, piecewise func(chain string) bool, now time.Time) (next reload.Learned, from []rules.TableID) {
	p.forget(now)
	lists, rest := map[rules.TableID][]removed{}, []removed(nil)
	for _, r := range slices.Backward(p.removals) {
		lists[r.Table] = append(lists[r.Table], r)
	}
	for id, list := range lists {
		plain, by, waits := make([]reload.Removal, len(list)), make([]touches, len(list)), map[string]bool{}
		for i, r := range list {
			plain[i], by[i] = r.Removal, q.touched(id, r.Span)
			for _, chain := range r.In() {
				waits[chain] = waits[chain] || !r.over()
			}
		}
		purged := func(i int, chain string) bool { return !waits[chain] && p.open.did(q, by[i].of(chain)) }
		more, recalled := learned.Recall(plain, purged, piecewise)
		for i, r := range list {
			r.Removal = r.Without(func(chain string) bool { return purged(i, chain) })
			rest = append(rest, r)
		}
		if len(recalled) > 0 {
			learned, from = more, append(from, id)
			p.open.recalled[id] = p.open.recalled[id].With(recalled)
		}
	}
	p.removals = slices.DeleteFunc(rest, func(r removed) bool { return r.Empty() })
	sorting.Stable(p.removals, func(a, b removed) int { return a.Time.Compare(b.Time) })
	p.rules = 0
	for _, r := range p.removals {
		p.rules += r.Rules()
	}
	return learned, from
}

// Swept returns a function that reports whether a flusher deleted HintChain, which a read
// lacks, after the replay of its earlier removals: -X after -F. Other chains are mostly
// referenced after a replay, and kube-proxy may have deleted the rest. lost are the tables of
// the open loss. Swept returns nil if no table was flushed lately.
func (p *Purges) Swept(now time.Time, lost flushes.Verdicts) func(rules.TableID, string, string) bool {
	tables := flushes.Verdicts{}
	if now.Sub(p.backAt) <= purgeQuiet {
		maps.Copy(tables, p.flushed)
	}
	maps.Copy(tables, lost)
	if len(tables) == 0 {
		return nil
	}
	return func(id rules.TableID, chain, target string) bool {
		return chain == owners.HintChain && target == "" && tables[id] != ""
	}
}

// Purged returns a function that reports whether the purge removed the rules of a chain, or its
// jump to target, which a read lacks. It also reports chains that a flusher removed, as swept
// does. On legacy that is known once the lock has been free for a moment. settled are the last
// reads that the generation has completely.
func (p *Purge) Purged(q Inquiry, now time.Time, settled map[rules.TableID]Read, swept func(rules.TableID, string, string) bool) func(rules.TableID, string, string) bool {
	known := map[rules.TableID]touches{}
	p.read, p.unsure = now, false
	p.keepAwake(q)
	return func(id rules.TableID, chain, target string) bool {
		t, asked := known[id]
		if !asked {
			t = q.touched(id, Span{settled[id], Read{Digest: settled[id].Digest + 1<<30, At: p.read}})
			if q.Legacy && !t.over(p.read) {
				p.unsure = p.unsure || !t.others(p)
				t = touches{}
			}
			known[id] = t
		}
		return p.recalled[id].Has(chain, target) || p.did(q, t.of(chain)) || swept != nil && swept(id, chain, target)
	}
}

// GoesOn reports whether the flush record of a purge, which begins at that time, stays open
// although all rules are back. The process deleted a rule a moment before the tables were read,
// and may delete more.
func (p *Purges) GoesOn(begins, now time.Time) bool {
	open := p.Current(now)
	if open == nil || now.Sub(begins) > purgeMost {
		return false
	}
	open.recalled = map[rules.TableID]reload.Recalled{}
	return open.unsure || open.read.Sub(open.last) < purgeRest
}
