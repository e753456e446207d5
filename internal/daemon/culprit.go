package daemon

import (
	"context"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// This file finds out which process took the rules that are lost. On nft the messages of a
// commit name what it deleted, so that a process is named only for tables that it took something
// from. On legacy only the processes are known that held the lock.

// An inquiry is what is known about the processes that wrote, at one moment of a loss.
type inquiry struct {
	takings iptables.Takings
	writers *watch.Writers
	own     func(pid uint32) bool
	legacy  bool
	purge   *purge // that is under way; nil: none is known
}

// inquire asks what is known now.
func (d *Daemon) inquire(ctx context.Context) inquiry {
	q := inquiry{writers: d.cfg.Writers, own: d.cfg.Kernel.Own, legacy: d.cfg.Kernel.Info().Backend == iptables.Legacy}
	if !q.legacy {
		q.takings = d.cfg.Kernel.Takings(ctx)
	}
	return q
}

// A charge is one table's loss, and between which genids it came about.
type charge struct {
	id      rules.TableID
	finding canary.Finding
	canary  string // the name of the canary's chain
	nonces  []canary.Nonce
	intact  uint32 // the last at which the table's marks were seen to stand,
	sound   uint32 // at which its content was seen to be in force,
	inForce uint32 // at which a read around a write saw all of it in force,
	upto    uint32 // and that of the read which showed the loss
}

// charge makes up what is asked about one table.
func (d *Daemon) charge(st *state, id rules.TableID, finding canary.Finding, upto uint64) charge {
	fs, mark := st.families[id.Family], st.marks.current[id]
	c := charge{id: id, finding: finding, canary: d.cfg.Canary, nonces: []canary.Nonce{mark.Nonce},
		intact: uint32(fs.looked.intact), sound: uint32(fs.examined.sound), upto: uint32(upto)}
	if ts := st.table(id); !ts.unmarked(id.Name) { // no write proves that anything of it is in force
		c.inForce = uint32(ts.inForce)
	}
	if c.inForce != 0 {
		c.intact, c.sound = later(c.intact, c.inForce), later(c.sound, c.inForce)
	}
	if mark.Tried != nil {
		c.nonces = append(c.nonces, mark.Tried.Nonce)
	}
	return c
}

// answer returns the processes that took what the table lost, in the order of their commits;
// nil if they are not known. missed: there may be more, because messages were missed.
func (q inquiry) answer(c charge) (guilty []watch.Writer, missed bool) {
	if q.legacy {
		return nil, false
	}
	for _, k := range q.about(c) {
		w := q.named(q.writers.Of(k.Commit))
		if !slices.ContainsFunc(guilty, func(g watch.Writer) bool { return g.Genid == w.Genid || q.purge != nil && g.PID == w.PID }) {
			guilty = append(guilty, w)
		}
	}
	if q.takings.Reach(c.since()) {
		return guilty, false
	}
	if only := q.only(c); len(only) > 0 {
		return only, false
	}
	return guilty, len(guilty) > 0
}

// since returns the genid at which the table was known to be well.
func (c charge) since() uint32 {
	if c.finding.MarkLost || len(c.finding.Witnesses) > 0 {
		return c.intact
	}
	return c.sound
}

// about returns the takings that a charge is about.
func (q inquiry) about(c charge) []iptables.Taking {
	var own []iptables.Taking // of this table, by others, from the last proof until the loss was read
	for _, k := range q.takings.List {
		if c.inForce != 0 && !nft.Newer(k.Commit.Genid, c.inForce) {
			continue
		}
		if k.Family.Table(k.Table) == c.id && !k.Commit.Own && !q.own(k.Commit.PID) && !nft.Newer(k.Commit.Genid, c.upto) {
			own = append(own, k)
		}
	}
	switch {
	case c.finding.MarkLost:
		return slices.DeleteFunc(own, func(k iptables.Taking) bool { return !c.tookMark(k) })
	case c.finding.Verdict == canary.Drifted:
		return c.drifters(own)
	default:
		return c.lastTakers(own)
	}
}

// tookMark reports whether the commit took the canary or, after it was taken by another
// one, its chain or the table.
func (c charge) tookMark(k iptables.Taking) bool {
	for _, n := range c.nonces {
		if k.TookRule(iptables.TakenRule{Chain: c.canary, Comment: n.Comment()}) {
			return true
		}
	}
	return nft.Newer(k.Commit.Genid, c.intact) && k.Took(c.canary)
}

// lastTakers returns for each thing that is lost while the canary stands the last commit
// that took it: since then it is missing.
func (c charge) lastTakers(all []iptables.Taking) []iptables.Taking {
	last := map[int]bool{}
	find := func(took func(iptables.Taking) bool) {
		for i, k := range slices.Backward(all) {
			if took(k) {
				last[i] = true
				return
			}
		}
	}
	for _, chain := range c.finding.Witnesses {
		find(func(k iptables.Taking) bool {
			return slices.ContainsFunc(c.nonces, func(n canary.Nonce) bool {
				return k.Deleted || k.TookRule(iptables.TakenRule{Chain: chain, Comment: n.WitnessComment()})
			})
		})
	}
	for _, h := range c.finding.Jumps {
		if !slices.Contains(c.finding.Witnesses, h.Chain) {
			find(func(k iptables.Taking) bool {
				return k.Deleted || k.TookRule(iptables.TakenRule{Chain: h.Chain, Target: h.Rule.Target})
			})
		}
	}
	for _, chain := range slices.Concat(c.finding.Emptied, c.finding.Missing, jumpChains(c.finding.Taken)) {
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
func (c charge) drifters(all []iptables.Taking) []iptables.Taking {
	all = slices.DeleteFunc(all, func(k iptables.Taking) bool { return !nft.Newer(k.Commit.Genid, c.sound) })
	if !slices.ContainsFunc(all, func(k iptables.Taking) bool { return k.Commit.PID != all[0].Commit.PID }) {
		return all
	}
	return slices.DeleteFunc(all, func(k iptables.Taking) bool {
		return !slices.ContainsFunc(c.finding.Drift, func(d rules.Deviation) bool { return k.Took(d.Chain) })
	})
}

// only returns the one process that wrote while the table came to its loss, if every
// commit of that time was heard of and there was no other.
func (q inquiry) only(c charge) []watch.Writer {
	if !q.writers.Heard(c.since(), c.upto) {
		return nil
	}
	list := slices.DeleteFunc(q.writers.Between(c.since(), c.upto), func(w watch.Writer) bool { return q.own(w.PID) })
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
