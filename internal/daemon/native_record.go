package daemon

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeLoss is the open loss of native tables.
type nativeLoss struct {
	answer
	hit      map[tableid.TableID]bool // tables recorded so far
	intact   time.Time                // when all tables were last known to be in force; zero: that is not known
	written  time.Time                // the last write's end
	replayed bool                     // something was put back and proved
	lacking  bool                     // devices were left out
	partial  bool                     // parts of tables were left out
	unproved bool                     // the kernel took a write whose effect no read showed
	drill    bool                     // tables of a drill are among its tables
	tooLarge []string                 // says of tables that they were written, and are left out
	again    []string                 // says of tables that they were lost once more
	// unswept are tables that were written and that no read has proved. Flows that began in the
	// gap are ended when the loss ends.
	unswept map[tableid.TableID]bool
}

// loseNative opens a loss for a lost table, which healNative answers. It may join an open record,
// or continue one that the last run left open. If a loss is open that lacks the table, its next try
// is due at once. known: the open record has the table already.
func (d *Daemon) loseNative(st *state, id tableid.TableID) (known bool) {
	r, now := &st.native, time.Now()
	defer func() { r.loss.drill = r.loss.drill || r.tables[id].drill }()
	if r.loss != nil {
		if known = r.loss.hit[id]; !known {
			r.loss.retry.At = now
		}
		return known
	}
	if r.loss = d.unansweredNative(st, id); r.loss == nil {
		r.loss = &nativeLoss{answer: st.answerTo(d.newNativeRecord(st, r.tables[id]), now), hit: map[tableid.TableID]bool{}, intact: r.known}
	}
	return false
}

// newNativeRecord begins the record of a table's loss, for an open loss or a table that waits
// for a decision. The loss began with the commit that took the table or, if that was missed, at
// the latest when it was seen.
func (d *Daemon) newNativeRecord(st *state, t *nativeTable) api.Flush {
	now := time.Now()
	at := cmp.Or(d.takenSince(t), t.dirty, now)
	record := api.Flush{ID: st.newFlushID(at), Outcome: api.Pending}
	st.beganAt(&record, at, now)
	return record
}

// beganAt notes in a record of native tables when its loss began, and when that was noticed.
func (st *state) beganAt(record *api.Flush, at, noticed time.Time) {
	record.Time, record.NoticedSeconds = at, noticed.Sub(at).Seconds()
	record.LastInForce, record.Stalled = time.Time{}, false
	if !st.native.begun {
		record.LastInForce = st.native.disk.lastRun
	} else if stalled, found := st.native.stalls.at(at); found {
		record.LastInForce, record.Stalled = stalled.begin, true
	}
}

// takenSince returns the first evidence of the commit that deleted the table, or else of the
// first commit that took a part. It is zero if that was missed. A record begins at that time,
// so commits of the owner before it do not count.
func (d *Daemon) takenSince(t *nativeTable) (since time.Time) {
	for _, deed := range t.deeds {
		switch {
		case deed.Deleted:
			since = deed.since
		case since.IsZero() && (t.onlyTook(deed) || deed.Made != 0) && d.committer(t.want.ID, deed.commit) != native.Owner:
			since = deed.since
		}
	}
	return since
}

// recordNative puts the losses that a read found into the open record, counts them and logs
// them. Another try of a replay counts nothing twice.
func (d *Daemon) recordNative(ctx context.Context, st *state, repairs []native.Repair) {
	l := st.native.loss
	repairs = d.nameNativeDrill(st, repairs)
	before, lost := len(l.record.Native), l.record.Lost
	for _, repair := range repairs {
		id := repair.Want.ID
		if l.hit[id] {
			continue
		}
		l.hit[id] = true
		switch {
		case repair.Want.Empty(): // packets do not miss it
			continue
		case l.record.Drill != "":
			l.addDrillLoss(id, st.native.tables[id].finding.Verdict)
			continue
		}
		l.dropSuspects()
		l.addLost(flushes.LostTable{Want: repair.Want, Now: repair.Now})
		d.addNativeLoss(st, &l.record, id)
		l.record.Older = cmp.Or(l.record.Older, st.native.older.takenFrom(id, st.native.tables[id].contentID))
	}
	fresh := l.record.Native[before:]
	if len(fresh) == 0 {
		return
	}
	says, log := "Rules were lost", severity.Warnings(st.nativeLog(ctx))
	switch {
	case l.record.Drill != "":
		says, log = drillTook, severity.Notices(log)
	case l.counted:
		d.cfg.Metrics.ObserveFurtherNativeLoss(fresh)
	default:
		d.cfg.Metrics.ObserveNativeFlush(l.record.Time, fresh)
	}
	l.counted = l.record.Drill == ""
	var names []string
	for _, loss := range fresh {
		names = append(names, loss.Table+" "+string(loss.Kind))
	}
	l.logLost(log, says, strings.Join(names, ", "), l.record.Lost.Since(lost))
}

