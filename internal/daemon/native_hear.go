package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file takes the deeds of commits to nf_tables, as the kernel notifies of them, to the tables.

// hearNow takes in the deeds of all commits until now, and returns the genid. A read or write
// at that genid then meets known commits only.
func (d *Daemon) hearNow(ctx context.Context, st *state) (genid uint32, err error) {
	if genid, err = d.cfg.Native.Kernel.Genid(); err == nil {
		err = d.hearNative(ctx, st, genid)
	}
	return genid, err
}

// hearNative takes in the deeds of commits up to a genid: changed tables become due for a read.
// If commits were missed, all tables do.
func (d *Daemon) hearNative(ctx context.Context, st *state, genid uint32) error {
	r, now := &st.native, time.Now()
	since := notBefore(pace.Earliest(r.hinted, now), r.heard)
	commits, missed, err := d.cfg.Native.Kernel.Hear(genid)
	if err == nil {
		if !r.heard.IsZero() && now.Sub(r.heard) > d.stalledAfter() {
			defer func(begin time.Time) { r.stalls.add(stall{begin, time.Now()}) }(r.heard) // processes are noted meanwhile
		}
		r.heard = now
	}
	if missed {
		r.all, r.wrote = true, now
		for _, t := range r.tables {
			t.deeds, t.missed, t.unheard = nil, true, true
			t.touch(since, now, true)
		}
		klog.FromContext(ctx).V(1).Info("Commits to nf_tables were missed; each native table is read")
	}
	for _, c := range commits {
		d.learnBefore(ctx, st, c)
		for family := range c.WitnessLost {
			r.loseWitness(family, now)
		}
		if c.Own {
			continue // each is followed by a read of its own, or has one planned
		}
		r.wrote = now
		for id, deed := range c.Deeds {
			deed.With = r.strangerOf(id, c)
			d.followReplay(r.tables[id], id, deed, c.Commit)
			d.takeDeed(ctx, st, id, nativeDeed{deed, c.Commit, d.heardAt(c.Commit, since)})
		}
	}
	return err
}

// heardAt returns when a commit was noted: a loss may begin then. If it was not noted, heardAt
// returns the first hint that may belong to it (hinted).
func (d *Daemon) heardAt(c nft.Commit, hinted time.Time) time.Time {
	if noted := d.cfg.Writers.Of(c).Time; !noted.IsZero() {
		return noted
	}
	return hinted
}

// strangerOf returns a table of another owner that the same commit deleted; empty if there is
// none. The judge reads it from Deed.With: a flush deletes tables of several owners at once, and
// an owner deletes its own. If the family's witness is in place, the commit was no flush; it
// then counts only for a table whose owner is known.
func (r *nativeRealm) strangerOf(id tableid.TableID, c native.Commit) string {
	if !c.Deeds[id].Deleted || r.witness[id.Family].Nonce != "" && !protect.OwnerKnown(id) {
		return ""
	}
	with := ""
	for other, deed := range c.Deeds {
		if name := other.NFT(); deed.Deleted && protect.OwnersDiffer(id, other) && (with == "" || name < with) {
			with = name
		}
	}
	return with
}

// takeDeed notes the deed of a commit on one table, and makes a read of the table due. A deed
// on a table that is not guarded may be of a new one.
func (d *Daemon) takeDeed(ctx context.Context, st *state, id tableid.TableID, deed nativeDeed) {
	r, t := &st.native, st.native.tables[id]
	switch {
	case t != nil && !nft.Newer(deed.Genid, t.genid):
		return // it was read since
	case t == nil:
		delete(r.immune, id)
		r.fresh = r.fresh || deed.Made != 0 && d.cfg.Native.Protects(id)
		return
	}
	probes := t.out != nil && (t.lost() || deed.MayTake() && d.committer(id, deed.commit) != native.Owner)
	if probes && t.out.probe.IsZero() && !t.gone() { // earlier deeds were judged, or were no flush
		d.doubtHeld(ctx, st, t)
		t.deeds = nil
	}
	if len(t.deeds) >= deedsKept {
		t.deeds, t.missed, t.unheard = nil, true, true
	}
	if !deed.Deleted || deed.Made != 0 {
		t.wrote = d.heardAt(deed.commit, time.Now())
	}
	if t.out != nil {
		t.out.take(deed)
	}
	if probes {
		t.out.probe = pace.Earliest(t.out.probe, pace.Latest(time.Now().Add(captureQuiet), t.out.probed.Add(probeEvery)))
	}
	t.deeds = append(t.deeds, deed)
	t.touch(deed.since, time.Now(), deed.MayTake())
}

// touch notes that the table may differ, since then, from the content that ought to be in
// force: planReads plans a read. urgent: it may be a flush, and the read does not wait for a
// quiet owner.
func (t *nativeTable) touch(since, now time.Time, urgent bool) {
	t.dirty, t.moved = pace.Earliest(t.dirty, since), now
	t.urgent = t.urgent || urgent
}

// gone reports whether the last commit since the last read deleted the table. It is then judged
// without a read, and may ride.
func (t *nativeTable) gone() bool {
	n := len(t.deeds)
	return n > 0 && t.deeds[n-1].Deleted && t.deeds[n-1].Made == 0
}

// deedsUpTo returns the deeds of commits up to that genid on a table, with all that is known of
// their processes. The judge of the table decides by them.
func (d *Daemon) deedsUpTo(id tableid.TableID, t *nativeTable, genid uint32) (known []nativeDeed) {
	for _, deed := range t.deeds {
		if !nft.Newer(deed.Genid, genid) {
			by := *deed.Deed
			by.By, by.ByName = d.committer(id, deed.commit), deletesByName(d.cfg.Writers.Of(deed.commit).Command)
			if by.By == native.UnknownCommitter && by.Deleted && t.ownerBegan(id, d.cfg.Writers.Of(deed.commit)) {
				by.By = native.LikelyOwner
			}
			known = append(known, nativeDeed{&by, deed.commit, deed.since})
		}
	}
	return known
}
