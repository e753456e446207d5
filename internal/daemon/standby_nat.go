package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// standbyFrom is the estimated time of a replay from which --standby=auto has a copy of nat: 600
// services with iptables-nft on 2 cores (Linux 6.18).
const standbyFrom = 100 * time.Millisecond

// A natCopy is the loop's knowledge of a copy of a family's nat only. It is translated with
// each change, and written once in standbyEvery. A nat that changes every few milliseconds is
// followed as often.
type natCopy struct {
	id tableid.TableID

	section     rules.Section // that was copied
	lag         copies.Lag    // of section
	outstanding int           // chains in which it differs from the generation,
	counted     int           // of that edition

	latest    rules.Section // that was translated; opening writes it, too
	latestLag copies.Lag

	moved   uint64       // the digest at which another process had written already; 0: none had
	basis   standbyBasis // of the last decision; while it is the same, so is the copy
	written time.Time    // when the copy was written last
	unkept  bool         // the translation is not written yet
}

// standbyBasis is the basis of the decision about a family's copy.
type standbyBasis struct {
	edition int           // of the generation
	base    []rules.Chain // nat's built-in chains, with the rules of others
	mode    api.Mode      // observe writes nothing but marks
}

func (b standbyBasis) equal(o standbyBasis) bool {
	return b.edition == o.edition && b.mode == o.mode && slices.EqualFunc(b.base, o.base, copies.SameChain)
}

func (d *Daemon) hasStandby() bool { return d.cfg.Standby.Table != nil && d.cfg.Standby.Off == "" }

// newStandby returns the first copies: one of each family's nat, with nothing known.
func (d *Daemon) newStandby() map[tableid.TableID]*standbyOf {
	all := map[tableid.TableID]*standbyOf{}
	if d.hasStandby() {
		for _, f := range d.cfg.Kernel.Families() {
			id := f.Table(rules.Nat)
			all[id] = &standbyOf{id: id, kind: &natCopy{id: id}}
		}
	}
	return all
}

func (c *natCopy) name() string { return c.id.String() }

func (c *natCopy) log(ctx context.Context, _ *Daemon, st *state) klog.Logger { return st.flushLog(ctx) }

// record returns the open loss's record, which the opening of nat's copy belongs to; nil:
// nothing is lost.
func (c *natCopy) record(st *state) *api.Flush {
	if st.loss == nil {
		return nil
	}
	return &st.loss.record
}

// ought returns the section that ought to be in force.
func (c *natCopy) ought(st *state) rules.Section { return st.want()[c.id] }

// basisOf returns the present basis of the decision: another basis than the last one makes
// followStandby due. It returns false while nat is not known to be in force as its owners want
// it.
func (c *natCopy) basisOf(st *state) (standbyBasis, bool) {
	fs := st.families[c.id.Family]
	nat := fs.tables[rules.Nat]
	b := standbyBasis{edition: st.generation.edition, mode: st.mode}
	for _, name := range rules.BuiltinChains(rules.Nat) {
		if c := nat.standing.table.Chain(name); c != nil {
			b.base = append(b.base, *c)
		}
	}
	if st.mode != api.Heal {
		return b, true
	}
	calm := st.loss == nil && nat.verdict == canary.Intact && !nat.pending && !nat.learningStopped && fs.examined.dirty.IsZero() && !st.standby[c.id].gate.IsOpen()
	return b, calm && !st.generation.captured.IsZero()
}

// followAt implements standbyKind. Zero: there is nothing to do, or nat may not be as its
// owners want it. After ErrMoved, nat must be examined first. A new basis is followed from
// s.next on, and an unfinished copy gets its next piece at pieceAt. A copy that is only
// translated is written after standbyEvery.
func (c *natCopy) followAt(d *Daemon, st *state, s *standbyOf) time.Time {
	basis, known := c.basisOf(st)
	switch {
	case !known, c.moved != 0 && c.moved == st.families[c.id.Family].examined.digest: // examined first
		return time.Time{}
	case !s.making.TryAt.IsZero():
		return s.making.TryAt
	case !basis.equal(c.basis):
		return pace.Latest(d.made, s.next)
	case s.begun:
		return pace.Latest(d.made, s.pieceAt)
	case c.unkept:
		return c.written.Add(standbyEvery)
	}
	return time.Time{}
}