// shown reports whether a read has shown the loss: then the record and the log have it.
func (l *nativeLoss) shown() bool { return len(l.record.Native) > 0 }

// nativeLog returns the log for lines about one flush of native tables.
func (st *state) nativeLog(ctx context.Context) klog.Logger {
	return st.native.contention.log(st.drillLog(ctx, true))
}

// addNativeLoss puts one table's loss into a record, with the processes that took it.
func (d *Daemon) addNativeLoss(st *state, r *api.Flush, id tableid.TableID) {
	t := st.native.tables[id]
	loss := api.NativeLoss{Family: id.Family.NFT(), Table: id.NFT(), Kind: canary.Verdict(t.finding.Verdict), Why: t.finding.Why}
	for _, c := range t.finding.Changes {
		switch {
		case c.Kind == nft.Tables && c.Gone:
			loss.Chains, loss.Rules, loss.Elements = t.want.Counts()
		case c.Kind == nft.Chains:
			loss.Rules += c.Lost
			if c.Gone {
				loss.Chains++
			}
		case c.Kind == nft.Sets:
			loss.Elements += c.Lost
		}
	}
	loss.Unread = t.out != nil && t.finding.Verdict != native.Emptied // commits show the counts of parts
	r.Lost.Unread = r.Lost.Unread || loss.Unread
	loss.Parts, loss.More = lostParts(t)
	if since := d.takenSince(t); !since.IsZero() && since.Before(r.Time) { // it could not be read until now
		st.beganAt(r, since, r.Time.Add(time.Duration(r.NoticedSeconds*float64(time.Second))))
	}
	loss.By = flushes.Accuse(r, d.takersOf(t))
	r.CulpritsMissed = r.CulpritsMissed || t.missed && len(loss.By) > 0
	flushes.AddNativeLoss(r, loss)
	flushes.SettleCulprit(r)
}

// partsShown is how many parts of a table a record names.
const partsShown = 20

// lostParts says in words how much each part of a table lost, for its record. For a deleted
// table these are its chains, base chains first, and its named sets. more is the number of
// parts beyond partsShown.
func lostParts(t *nativeTable) (parts []string, more int) {
	say := func(text string) {
		if len(parts) == partsShown {
			more++
			return
		}
		parts = append(parts, text)
	}
	for _, c := range t.finding.Changes {
		if c.Kind != nft.Tables || !c.Gone {
			say(c.String())
		}
	}
	if t.finding.Verdict != native.TableDeleted && t.finding.Verdict != native.Unattributed {
		return parts, more
	}
	for _, base := range []bool{true, false} {
		for i := range t.want.Chains {
			if c := &t.want.Chains[i]; c.Base == base && !c.Bound {
				say(native.Change{Kind: nft.Chains, Name: c.Name, Gone: true, Lost: len(c.Rules)}.String())
			}
		}
	}
	for i := range t.want.Sets {
		if s := &t.want.Sets[i]; !s.Anonymous() {
			say(native.Change{Kind: nft.Sets, Name: s.Name, Gone: true, Lost: len(s.Elements)}.String())
		}
	}
	return parts, more
}

