package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A nativeLearned is the content of one table that ought to be in force from now on.
type nativeLearned struct {
	id tableid.TableID
	native.Before
	read time.Time
	own  bool // it proves a write of canaryd: its owner has decided nothing
}

// learned returns the content of one table that a read showed.
func (s nativeSight) learned(id tableid.TableID) nativeLearned {
	return nativeLearned{id: id, Before: native.Before{Table: s.Tables[id], Digest: s.Digest(id), Genid: s.Genid, LeftAt: s.LeftAt(id)}, read: s.At}
}

// suspects reports whether a commit may have taken parts that are not its author's. The Kernel
// calls it for each commit. The state of its tables before it is learned as soon as the commit
// is heard of.
func (d *Daemon) suspects(c native.Commit) bool {
	if c.Own {
		return false
	}
	for id, deed := range c.Deeds {
		if d.cfg.Native.Protects(id) && (deed.MayTake() || d.committer(id, c.Commit) >= native.NotOwner) {
			return true
		}
	}
	return false
}

// learnBefore learns the state of a commit's tables before it, if that is their owners' doing.
// So parts that an owner removed right before a flush are not put back with the rest.
func (d *Daemon) learnBefore(ctx context.Context, st *state, c native.Commit) {
	for id, before := range c.Before {
		t := st.native.tables[id]
		switch {
		case t == nil || t.want == nil || t.out != nil || t.missed || t.old || t.accept || t.dirty.IsZero():
			continue
		case t.lost() && !t.remade(before.Genid):
			t.noteRemoved(before.Table, d.deedsUpTo(id, t, before.Genid))
			continue
		case !nft.Newer(before.Genid, t.genid) || before.Table == t.want:
			continue
		}
		seen := nativeSight{Ruleset: &native.Ruleset{Genid: before.Genid, Tables: map[tableid.TableID]*native.Table{id: before.Table}}}
		if f := d.judgeNative(id, t, seen, nil); f.Remedy == native.NoRemedy && !nativestore.Lost(f.Verdict) {
			now := nativeLearned{id: id, Before: before, read: time.Now()}
			if t.lost() {
				d.nativeBack(ctx, st, id, true)
			}
			if f.Verdict == native.Changed {
				d.acceptNative(st, t, now)
			}
			d.adopt(ctx, st, now)
		} else {
			t.noteRemoved(before.Table, d.deedsUpTo(id, t, before.Genid))
		}
	}
}

// noteRemoved notes the chains that the owner of a lost table has deleted since it was learned, as
// the table shows. A replay must not put them back: a later flush may hide the removal. now may be
// nil, and deeds are those until now.
func (t *nativeTable) noteRemoved(now *native.Table, deeds []nativeDeed) {
	if now == nil {
		return
	}
	removed, stands := map[string]bool{}, map[string]bool{}
	for i := range now.Chains {
		stands[now.Chains[i].Name] = true
	}
	note := func(chain string) {
		if !stands[chain] {
			removed[chain] = true
		}
	}
	for chain := range t.removed {
		note(chain)
	}
	for _, deed := range deeds {
		if deed.By == native.Owner && !deed.Deleted {
			for chain := range deed.Chains {
				note(chain)
			}
		}
	}
	t.removed = removed
}

// remade reports whether the table was made or written last, and not deleted, until genid. Then a
// loss may be over, although no read has shown that yet: the judge decides by the maker.
func (t *nativeTable) remade(genid uint32) bool {
	remade := t.wroteAt != 0 // by canaryd
	for _, deed := range t.deeds {
		later := t.wroteAt == 0 || nft.Newer(deed.Genid, t.wroteAt)
		if later && !nft.Newer(deed.Genid, genid) && (deed.Deleted || deed.Made != 0) {
			remade = deed.Made != 0
		}
	}
	return remade
}

// adopt makes the content of a table that was read the expected content, after an owner's
// change, a proof, or a first read. Parts in quarantine stay there, unless its owner has
// decided about them.
func (d *Daemon) adopt(ctx context.Context, st *state, now nativeLearned) {
	r, t := &st.native, st.native.tables[now.id]
	moved := t.want == nil || t.digest != now.Digest
	if t.want == nil && !t.drill {
		chains, rules, elements := now.Table.Counts()
		r.comings.log(ctx).Info("A native table is guarded", "table", now.id.NFT(), "chains", chains, "rules", rules, "elements", elements)
	}
	if t.out != nil {
		d.doubtHeld(ctx, st, t)
		t.returned(r.comings.log(ctx), now.Table)
	}
	if moved && !now.own {
		d.holdOn(ctx, st, t, now)
	}
	d.followNativePolicies(st, t, now)
	later := slices.DeleteFunc(slices.Clone(t.deeds), func(deed nativeDeed) bool { return !nft.Newer(deed.Genid, now.Genid) })
	if t.want != now.Table {
		r.edition++
	}
	t.want, t.genid, t.digest, t.deeds = now.Table, now.Genid, now.Digest, later
	t.read, t.leftAt = now.read, now.LeftAt
	t.finding, t.old = native.Finding{Verdict: native.Intact, Why: "its content is the same"}, false
	t.accept, t.reportAt, t.inForce = false, time.Time{}, ""
	t.wroteAt, t.unheard, t.removed = 0, false, nil
	t.witness = r.witness[now.id.Family].Nonce
	t.rest(r.all, now.Genid)
	if moved && !t.drill {
		if t.made, t.captured = reload.MadeByOwners, now.read; !r.begun {
			t.made = reload.MadeAtStart
		}
		r.disk.moved(time.Now())
		st.standby[now.id].learned(now.read)
		if d.cfg.Native.Rehearse != nil {
			t.rehearsal.plan(time.Now())
		}
	}
	if r.refreshAt.IsZero() && t.want.Fleeting() {
		r.refreshAt = time.Now().Add(refreshEvery)
	}
}

// refreshNative reads a share of the elements that packets add and time takes, because no
// commit reports these. They are no content: only the values that a replay puts back change.
func (d *Daemon) refreshNative(ctx context.Context, st *state) {
	r, start := &st.native, time.Now()
	r.refreshAt = time.Time{}
	if !anyOf(r.tables, func(t *nativeTable) bool { return t.want.Fleeting() }) {
		return
	}
	defer func() {
		end := time.Now()
		r.refreshAt = pace.Latest(end.Add(refreshEvery), end.Add(refreshShare*end.Sub(start)))
	}()
	if r.all {
		return // they are read whole
	}
	if _, err := d.cfg.Native.Kernel.Refresh(refreshMost); err != nil {
		if !errors.Is(err, nft.ErrInterrupted) {
			d.nativeUnknown(ctx, st, err)
		}
		return
	}
	resting := func(t *nativeTable) bool { return t != nil && t.dirty.IsZero() && !t.lost() && t.want.Fleeting() }
	now, err := d.cfg.Native.Kernel.Follow(func(t nft.Table) bool {
		return t.Owner == 0 && resting(r.tables[t.Family.Table(t.Name)])
	})
	if err == nil {
		err = d.hearNative(ctx, st, now.Genid)
	}
	if err != nil {
		return // a read or a look says why
	}
	d.takeNativeLeftOut(ctx, st, now, nil, 0)
	for id, table := range now.Tables {
		// A table with a new commit is judged by its own read.
		if t := r.tables[id]; resting(t) && now.Digest(id) == t.digest && table.Handle == t.want.Handle {
			t.want, t.leftAt = table, now.LeftAt(id)
		}
	}
	r.planReads(time.Now())
}