// decide implements standbyKind. again makes Follow translate although the basis is the same.
// The copy is only translated until standbyEvery is over since the last write.
func (c *natCopy) decide(st *state, again bool) copies.Want {
	basis, _ := c.basisOf(st)
	known := !again && basis.equal(c.basis)
	c.basis, c.moved = basis, 0
	return copies.Want{ID: c.id, Nat: copies.Nat{Section: c.ought(st), Digest: st.families[c.id.Family].examined.digest,
		Known: known, Write: pace.Due(c.written.Add(standbyEvery), time.Now())}}
}

// idle returns why nat needs no copy: no rule translates, or with --standby=auto a replay is
// short. It keeps an existing copy (has) until a replay is estimated to take half of
// standbyFrom: its size may go up and down.
func (c *natCopy) idle(d *Daemon, st *state, has bool) string {
	g, least := st.want(), standbyFrom
	if !g.Rewrites(c.id.Family) {
		return whyNoRule
	}
	if has {
		least /= 2
	}
	if count, _ := g.Counts(); d.cfg.Standby.Auto && st.pace.Estimate(count) < least {
		return whyShort
	}
	return ""
}

func (c *natCopy) rest(took time.Duration) time.Duration { return min(standbyShare*took, standbyEvery) }

// took implements standbyKind, after each Follow. ErrMoved: another process wrote since nat
// was examined, so followAt waits for the next examination. False without an error: the copy
// is unfinished, or only translated, as the want said or until it is written. An opening of the
// gate has the translation, too.
func (c *natCopy) took(want copies.Want, copied copies.Copy) bool {
	if errors.Is(copied.Err, copies.ErrMoved) {
		c.basis, c.moved = standbyBasis{}, want.Nat.Digest
	}
	if copied.Err != nil {
		return false
	}
	current := copies.CurrentIn(c.basis.edition)
	if c.latest, c.latestLag = want.Nat.Section, current; copied.Unfinished {
		return false
	}
	if c.unkept = !want.Nat.Write || copied.Writing; c.unkept {
		return false
	}
	c.section, c.lag, c.counted, c.written = want.Nat.Section, current, -1, time.Now()
	return true
}

func (c *natCopy) gone() { *c = natCopy{id: c.id, basis: c.basis, moved: c.moved} }

// behind returns how many chains of the written copy differ from the generation, for the
// status. It counts again only for another edition of the generation.
func (c *natCopy) behind(st *state) (chains int, behind bool) {
	if edition := st.generation.edition; c.counted != edition {
		c.counted, c.outstanding = edition, copies.OtherChains(c.section, c.ought(st))
	}
	return c.outstanding, c.outstanding > 0
}

func (c *natCopy) wantsOpen(st *state) bool {
	return st.loss != nil && st.heals() && st.families[c.id.Family].tables[rules.Nat].verdict.Loss()
}

// openOrder requires the outstanding changes at the opening if the written copy alone is too
// old. It returns false if the latest translation is too old, too: the gate stays shut.
func (c *natCopy) openOrder(st *state, now time.Time) (order copies.Order, since time.Time, ok bool) {
	want, g := c.ought(st), &st.generation
	switch {
	case c.latestLag.TooLong(c.latest, want, g.edition, g.captured, now):
		return copies.Shut, c.latestLag.Since, false
	case c.unkept && c.lag.TooLong(c.section, want, g.edition, g.captured, now):
		return copies.OpenCurrent, c.lag.Since, true
	}
	return copies.Open, time.Time{}, true
}

// toOpen is the ID only: the latest copy is translated already.
func (c *natCopy) toOpen(*state) copies.Want { return copies.Want{ID: c.id} }

// opened notes in the record that the gate was opened, so long after the first evidence. It
// starts a sweep of nat's flows that began without translation.
func (c *natCopy) opened(d *Daemon, st *state, _ copies.Answer, after time.Duration) {
	f := c.id.Family
	st.loss.record.Standby = st.loss.record.Standby.With(f, after)
	d.sweepNat(st.want(), f, st.families[f].known.natIntact)
}

// openMeanwhile opens a gate after a loss that a probe shows while canaryd waits for the
// flusher, which may take nat last. It returns how many commits that took: the wait must not
// take them for the flusher's.
func (d *Daemon) openMeanwhile(ctx context.Context, st *state, f rules.Family, verdicts map[rules.TableName]canary.Verdict) int {
	v, s := verdicts[rules.Nat], st.standby[f.Table(rules.Nat)]
	if !v.Loss() || !st.heals() || !s.has() {
		return 0
	}
	d.take(st, tableFinding{id: s.id, source: lossesOnly, finding: canary.Finding{Verdict: v}})
	return d.openGate(ctx, st, s)
}
