// Package culprit finds the processes that removed lost rules, and the processes that delete
// marks by name.
//
// An [Inquiry] holds the evidence of one moment: the commits that the kernel reported, and the
// processes that wrote. [Inquiry.AddWriters] puts the writers and the culprits into a flush
// record. [Inquiry.Answer] names the processes that caused one table's loss, a [Charge].
// [Purges] remembers the processes that delete rules one by one, and the rules that such a
// [Purge] deleted before it reached the marks.
//
// Missing evidence is no error: the answer is nil, or says that messages were missed. The values
// belong to the loop's goroutine.
package culprit

import (
	"cmp"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// This file finds the processes that removed the lost rules. On nft the messages of a commit
// name the deleted rules, so a process is named only for tables that it removed something from.
// On legacy canaryd only knows the processes that held the lock.

// An Inquiry is the evidence about processes that wrote, at one moment of a loss.
type Inquiry struct {
	Takings iptables.Takings
	Writers *watch.Writers
	Own     func(pid uint32) bool
	Legacy  bool
	Canary  string // the name of the canary's chain
	Purge   *Purge // the present one; nil: none is known
}

// Bounds are the times and the genids between which a loss happened.
type Bounds struct {
	First   time.Time // the first evidence
	Written time.Time // the end of the last write before; zero: none is known
	Noticed time.Time
	Intact  uint32 // of the last intact look
	Heard   uint32 // of the last read that found something lost
}

// A Charge is one table's loss, and the genids between which it happened.
type Charge struct {
	ID      rules.TableID
	Finding canary.Finding
	Canary  string // the name of the canary's chain
	Nonces  []canary.Nonce
	Intact  uint32 // of the last look that found the table's marks in place,
	Sound   uint32 // of the last look that found its content in force,
	InForce uint32 // of a read around a write that found all of it in force,
	Upto    uint32 // and of the read that showed the loss
}

// Answer returns the processes that removed the table's lost content, in the order of their
// commits; nil if they are unknown. missed means that there may be more, because messages were
// missed.
func (q Inquiry) Answer(c Charge) (guilty []watch.Writer, missed bool) {
	if q.Legacy {
		return nil, false
	}
	for _, k := range q.about(c) {
		w := q.named(q.Writers.Of(k.Commit))
		if !slices.ContainsFunc(guilty, func(g watch.Writer) bool { return g.Genid == w.Genid || q.Purge != nil && g.PID == w.PID }) {
			guilty = append(guilty, w)
		}
	}
	if q.Takings.Reach(c.since()) {
		return guilty, false
	}
	if only := q.only(c); len(only) > 0 {
		return only, false
	}
	return guilty, len(guilty) > 0
}

// since returns the genid at which the table was last known to be well. A lost mark counts from
// the last look at the marks, other content from the last look at the content.
func (c Charge) since() uint32 {
	if c.Finding.MarkLost || len(c.Finding.Witnesses) > 0 {
		return c.Intact
	}
	return c.Sound
}

// about returns the takings that may have caused the charge, oldest first. canaryd's own
// commits, and those after the read of the loss, do not count.
func (q Inquiry) about(c Charge) []iptables.Taking {
	var own []iptables.Taking // of this table, by others, between the proof and the read of the loss
	for _, k := range q.Takings.List {
		if c.InForce != 0 && !nft.Newer(k.Commit.Genid, c.InForce) {
			continue
		}
		if k.Family.Table(k.Table) == c.ID && !k.Commit.Own && !q.Own(k.Commit.PID) && !nft.Newer(k.Commit.Genid, c.Upto) {
			own = append(own, k)
		}
	}
	switch {
	case c.Finding.MarkLost:
		return slices.DeleteFunc(own, func(k iptables.Taking) bool { return !c.tookMark(k) })
	case c.Finding.Verdict == canary.Drifted:
		return c.drifters(own)
	default:
		return c.lastTakers(own)
	}
}

// tookMark reports whether the commit removed the canary. It also reports true for a later
// commit that removed the canary's chain or the table.
func (c Charge) tookMark(k iptables.Taking) bool {
	for _, n := range c.Nonces {
		if k.TookRule(iptables.TakenRule{Chain: c.Canary, Comment: n.Comment()}) {
			return true
		}
	}
	return nft.Newer(k.Commit.Genid, c.Intact) && k.Took(c.Canary)
}

// lastTakers returns, for each lost thing in a table that still has its canary, the last commit
// that removed it.
func (c Charge) lastTakers(all []iptables.Taking) []iptables.Taking {
	last := map[int]bool{}
	find := func(took func(iptables.Taking) bool) {
		for i, k := range slices.Backward(all) {
			if took(k) {
				last[i] = true
				return
			}
		}
	}
	for _, chain := range c.Finding.Witnesses {
		find(func(k iptables.Taking) bool {
			return slices.ContainsFunc(c.Nonces, func(n canary.Nonce) bool {
				return k.Deleted || k.TookRule(iptables.TakenRule{Chain: chain, Comment: n.WitnessComment()})
			})
		})
	}
	for _, h := range c.Finding.Jumps {
		if !slices.Contains(c.Finding.Witnesses, h.Chain) {
			find(func(k iptables.Taking) bool {
				return k.Deleted || k.TookRule(iptables.TakenRule{Chain: h.Chain, Target: h.Rule.Target})
			})
		}
	}
	for _, chain := range slices.Concat(c.Finding.Emptied, c.Finding.Missing, jumpChains(c.Finding.Taken)) {
		find(func(k iptables.Taking) bool { return k.Took(chain) })
	}
	var found []iptables.Taking
	for i, k := range all {
		if last[i] {
			found = append(found, k)
		}
	}
	return found
}

// drifters returns the commits to the table since it was as declared. If several processes made
// them, it returns only commits that removed something from the chains in question.
func (c Charge) drifters(all []iptables.Taking) []iptables.Taking {
	all = slices.DeleteFunc(all, func(k iptables.Taking) bool { return !nft.Newer(k.Commit.Genid, c.Sound) })
	if !slices.ContainsFunc(all, func(k iptables.Taking) bool { return k.Commit.PID != all[0].Commit.PID }) {
		return all
	}
	return slices.DeleteFunc(all, func(k iptables.Taking) bool {
		return !slices.ContainsFunc(c.Finding.Drift, func(d rules.Deviation) bool { return k.Took(d.Chain) })
	})
}

// only returns the single process that wrote while the table lost its content, for an Answer
// whose removals were missed. canaryd must have heard every commit of that time. nil: another
// process may have written, too.
func (q Inquiry) only(c Charge) []watch.Writer {
	if !q.Writers.Heard(c.since(), c.Upto) {
		return nil
	}
	list := slices.DeleteFunc(q.Writers.Between(c.since(), c.Upto), func(w watch.Writer) bool { return q.Own(w.PID) })
	if len(list) == 0 || slices.ContainsFunc(list, func(w watch.Writer) bool { return w.PID != list[0].PID }) {
		return nil
	}
	return list[len(list)-1:]
}

// jumpChains returns the chains of rules, each once.
func jumpChains(list []rules.Jump) (names []string) {
	for _, h := range list {
		if !slices.Contains(names, h.Chain) {
			names = append(names, h.Chain)
		}
	}
	return names
}

// Taker returns the process that caused a charge, for missing rules and accepted removals; nil
// if it is unknown. On legacy that is the last process that held the lock before a read first
// showed the loss, at seen.
func (q Inquiry) Taker(c Charge, seen time.Time) *api.Culprit {
	var by []watch.Writer
	if q.Legacy {
		by = slices.DeleteFunc(q.Writers.Holders(seen.Add(-holderWindow)), func(w watch.Writer) bool {
			return w.Time.After(seen.Add(holderLate)) || q.Own(w.PID) || onlyReads(w.Command)
		})
	} else {
		for _, k := range q.about(c) {
			by = append(by, q.Writers.Of(k.Commit))
		}
	}
	if len(by) == 0 {
		return nil
	}
	culprit := api.CulpritOf(by[len(by)-1])
	return &culprit
}

// Committer returns the process that made a commit to a native table, for an accepted removal;
// nil if it is not known.
func (q Inquiry) Committer(c nft.Commit) *api.Culprit {
	if c.PID == 0 {
		return nil
	}
	culprit := api.CulpritOf(q.Writers.Of(c))
	return &culprit
}

// LastTaker returns the process whose commit last removed content of the charge, since the
// table was known to be well. The loop dates a missing rule from its commit. It returns false
// on legacy, and if that commit is unknown.
func (q Inquiry) LastTaker(c Charge) (w watch.Writer, found bool) {
	if q.Legacy {
		return w, false
	}
	for _, k := range q.about(c) {
		if nft.Newer(k.Commit.Genid, c.Sound) {
			w = q.Writers.Of(k.Commit)
		}
	}
	return w, !w.Time.IsZero()
}

// TookFrom reports whether another process removed content of the charge from a chain. Then a
// drill for real did not cause the loss alone (tookToo).
func (q Inquiry) TookFrom(c Charge, chain string) bool {
	return slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return q.tookSince(k, c.ID, c.since(), c.Upto, []string{chain})
	})
}

