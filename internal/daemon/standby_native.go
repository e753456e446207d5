package daemon

import (
	"cmp"
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/copies"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// nativeStandbyFrom is from how many sets on --standby=auto copies a native table. The
	// kernel takes a replay of kube-proxy's 1,198 sets at 1,000 services in 0.35 to 0.9 s. It
	// takes the 127 sets at 100 services in 7 ms (Linux 6.18). The time grows with the square.
	nativeStandbyFrom = 400
	// nativeFollowMost bounds the time between two changes of a copy. The transaction that
	// opens the copy also writes its outstanding changes.
	nativeFollowMost = 30 * time.Second
)

// A nativeCopy is the loop's knowledge of the copy of a native table only.
type nativeCopy struct {
	id tableid.TableID
	of native.Digest // of the copied content
	// behindSince is when the first change was learned that the kernel's copy lacks; zero: it lacks
	// none.
	behindSince time.Time
}

func (d *Daemon) hasNativeStandby() bool { return d.cfg.Standby.Table != nil && d.guardsNative() }

// learned notes that another content of a native table was learned then. The copy, if there is
// one, is behind from the first such time on.
func (s *standbyOf) learned(then time.Time) {
	if s.has() {
		c := s.kind.(*nativeCopy)
		c.behindSince = cmp.Or(c.behindSince, then)
	}
}

func (c *nativeCopy) name() string { return c.id.NFT() }

func (c *nativeCopy) log(ctx context.Context, d *Daemon, st *state) klog.Logger {
	return st.nativeLog(ctx)
}

// record returns the record of the open loss of native tables; nil: none is lost.
func (c *nativeCopy) record(st *state) *api.Flush {
	if st.native.loss == nil {
		return nil
	}
	return &st.native.loss.record
}

// known reports whether the owner's present will about the table is known. Otherwise followAt
// leaves the copy as it is.
func (c *nativeCopy) known(st *state) bool {
	r, t := &st.native, st.native.tables[c.id]
	switch {
	case st.mode != api.Heal:
		return true
	case t == nil:
		return r.loss == nil
	}
	return r.loss == nil && !r.all && t.want != nil && !t.lost() && !t.missed && !t.old && t.dirty.IsZero()
}

// followAt implements standbyKind. Zero: there is nothing to do, the gate is open, or the
// table may not be as its owner wants it. d.made means at once: to release a copy that is not
// needed. A changed table is followed from s.next on, and an unfinished copy gets its next
// piece at pieceAt.
func (c *nativeCopy) followAt(d *Daemon, st *state, s *standbyOf) time.Time {
	if !c.known(st) || s.gate.IsOpen() {
		return time.Time{}
	}
	t, idle := st.native.tables[c.id], d.idle(st, s)
	switch {
	case !s.making.TryAt.IsZero():
		return s.making.TryAt
	case idle != "" && s.reason == idle && t != nil:
		return time.Time{}
	case idle != "":
		return d.made
	case s.begun:
		return pace.Latest(d.made, s.pieceAt)
	case s.has() && c.of == t.digest:
		return time.Time{}
	}
	return pace.Latest(d.made, s.next)
}

func (c *nativeCopy) decide(st *state, _ bool) copies.Want { return c.toOpen(st) }

// toOpen returns the table's content that ought to be in force. Without a guarded table of that
// name, the want is empty.
func (c *nativeCopy) toOpen(st *state) copies.Want {
	want := copies.Want{ID: c.id}
	if t := st.native.tables[c.id]; t != nil {
		want.Native = copies.Native{Table: t.want, Digest: t.digest}
	}
	return want
}

// idle returns why the table needs no copy. With --standby=auto it keeps an existing copy (has)
// until the table has half of nativeStandbyFrom sets: its size may go up and down.
func (c *nativeCopy) idle(d *Daemon, st *state, has bool) string {
	least := nativeStandbyFrom
	if has {
		least /= 2
	}
	switch t := st.native.tables[c.id]; {
	case t == nil:
		return whyUnguarded
	case !standby.Translates(t.want):
		return whyNoChain
	case d.cfg.Standby.Auto && len(t.want.Sets) < least:
		return whyShort
	}
	return ""
}

