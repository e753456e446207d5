package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// lookNative reads the genid and hears the commits up to it. It reads no table: a table without
// a commit is as it was.
func (d *Daemon) lookNative(ctx context.Context, st *state) {
	r := &st.native
	r.lookAt = time.Time{}
	if r.asleep && !d.wakeNative(ctx, st) {
		return
	}
	now := time.Now() // later commits are not known, even if canaryd is stopped right here
	if _, err := d.hearNow(ctx, st); err != nil {
		d.nativeUnknown(ctx, st, err)
		return
	}
	if r.trouble.Over() {
		severity.Notices(klog.FromContext(ctx)).Info(tablesRead, "tables", "native")
	}
	r.hinted = time.Time{}
	d.seekSwitch(st)
	r.planReads(now)
	if r.knowsAll() {
		r.known = now
	}
}

// planReads plans when readNative reads changed tables: at once after a possible flush, and
// otherwise after their owner was quiet. A deleted table may have to wait for its report
// (reportAt), and the pace may delay reads.
func (r *nativeRealm) planReads(now time.Time) {
	r.readAt = time.Time{}
	plan := func(at time.Time) { r.readAt = pace.Earliest(r.readAt, pace.Latest(at, r.pace.again)) }
	if r.all || r.fresh {
		plan(pace.Latest(now, r.pace.ready))
	}
	for _, t := range r.tables {
		if t.out != nil && !t.out.probe.IsZero() {
			plan(pace.Latest(t.out.probe, r.pace.ready))
		}
		switch {
		case !t.due():
		case t.gone():
			plan(pace.Latest(now, t.reportAt))
		case t.out != nil:
			plan(pace.Latest(pace.Latest(now, t.countAt()), r.pace.ready))
		case t.urgent:
			plan(pace.Latest(now, r.pace.alarmAt()))
		default:
			plan(pace.Latest(pace.Earliest(t.moved.Add(captureQuiet), t.dirty.Add(captureMost)), r.pace.ready))
		}
	}
	if r.readAt.IsZero() { // the table that could not be read is gone
		r.unread.Over()
	}
}

// readNative reads the changed tables and judges them. It learns the owners' changes, and opens
// a loss after a flush.
func (d *Daemon) readNative(ctx context.Context, st *state) {
	r := &st.native
	r.readAt = time.Time{}
	now := time.Now()
	wanted := func(id tableid.TableID) bool {
		t := r.tables[id]
		if t == nil {
			return r.all || r.fresh
		}
		return r.all || r.pace.allows(t, now)
	}
	alarm := r.alarmed(wanted)
	seen, err := d.sightNative(ctx, st, d.cfg.Native.Kernel.Follow, wanted)
	if err != nil {
		if errors.Is(err, nft.ErrInterrupted) {
			r.pace.interrupted(time.Now())
		} else {
			if r.unread.Met(err, time.Now()) {
				klog.FromContext(ctx).Error(err, tablesUnread, "tables", "native")
			}
			r.pace.again = time.Now().Add(d.cfg.PollInterval)
			r.lookAgain(ctx, d.cfg.PollInterval)
		}
		r.planReads(time.Now())
		return
	}
	for _, id := range r.ids() {
		f, judged := seen.findings[id]
		switch t := r.tables[id]; {
		case !judged:
		case t.accept:
			d.adoptNative(ctx, st, id, seen, native.Finding{Verdict: native.Changed, Why: "an operator accepted it"})
		case f.Remedy != native.NoRemedy && !t.old:
			waits := r.loss != nil && t.lost() && t.finding.Remedy != native.NoRemedy
			if t.finding = f; waits { // for the next try
				t.rest(r.all, seen.Genid)
			} else if d.loseNative(st, id); st.heals() || !r.loss.hit[id] { // it may have been back
				r.loss.retry.At = now
			}
		case nativestore.Lost(f.Verdict):
			if t.finding = f; d.awaitsSibling(r, id, t) {
				continue
			}
			t.rest(r.all, seen.Genid)
			d.reportNative(ctx, st, id, seen.Tables[id])
		default:
			d.adoptNative(ctx, st, id, seen, f)
		}
	}
	for _, id := range r.ids() {
		if t := r.tables[id]; t.out != nil && !t.out.probe.IsZero() && !t.out.probe.After(now) {
			d.probeNative(ctx, st, id)
		}
	}
	d.endBack(ctx, st, nil)
	r.finishRead(time.Now(), seen, alarm)
	if r.begun {
		d.judgeUnreadNative(ctx, st)
	}
	d.witnessesDue(st)
}