// tookSince reports whether a commit of another process, between two genids, removed something
// from these chains of a table.
func (q Inquiry) tookSince(k iptables.Taking, id rules.TableID, after, upto uint32, chains []string) bool {
	return k.Family.Table(k.Table) == id && q.foreign(k) && nft.Newer(k.Commit.Genid, after) && !nft.Newer(k.Commit.Genid, upto) &&
		slices.ContainsFunc(chains, k.Took)
}

// TakersOf returns the processes that may have removed something from chains of a table between
// two reads; nil if unknown. Where the kernel reports them, it also returns the removals of
// each commit. robberOf judges by both.
func (q Inquiry) TakersOf(id rules.TableID, before, upto Read, chains []string) (by []watch.Writer, takings []iptables.Taking) {
	if q.Legacy {
		return slices.DeleteFunc(lastOf(q.Writers.Holders(before.At.Add(-holderWindow))), func(w watch.Writer) bool {
			return q.Own(w.PID) || onlyReads(w.Command)
		}), nil
	}
	if before.Digest == 0 || !q.Takings.Reach(uint32(before.Digest)) {
		return nil, nil
	}
	for _, k := range q.Takings.List {
		if q.tookSince(k, id, uint32(before.Digest), uint32(upto.Digest), chains) {
			takings = append(takings, k)
			by = append(by, q.Writers.Of(k.Commit))
		}
	}
	return by, takings
}