// reportNative records a table that is lost and is not put back: it was deleted alone, or is
// dormant, or was stored too long ago. now is the kernel's present table; nil: none.
func (d *Daemon) reportNative(ctx context.Context, st *state, id tableid.TableID, now *native.Table) {
	r, t := &st.native, st.native.tables[id]
	if t.drill { // its drill ends as failed
		return
	}
	if w := r.waiting[id]; w != nil {
		if w.Kind == canary.Verdict(t.finding.Verdict) {
			return
		}
		delete(r.waiting, id)
		w.Outcome, w.Detail = api.Interrupted, id.NFT()+lostOnceMore
		d.keepRecord(ctx, st, *w, false, func() { d.write(ctx, *w, nil) })
	}
	record := d.newNativeRecord(st, t)
	if !t.reportAt.IsZero() { // it was noticed before
		record.NoticedSeconds = max(t.reportAt.Add(-reportLater).Sub(record.Time), 0).Seconds()
	}
	record.Outcome = api.AwaitingDecision
	counted := t.out == nil || t.finding.Verdict == native.Emptied
	works, known := st.proxyWorks(id.Family)
	t.proxyAway, t.switched = known && !works, false
	d.addNativeLoss(st, &record, id)
	lost := []flushes.LostTable{{Want: t.want, Now: now}}
	if t.out == nil {
		st.baseline.AddNative(&record, lost)
	}
	r.waiting[id] = &record
	d.cfg.Metrics.ObserveNativeFlush(record.Time, record.Native)
	if st.journal.FoldsInto(record) != nil {
		return // the log has a record like it, and the disk gets the count
	}
	var diff []api.TableDiff
	if room := flushes.DiffRoom(); t.out == nil {
		diff = flushes.NativeDiff(lost, &room)
	}
	d.write(ctx, record, diff)
	values := []any{"flush", record.ID, "tables", id.NFT() + " " + string(t.finding.Verdict)}
	if counted {
		values = append(values, "rules", record.Lost.Rules, "chains", record.Lost.Chains, "elements", record.Lost.Elements)
	}
	if t.out == nil { // else canaryd cannot bring it back
		values = append(values, "bringThemBack", restoreCommand)
	}
	klog.FromContext(ctx).Error(errors.New(t.finding.Why), awaitDecision, append(values, "acceptTheLoss", dismissCommand, "by", flushes.CulpritsText(record))...)
}

// nativeBack notes that a table is as its owner wants it: its open losses are over. stands is
// false if its owner has removed the table. If it was the last table of a loss, endBack ends
// that loss, because a plan may still work on it.
func (d *Daemon) nativeBack(ctx context.Context, st *state, id tableid.TableID, stands bool) {
	r, outcome := &st.native, api.Outcome(reload.Skipped)
	switch {
	case r.tables[id].accept:
		outcome = api.Dismissed
	case !stands:
		outcome = api.OwnersDecision
	}
	d.endWaiting(ctx, st, id, outcome, false)
	r.tables[id].finding = native.Finding{Verdict: native.Changed}
	if st.nativeBackUnasked() {
		r.loss.retry.At = time.Now()
	}
}

// nativeBackUnasked reports whether all tables of the open record are back, although canaryd puts
// nothing back: in observe mode or a pause.
func (st *state) nativeBackUnasked() bool {
	r, l := &st.native, st.native.loss
	return l != nil && len(l.hit) > 0 && !st.heals() && !slices.ContainsFunc(r.ids(), func(id tableid.TableID) bool {
		return l.hit[id] && r.tables[id].lost()
	})
}

// endBack ends the loss if all its tables are back unasked. Tables that a plan found lost
// meanwhile (repairs) were taken later, and get a record of their own.
func (d *Daemon) endBack(ctx context.Context, st *state, repairs []native.Repair) {
	if !st.nativeBackUnasked() {
		return
	}
	d.nativeRecovered(ctx, st)
	for _, repair := range repairs {
		d.loseNative(st, repair.Want.ID)
	}
}

