package daemon

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// This file decides which processes are a purge's.

// takers returns for each of the chains which processes took rules of it since that genid or, if
// there is none, the last one that did.
func (q inquiry) takers(id rules.TableID, chains []string, since uint32) map[string][]watch.Doer {
	by, lacking := make(map[string][]watch.Doer, len(chains)), len(chains)
	for _, chain := range chains {
		by[chain] = nil
	}
	for _, k := range slices.Backward(q.takings.List) {
		fresh := nft.Newer(k.Commit.Genid, since)
		if !fresh && lacking == 0 {
			break
		}
		if k.Family.Table(k.Table) != id || !q.foreign(k) {
			continue
		}
		took := k.Chains
		if k.Deleted || k.More {
			took = chains
		}
		doer := watch.Doer{}
		for _, chain := range took {
			known, wanted := by[chain]
			if !wanted || !fresh && len(known) > 0 {
				continue
			}
			if doer.PID == 0 {
				doer = q.writers.Of(k.Commit).Doer()
			}
			if len(known) == 0 {
				lacking--
			}
			by[chain] = append(known, doer)
		}
	}
	return by
}

// foreign reports whether a commit was another process's.
func (q inquiry) foreign(k iptables.Taking) bool { return !k.Commit.Own && !q.own(k.Commit.PID) }

// lockDoers returns the processes that held the lock since then and may have written.
func (q inquiry) lockDoers(since time.Time) (doers []watch.Doer) {
	for _, w := range lastOf(q.writers.Holders(since)) {
		if !q.own(w.PID) && !onlyReads(w.Command) {
			doers = append(doers, w.Doer())
		}
	}
	return doers
}

// A likeness is how sure it is that processes are a purge's.
type likeness int

const (
	another  likeness = iota // one of them is known to be another
	possible                 // which processes they were is not known
	certain
)

// of returns whether all of the processes are the purge's.
func (p *purge) of(doers []watch.Doer) likeness {
	sure := certain
	if len(doers) == 0 {
		sure = possible
	}
	for _, doer := range doers {
		switch {
		case slices.ContainsFunc(p.by, doer.Kin):
		case !doer.Known() && p.executed(doer):
			sure = possible
		default:
			return another
		}
	}
	return sure
}

// executed reports whether a process executed the purge's program, or one that is not known.
func (p *purge) executed(doer watch.Doer) bool {
	return doer.Program == "" || p.program == "" || doer.Program == p.program
}

// did reports whether deletions are the purge's: gap is their distance from others of it. Processes
// that are not known are the purge's as long as no other one is known to execute the same program.
func (p *purge) did(sure likeness, gap time.Duration) bool {
	return sure == certain || sure == possible && (!p.rival || gap <= purgeGap)
}

// meet takes up which processes deleted something: the purge's keep it awake, and others may be
// rivals.
func (p *purge) meet(doers []watch.Doer, at time.Time) {
	for _, doer := range doers {
		switch p.of([]watch.Doer{doer}) {
		case certain:
			p.last = latest(p.last, at)
		case another:
			p.rival = p.rival || doer.Known() && p.executed(doer)
		}
	}
}

// identify finds out which process it is if the one that deleted the first mark was gone before it
// could be read: the only one that was read shortly before or after it.
func (p *purge) identify(q inquiry) {
	if p == nil || slices.ContainsFunc(p.by, watch.Doer.Known) {
		return
	}
	if !q.legacy {
		if by := q.ofBurst(p.commit).Doer(); by.Known() {
			p.by = append(p.by, by)
		}
		return
	}
	var known []watch.Doer
	for _, by := range q.lockDoers(p.began.Add(-purgeGap)) {
		if by.Known() && !slices.ContainsFunc(known, by.Is) {
			known = append(known, by)
		}
	}
	if len(known) == 1 {
		p.by = append(p.by, known...)
	}
}

// ofBurst returns who made a commit. If the process was gone before it could be read, it is one
// that was read, made a commit next to it, and executed the same program, unless there were
// several.
func (q inquiry) ofBurst(c nft.Commit) watch.Writer {
	w := q.writers.Of(c)
	if w.Doer().Known() {
		return w
	}
	near := watch.Writer{}
	for _, k := range q.takings.List {
		o := q.writers.Of(k.Commit)
		if by := o.Doer(); !by.Known() || o.Comm != w.Comm || o.Time.Sub(w.Time).Abs() > purgeGap || by.Is(near.By) {
			continue
		}
		if near.PID != 0 {
			return w
		}
		near = o
	}
	if near.PID != 0 {
		w.By = near.By
	}
	return w
}

// keepAwake notes when a process of the purge wrote last, although those may be rules of others.
func (p *purge) keepAwake(q inquiry) {
	since, list := p.last, q.writers.Holders(p.last)
	for _, k := range slices.Backward(q.takings.List) {
		w := q.writers.Of(k.Commit)
		if !w.Time.After(since) {
			break // a commit that is not noted any more has no time
		}
		if q.foreign(k) && k.Count > 0 {
			list = append(list, w)
		}
	}
	for _, w := range list {
		if !q.own(w.PID) && !onlyReads(w.Command) {
			p.meet([]watch.Doer{w.Doer()}, w.Time)
		}
	}
}

// named returns the writer as a record names it: of a purge the process that decided on it, and not
// each program that it executed.
func (q inquiry) named(w watch.Writer) watch.Writer {
	if q.purge == nil {
		return w
	}
	by := w.Doer()
	if !by.Known() && q.purge.of([]watch.Doer{by}) != another {
		for _, known := range q.purge.by {
			if known.Known() {
				by = known
			}
		}
	}
	if !slices.ContainsFunc(q.purge.by, by.Is) {
		return w
	}
	return w.OfDoer(by)
}
