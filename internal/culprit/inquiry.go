// Package culprit finds out which processes took the lost rules, and which processes delete marks
// by name.
//
// An [Inquiry] holds the evidence of one moment: the commits that the kernel reported, and the
// processes that wrote. [Inquiry.AddWriters] puts the writers and the culprits into a flush record,
// and [Inquiry.Answer] names the processes that caused one table's loss, a [Charge]. [Purges]
// remembers which processes delete rules one by one, and which rules such a [Purge] took before it
// reached the marks.
//
// Missing evidence is no error: the answer is nil, or says that messages were missed. The values
// belong to the loop's goroutine.
package culprit

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// This file finds out which process took the rules that are lost. On nft the messages of a
// commit name what it deleted, so that a process is named only for tables that it took something
// from. On legacy only the processes are known that held the lock.

// An Inquiry is what is known about the processes that wrote, at one moment of a loss.
type Inquiry struct {
	Takings iptables.Takings
	Writers *watch.Writers
	Own     func(pid uint32) bool
	Legacy  bool
	Canary  string // the name of the canary's chain
	Purge   *Purge // that is under way; nil: none is known
}

// Bounds are the times and the genids between which a loss came about.
type Bounds struct {
	First   time.Time // the first evidence
	Written time.Time // the end of the last write before; zero: none is known
	Noticed time.Time
	Intact  uint32 // of the last intact look
	Heard   uint32 // the last at which something was found lost
}

// A Charge is one table's loss, and between which genids it came about.
type Charge struct {
	ID      rules.TableID
	Finding canary.Finding
	Canary  string // the name of the canary's chain
	Nonces  []canary.Nonce
	Intact  uint32 // the last at which the table's marks were seen to stand,
	Sound   uint32 // at which its content was seen to be in force,
	InForce uint32 // at which a read around a write saw all of it in force,
	Upto    uint32 // and that of the read which showed the loss
}

// Answer returns the processes that took what the table lost, in the order of their commits;
// nil if they are not known. missed: there may be more, because messages were missed.
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

// since returns the genid at which the table was known to be well.
func (c Charge) since() uint32 {
	if c.Finding.MarkLost || len(c.Finding.Witnesses) > 0 {
		return c.Intact
	}
	return c.Sound
}

// about returns the takings that a charge is about.
func (q Inquiry) about(c Charge) []iptables.Taking {
	var own []iptables.Taking // of this table, by others, from the last proof until the loss was read
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

// tookMark reports whether the commit took the canary or, after it was taken by another
// one, its chain or the table.
func (c Charge) tookMark(k iptables.Taking) bool {
	for _, n := range c.Nonces {
		if k.TookRule(iptables.TakenRule{Chain: c.Canary, Comment: n.Comment()}) {
			return true
		}
	}
	return nft.Newer(k.Commit.Genid, c.Intact) && k.Took(c.Canary)
}

// lastTakers returns for each thing that is lost while the canary stands the last commit
// that took it: since then it is missing.
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

// drifters returns the commits to the table since it was as declared: all of them if one
// process made them, else those that took something from the chains in question.
func (c Charge) drifters(all []iptables.Taking) []iptables.Taking {
	all = slices.DeleteFunc(all, func(k iptables.Taking) bool { return !nft.Newer(k.Commit.Genid, c.Sound) })
	if !slices.ContainsFunc(all, func(k iptables.Taking) bool { return k.Commit.PID != all[0].Commit.PID }) {
		return all
	}
	return slices.DeleteFunc(all, func(k iptables.Taking) bool {
		return !slices.ContainsFunc(c.Finding.Drift, func(d rules.Deviation) bool { return k.Took(d.Chain) })
	})
}

// only returns the one process that wrote while the table came to its loss, if every
// commit of that time was heard of and there was no other.
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

// Taker returns the process that took what a charge is about, nil if it is not known. On legacy it
// is the one that held the lock last before a read was the first to show it.
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

// Committer returns the process that made a commit to a native table, nil if it is not known.
func (q Inquiry) Committer(c nft.Commit) *api.Culprit {
	if c.PID == 0 {
		return nil
	}
	culprit := api.CulpritOf(q.Writers.Of(c))
	return &culprit
}

// LastTaker returns the process whose commit took last what a charge is about, since the table was
// known to be well. It returns false on legacy, and where that commit is not known.
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

// TookFrom reports whether another process took from a chain what a charge is about.
func (q Inquiry) TookFrom(c Charge, chain string) bool {
	return slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return q.tookSince(k, c.ID, c.since(), c.Upto, []string{chain})
	})
}

// tookSince reports whether another process's commit between two genids took from one of these
// chains of a table.
func (q Inquiry) tookSince(k iptables.Taking, id rules.TableID, after, upto uint32, chains []string) bool {
	return k.Family.Table(k.Table) == id && q.foreign(k) && nft.Newer(k.Commit.Genid, after) && !nft.Newer(k.Commit.Genid, upto) &&
		slices.ContainsFunc(chains, k.Took)
}

// TakersOf returns the processes that may have taken from chains of a table between two reads and,
// where the kernel says so, what each commit took.
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

// OthersWrote reports whether a process that took nothing wrote to the table meanwhile, or
// may have. On legacy nothing is heard of single writes: what was read around the flush
// has to do.
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