// nativeRecovered ends the loss: everything that canaryd puts back is proved to be in force, or its
// owner was faster.
func (d *Daemon) nativeRecovered(ctx context.Context, st *state) {
	l := st.native.loss
	d.shutStandby(ctx, st)
	d.endNative(st)
	if !l.shown() {
		d.endLoss(ctx, st, st.nativeLog(ctx), &l.answer, nil)
		d.nativeDrillAnswered(ctx, st, l)
		return
	}
	l.record.Attempts = max(l.record.Attempts, l.attempts+1)
	l.again = st.native.lostAgain(l.hit)
	end := ended{tables: l.record.NativeNames(), outcome: l.outcome(), detail: strings.Join(append(l.tooLarge, l.again...), "; "), back: time.Now(), attempts: l.attempts + 1}
	if l.replayed || l.unproved {
		end.written = l.written
		if l.record.Drill == "" {
			st.native.contention.countReplay(ctx, l.record, false, 0)
		}
	}
	switch {
	case l.record.Drill != "" && end.outcome == reload.Proved:
		end.outcome = api.Drilled
	case end.outcome != api.Interrupted: // a drill that works is counted apart
		for _, loss := range l.record.Native {
			d.cfg.Metrics.ObserveNativeReplay(loss.Family, end.outcome)
		}
	}
	d.endLoss(ctx, st, st.nativeLog(ctx), &l.answer, &end)
	for id := range l.hit { // a flush took it while it waited for a decision
		if t := st.native.tables[id]; t == nil || !t.lost() {
			d.endWaiting(ctx, st, id, end.outcome, l.asked)
		}
	}
	d.nativeDrillAnswered(ctx, st, l)
}

// lostAgain says of tables of a record that they were lost once more, and wait for a decision.
func (r *nativeRealm) lostAgain(hit map[tableid.TableID]bool) (said []string) {
	for _, id := range r.ids() {
		if hit[id] && r.waiting[id] != nil && r.tables[id].lost() {
			said = append(said, id.NFT()+lostOnceMore)
		}
	}
	return said
}

// lostOnceMore ends the detail of a record whose table has another record since.
const lostOnceMore = " was lost once more without a decision: the next record waits"

// endNative closes the loss, because nothing is left to put back. It starts a sweep for written
// tables that no proof, but a later read, showed to be back.
func (d *Daemon) endNative(st *state) {
	l := st.native.loss
	st.native.loss = nil
	var back []*native.Table
	for id := range l.unswept {
		if t := st.native.tables[id]; t != nil && t.want != nil && !t.lost() && !t.drill {
			back = append(back, t.want)
		}
	}
	d.sweepNative(back, l.intact)
	d.hintNative(st, time.Now())
	d.witnessesDue(st)
}

// outcome returns the record's outcome when the loss ends: skipped if canaryd put nothing back,
// proved, or partial. It is partial if devices or parts were left out, or if no read proved a
// write or one of its tables. If all that is left of it was lost once more, it is interrupted.
func (l *nativeLoss) outcome() api.Outcome {
	switch {
	case !l.replayed && !l.unproved && len(l.again) > 0 && len(l.record.Families) == 0:
		return api.Interrupted
	case !l.replayed && !l.unproved && len(l.again) == 0:
		return reload.Skipped
	case l.lacking || l.partial || !l.replayed || len(l.tooLarge)+len(l.again) > 0:
		return reload.Partial
	}
	return reload.Proved
}

// dismissNative accepts the present state of the tables that wait for a decision. It returns
// these and their records, the newest first.
func (d *Daemon) dismissNative(st *state) (tables []string, records []api.Flush) {
	for id := range st.native.waiting {
		t := st.native.tables[id]
		t.accept = true
		t.touch(time.Now(), time.Now(), true)
		tables = append(tables, id.NFT())
	}
	slices.Sort(tables)
	st.native.planReads(time.Now())
	return tables, st.native.waitingRecords()
}

// waitingRecords returns the records that wait for a decision, the newest first. Each is of one
// table.
func (r *nativeRealm) waitingRecords() (list []api.Flush) {
	for _, w := range r.waiting {
		list = append(list, *w)
	}
	sorting.Stable(list, func(a, b api.Flush) int { return cmp.Or(b.Time.Compare(a.Time), cmp.Compare(a.ID, b.ID)) })
	return list
}

// insertRecord puts a record that waits into a Status's list of records, the newest first.
func insertRecord(list []api.Flush, f api.Flush) []api.Flush {
	i := slices.IndexFunc(list, func(o api.Flush) bool { return o.Time.Before(f.Time) })
	if i < 0 {
		i = len(list)
	}
	return slices.Insert(list, i, f)
}