// readNativeToo reads native tables before a loss of iptables' tables ends, so that one record has
// both. The same flush may have taken parts of them, or a flush while no canaryd ran.
func (d *Daemon) readNativeToo(ctx context.Context, st *state) {
	r := &st.native
	if !d.guardsNative() || r.loss != nil || st.mode != api.Heal || st.drilling(time.Now()) {
		return
	}
	if d.lookNative(ctx, st); r.asleep {
		return
	}
	flushed := func(t *nativeTable) bool { return t.urgent && st.loss.takes(t.dirty) }
	if (!r.begun || anyOf(r.tables, flushed)) && pace.Due(r.readAt, time.Now()) {
		d.readNative(ctx, st)
	}
}

// finishRead plans the steps after a read of native tables. It charges the pace with the read's
// pause, unless the read was the first or found a loss. alarm: a possible flush caused the read.
func (r *nativeRealm) finishRead(end time.Time, seen nativeSight, alarm bool) {
	first := !r.begun
	r.begun = r.begun || seen.all
	if !first && (r.loss == nil || r.loss.retry.At.After(end)) { // neither a start nor a loss is a busy owner's fault
		r.pace.spend(end, seen.pause, alarm)
	}
	r.planReads(end)
	if r.knowsAll() {
		r.known = end
	}
}

// rest notes that the table was judged as it was at genid. It is read again only after another
// commit, which may be known already. missed: some commits were missed again, so that it stays due.
func (t *nativeTable) rest(missed bool, genid uint32) {
	if t.missed = missed; missed {
		return
	}
	t.dirty, t.urgent = time.Time{}, false
	for _, deed := range t.deeds {
		if nft.Newer(deed.Genid, genid) {
			t.touch(deed.since, time.Now(), true)
		}
	}
}

// A nativeSight is the result of one read.
type nativeSight struct {
	*native.Ruleset
	findings map[tableid.TableID]native.Finding // of the tables that were known before
	used     map[string]bool                    // of a probe
	all      bool                               // every table was read
	took     time.Duration
	pause    time.Duration // no read follows sooner: see readPause
}

// digestOf returns the digest of a table's content; of no table it is zero.
func (s nativeSight) digestOf(id tableid.TableID) (digest native.Digest) {
	if s.Tables[id] != nil {
		digest = s.Digest(id)
	}
	return digest
}

// A nativeChoice chooses the tables of one read.
type nativeChoice struct {
	d      *Daemon
	r      *nativeRealm
	wanted func(tableid.TableID) bool
	// The results of the choice: new tables, tables beyond the limit, and immune tables. A read
	// may be begun several times.
	fresh, overLimit, immune map[tableid.TableID]bool
	// exist are the tables that exist, and counted those that are left out and counted again.
	exist, counted map[tableid.TableID]bool
	passed         bool // there is a new table that is not wanted yet
}

// takes reports whether this read includes a table of the kernel's list. sightNative passes
// it to the read. It notes new tables, tables that one process owns (no other can flush
// them), and tables for which there is no room.
func (c *nativeChoice) takes(t nft.Table) bool {
	id := t.Family.Table(t.Name)
	if !c.d.guards(c.r, id) {
		return false
	}
	known := c.r.tables[id]
	switch c.exist[id] = true; {
	case !c.wanted(id):
		c.passed = c.passed || known == nil && !c.r.immune[id]
		return false
	case t.Owner != 0:
		c.immune[id] = true
		return false
	case known != nil && known.out != nil:
		c.counted[id] = !time.Now().Before(known.countAt())
		return c.counted[id]
	case known != nil:
		return true
	case !c.r.drill.has(id) && !c.fresh[id] && !c.r.room(id, c.d.cfg.Native.Named, c.fresh):
		c.overLimit[id] = true
		return false
	}
	c.fresh[id] = true
	return true
}

// room reports whether one more table can be guarded: a table that a read or the last run's
// state shows. fresh are tables that are about to be guarded. A place is kept for each table
// that is named.
func (r *nativeRealm) room(id tableid.TableID, named []tableid.TableID, fresh map[tableid.TableID]bool) bool {
	taken := len(r.tables) + len(fresh) - len(r.drill.tables)
	if !slices.Contains(named, id) {
		for _, n := range named {
			if r.tables[n] == nil && !fresh[n] {
				taken++
			}
		}
	}
	return taken < protect.MaxNative
}