// rest limits the following of changes to 2 % of the time.
func (c *nativeCopy) rest(took time.Duration) time.Duration {
	return min(max(standbyEvery, (standbyShare-1)*took), nativeFollowMost)
}

// took implements standbyKind. A finished copy has all changes of the want.
func (c *nativeCopy) took(want copies.Want, copied copies.Copy) bool {
	if copied.Err != nil || copied.Unfinished || copied.Writing {
		return false
	}
	c.of, c.behindSince = want.Native.Digest, time.Time{}
	return true
}

func (c *nativeCopy) gone() { *c = nativeCopy{id: c.id} }

func (c *nativeCopy) behind(st *state) (chains int, behind bool) {
	t := st.native.tables[c.id]
	return 0, t != nil && (t.digest != c.of || !t.dirty.IsZero())
}

// wantsOpen is false for a loss that the table's owner may have made.
func (c *nativeCopy) wantsOpen(st *state) bool {
	t := st.native.tables[c.id]
	return st.native.loss != nil && st.heals() && t != nil && t.want != nil && !t.old && t.lost() && t.finding.Remedy != native.NoRemedy
}

// openOrder requires the outstanding changes at the opening if the copy is behind for
// copies.Most.
func (c *nativeCopy) openOrder(_ *state, now time.Time) (order copies.Order, since time.Time, ok bool) {
	if !c.behindSince.IsZero() && now.Sub(c.behindSince) >= copies.Most {
		return copies.OpenCurrent, c.behindSince, true
	}
	return copies.Open, c.behindSince, true
}

// opened notes in the record that the gate was opened, so long after the first evidence, and
// starts a sweep. Unless the copy is outdated, the opening wrote its outstanding changes.
func (c *nativeCopy) opened(d *Daemon, st *state, got copies.Answer, after time.Duration) {
	if got.Outdated == nil {
		c.behindSince = time.Time{}
	}
	l := st.native.loss
	l.record.Standby = l.record.Standby.WithTable(c.id.NFT(), after)
	d.sweepNative([]*native.Table{st.native.tables[c.id].want}, l.intact)
}

// firstNativeLookAt returns when native tables are looked at before iptables' tables are put
// back. So a copy that may have to be opened does not wait for these.
func (d *Daemon) firstNativeLookAt(st *state) time.Time {
	if st.loss == nil || !st.mayOpenAny(true) {
		return time.Time{}
	}
	return st.native.lookAt
}

// openNativeMeanwhile opens gates of native tables that a flusher takes while canaryd waits for
// it, because the flusher may take them last. asked is the genid of the last check. It returns
// how many commits of canaryd's own that took.
func (d *Daemon) openNativeMeanwhile(ctx context.Context, st *state, asked *uint32) (commits int) {
	if !st.mayOpenAny(true) {
		return 0
	}
	genid, err := d.cfg.Native.Kernel.Genid()
	if err != nil || genid == *asked {
		return 0 // a later read meets the same error
	}
	*asked = genid
	d.lookNativeFirst(ctx, st)
	return d.openStandby(ctx, st)
}

// lookNativeFirst looks at native tables, and judges the tables that a commit has deleted:
// these need no read.
func (d *Daemon) lookNativeFirst(ctx context.Context, st *state) {
	d.lookNative(ctx, st)
	r := &st.native
	for _, id := range r.ids() {
		t := r.tables[id]
		if t.want == nil || t.lost() || t.missed || r.all || t.old || t.accept || !t.gone() {
			continue
		}
		gone := nativeSight{Ruleset: &native.Ruleset{Genid: t.deeds[len(t.deeds)-1].Genid}}
		if f := d.judgeNative(id, t, gone, nil); f.Remedy != native.NoRemedy {
			t.finding = f
			d.loseNative(st, id)
		}
	}
}