// ByOwner reports whether an owner of a chain removed its missing rules between two reads, and no
// other process did. With a target, the missing rules are the built-in chain's jumps to that chain,
// whose owner removes them. It is false if a process is not known. The owner is the committing
// process or its parent. If a process with an owner's name also removed something after these
// reads, it is the flusher: a script may be called "firewall", like the CNI plugin.
func (q Inquiry) ByOwner(id rules.TableID, before, upto Read, chain, target string) bool {
	owner := func(c nft.Commit) bool {
		return q.Writers.Of(c).IsOrChildOf(func(comm string) bool { return owners.WritesChain(comm, cmp.Or(target, chain)) })
	}
	if slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return k.Family.Table(k.Table) == id && nft.Newer(k.Commit.Genid, uint32(upto.Digest)) && owner(k.Commit)
	}) {
		return false
	}
	_, takings := q.TakersOf(id, before, upto, []string{chain})
	takings = slices.DeleteFunc(takings, func(k iptables.Taking) bool {
		jump := func(r iptables.TakenRule) bool { return r.Chain == chain && r.Target == target }
		return target != "" && !k.More && !k.Deleted && !slices.ContainsFunc(k.Rules, jump)
	})
	return len(takings) > 0 && !slices.ContainsFunc(takings, func(k iptables.Taking) bool { return !owner(k.Commit) })
}

// OthersWrote reports whether a process other than by, which removed rules, wrote to the table,
// or may have, after genid from and up to genid upto. The number of lost unprotected rules is
// then unknown (unprotectedGone). On legacy it is false: the kernel reports no single writes
// there.
func (q Inquiry) OthersWrote(id rules.TableID, from, upto uint32, by []watch.Writer) bool {
	switch {
	case q.Legacy:
		return false
	case !q.Takings.Reach(from):
		return len(by) == 0 // else they were the only ones
	}
	return slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return k.Family.Table(k.Table) == id && nft.Newer(k.Commit.Genid, from) && !nft.Newer(k.Commit.Genid, upto) &&
			!slices.ContainsFunc(by, func(w watch.Writer) bool { return w.PID == k.Commit.PID })
	})
}