// sightNative reads the wanted tables at one genid, by one of the Kernel's methods, and judges
// them. It takes up new tables.
func (d *Daemon) sightNative(ctx context.Context, st *state, read func(func(nft.Table) bool) (*native.Ruleset, error),
	wanted func(tableid.TableID) bool) (nativeSight, error) {
	r, start, used := &st.native, time.Now(), d.cpu()
	seen, every := nativeSight{findings: map[tableid.TableID]native.Finding{}}, true
	judged := map[tableid.TableID]bool{} // as wanted now: later commits change that
	for id, t := range r.tables {
		judged[id] = wanted(id)
		every = every && (judged[id] || t.out != nil)
	}
	none := func() map[tableid.TableID]bool { return map[tableid.TableID]bool{} }
	choice, fresh := nativeChoice{d, r, wanted, none(), none(), none(), none(), none(), false}, r.fresh
	var err error
	seen.Ruleset, err = read(choice.takes)
	seen.took = time.Since(start)
	seen.pause = d.readPause(seen.took, used)
	if err == nil {
		seen.all = r.all && every && !choice.passed
		r.all, r.fresh = r.all && !seen.all, choice.passed // unless a later commit sets them
		for id, now := range seen.Tables {                 // before it hears of later commits to them
			if r.tables[id] == nil && !now.Immune() {
				r.tables[id] = &nativeTable{wrote: time.Now(), drill: r.drill.has(id)}
				d.adopt(ctx, st, seen.learned(id))
			}
		}
		err = d.hearNative(ctx, st, seen.Genid)
	}
	var stand map[tableid.Family]string
	if err == nil {
		stand, err = d.witnessesLost(ctx, r)
	}
	if err != nil {
		r.all, r.fresh = r.all || seen.all, r.fresh || fresh
		return nativeSight{}, err
	}
	if r.unread.Over() {
		severity.Notices(klog.FromContext(ctx)).Info(tablesRead, "tables", "native")
	}
	st.memory.ScheduleFree(time.Now())
	d.noteDrift(ctx, seen.Ruleset)
	if seen.all {
		r.immune = map[tableid.TableID]bool{}
		d.noteOverLimit(ctx, r, len(choice.overLimit))
	}
	for id := range choice.immune {
		if r.immune[id] = true; r.tables[id] != nil { // its owner has made it so
			d.nativeBack(ctx, st, id, true)
			delete(r.tables, id)
			d.setQuarantine(ctx, st, id, nil, nil, quarantine.Owner)
			r.edition++
		}
	}
	d.takeNativeLeftOut(ctx, st, seen.Ruleset, choice.counted, seen.took)
	for id, t := range r.tables {
		if t.out != nil && choice.exist[id] && seen.Tables[id] == nil {
			t.missed = false // it is not judged
		} else if judged[id] && !nft.Newer(t.genid, seen.Genid) { // else a later state of it is learned
			if t.out != nil {
				t.out.probe = time.Time{}
			}
			f := d.judgeNative(id, t, seen, stand)
			if nativestore.Lost(f.Verdict) && (!t.lost() || t.foundAs != seen.digestOf(id)) {
				t.foundAs, t.foundAt = seen.digestOf(id), seen.Genid
			}
			seen.findings[id] = d.inTurn(r, id, t, f)
		}
	}
	for id, now := range seen.Tables {
		if now.Immune() {
			r.immune[id] = true
		}
	}
	return seen, nil
}

// noteDrift logs the tables whose copy went wrong while canaryd followed, and that a read has
// corrected.
func (d *Daemon) noteDrift(ctx context.Context, r *native.Ruleset) {
	for _, id := range r.Drifted {
		severity.Warnings(klog.FromContext(ctx)).Error(errDrifted, "canaryd's copy of a native table differed from the kernel's; canaryd read the table again", "table", id.NFT())
	}
}

var errDrifted = errors.New("the kernel's notifications do not add up to its dump")

// noteOverLimit notes for the status how many tables are more than canaryd guards, and logs it
// once.
func (d *Daemon) noteOverLimit(ctx context.Context, r *nativeRealm, overLimit int) {
	if r.overLimit = overLimit; overLimit == 0 {
		r.limits.Over()
		return
	}
	err := fmt.Errorf("%d native tables are beyond the limit of %d; canaryd prefers tables that --protect names one by one", overLimit, protect.MaxNative)
	if r.limits.Met(err, time.Now()) {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "Not all native tables are guarded")
	}
}

// witnessesLost returns the nonces of the present witnesses, "" for none. It reads them only
// where commits were missed: otherwise the commits show a lost witness. A nonce other than the
// table's is a sign of a flush (judgeNative).
func (d *Daemon) witnessesLost(ctx context.Context, r *nativeRealm) (map[tableid.Family]string, error) {
	stand := map[tableid.Family]string{}
	for id, t := range r.tables {
		if _, asked := stand[id.Family]; asked || !t.missed {
			continue
		}
		nonce, err := d.askWitness(ctx, r, id.Family)
		if err != nil {
			return nil, err
		}
		stand[id.Family] = nonce
	}
	return stand, nil
}

// judgeNative returns the verdict on a table as seen shows it. stand has the present witnesses'
// nonces where commits were missed. A table that was deleted alone keeps its verdict until it
// is in the kernel again. But while its report is put off, its process may become known.
func (d *Daemon) judgeNative(id tableid.TableID, t *nativeTable, seen nativeSight, stand map[tableid.Family]string) (f native.Finding) {
	if t.inForce != "" && seen.Tables[id] != nil && nativestore.IDOf(seen.Digest(id)) == t.inForce {
		return native.Finding{Verdict: native.Intact, Why: "it has the content that was last in force"}
	}
	// After missed commits a table that is as it was found lost was not written since.
	if t.lost() && t.finding.Remedy != native.NoRemedy && (t.dirty.IsZero() || t.missed) && t.foundAs == seen.digestOf(id) {
		return t.finding // the evidence of a flush, such as a lost witness, may be gone by now
	}
	e := native.Evidence{Was: t.want, Now: seen.Tables[id], Unread: t.out != nil, Used: seen.used, Missed: t.missed || t.unheard || t.old || t.finding.Open(), Habits: owners.HabitsOf(id)}
	if e.Now == nil && e.Unread && t.finding.Verdict == native.TableDeleted {
		return t.finding
	}
	if e.Now == nil && t.finding.Verdict == native.Unattributed {
		if t.switched {
			return native.Finding{Verdict: native.Changed, Why: "kube-proxy is at work in iptables mode and has deleted it"}
		}
		if t.reportAt.IsZero() || t.missed {
			return t.finding
		}
	}
	e.WitnessLost = t.missed && t.witness != "" && stand[id.Family] != t.witness
	e.Replayed = t.wroteAt != 0
	for _, deed := range d.deedsUpTo(id, t, seen.Genid) {
		if !e.Replayed || nft.Newer(deed.Genid, t.wroteAt) {
			e.Deeds = append(e.Deeds, deed.Deed)
		}
	}
	if t.drill && t.missed {
		e.Deeds = append(e.Deeds, t.drillDeed(e.Now))
	}
	if f = native.Judge(e); t.out != nil && t.finding.Lasts(e.Now) {
		f = t.finding.And(f)
	}
	return f
}

// adoptNative accepts an owner's change, an intact table, or an operator's decision (f). It
// adopts the content of the table, or forgets a table that its owner removed.
func (d *Daemon) adoptNative(ctx context.Context, st *state, id tableid.TableID, seen nativeSight, f native.Finding) {
	d.nativeBack(ctx, st, id, seen.Tables[id] != nil)
	if seen.Tables[id] != nil {
		// Elements that packets add and time takes are no content, so their flush is no change.
		if t := st.native.tables[id]; f.Verdict == native.Changed || t.want.Fleeting() {
			d.acceptNative(st, t, seen.learned(id))
		}
		if t := st.native.tables[id]; t.missed {
			t.owesFullSync(time.Now())
		}
		d.adopt(ctx, st, seen.learned(id))
		st.native.tables[id].finding = f
		return
	}
	d.ownerRemoved(&st.native, id, st.native.tables[id])
	delete(st.native.tables, id)
	d.setQuarantine(ctx, st, id, nil, nil, quarantine.Owner)
	st.native.edition++
	st.native.disk.moved(time.Now())
	severity.Notices(st.native.comings.log(ctx)).Info("A native table is no longer guarded", "table", id.NFT(), "because", f.Why)
}
