package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Native tables have no canary, because an owner's table has nothing of canaryd's in it. So a
// drill makes a small table in each family that has guarded tables. canaryd learns, judges and
// restores it like those, and removes it at the end. The witnesses stay: without them a flush in
// the middle would look like the deletion of a single table.

// A nativeDrill has the tables of a drill, from their making to their removal.
type nativeDrill struct {
	tables []tableid.TableID
	genid  uint32 // of the commit that took them; 0: none has
	// foreign: another process wrote to them.
	foreign bool
	// removeAt is when tables of drills are removed from the kernel; zero: none is left there.
	removeAt time.Time
	unmoved  pace.Trouble // why they could not be removed
}

// has reports whether a table is one of the present drill's.
func (x *nativeDrill) has(id tableid.TableID) bool { return slices.Contains(x.tables, id) }

// guards reports whether a table is guarded: a drill's is, while the drill lasts.
func (d *Daemon) guards(r *nativeRealm, id tableid.TableID) bool {
	return d.cfg.Native.Protects(id) || r.drill.has(id)
}

// drillFamilies returns the families of the guarded tables that canaryd keeps.
func (r *nativeRealm) drillFamilies() []tableid.Family {
	var all []tableid.Family
	for _, id := range r.ids() {
		if t := r.tables[id]; t.out == nil && t.want != nil && !t.drill {
			all = append(all, id.Family)
		}
	}
	return slices.Compact(all)
}

// errDrillTouched: another process wrote to the tables of a drill before the drill took them.
var errDrillTouched = errors.New("another process changed the drill's own tables; it may be a flush")

// takeDrillTables makes the tables of a drill, learns them, and takes them like a flusher. After an
// error the drill does not continue: nothing was taken, or, if the reply says failed, something may
// have been.
func (d *Daemon) takeDrillTables(ctx context.Context, st *state, x *drill.Drill, because string) error {
	ctx, done := finishing(ctx)
	defer done()
	r := &st.native
	x.Reply.Native = nil
	for _, family := range r.drillFamilies() {
		x.Reply.Native = append(x.Reply.Native, family.Table(native.DrillName).NFT())
	}
	says := "A drill begins"
	if st.drills.Under != nil {
		says = "The drill goes on"
	}
	severity.Notices(klog.FromContext(ctx)).Info(says, "takes", x.Takes(), "kind", x.Kind(), "because", because)
	var taken time.Time
	err := d.makeDrillTables(ctx, st)
	if err == nil {
		taken, err = d.takeMade(ctx, st, x)
	}
	if err != nil {
		d.leaveDrillTables(ctx, st, x.Reply.Result)
		if x.Reply.Result != api.DrillFailed {
			x.Reply.Native = nil
		}
		return err
	}
	st.drills.BeginNative(x, taken, d.drillQuiet())
	return nil
}

// makeDrillTables makes a table in each family, and learns them by a read.
func (d *Daemon) makeDrillTables(ctx context.Context, st *state) error {
	r := &st.native
	if err := d.cfg.Native.RemoveDrills(); err != nil {
		return err
	}
	var repairs []native.Repair
	for _, family := range r.drillFamilies() {
		table := native.NewDrillTable(family, string(canary.NewNonce()))
		r.drill.tables = append(r.drill.tables, table.ID)
		repairs = append(repairs, native.NewRepair(native.ByCreate, table, nil, 0))
	}
	err := d.fresh(ctx, st, func(genid uint32) error {
		_, err := d.cfg.Native.Kernel.Write(genid, repairs, nil)
		return err
	})
	switch {
	case errors.Is(err, syscall.EEXIST):
		return fmt.Errorf("another process has a table of the name %s: %w", native.DrillName, err)
	case err != nil:
		return fmt.Errorf("making the drill's own tables: %w", err)
	}
	if _, err = d.sightNative(ctx, st, d.cfg.Native.Kernel.Capture, r.drill.has); err != nil {
		return fmt.Errorf("reading the drill's own tables: %w", err)
	}
	for i, id := range r.drill.tables {
		if t := r.tables[id]; t == nil || !repairs[i].Whole() || !sameCounts(t.want, repairs[i].Want) {
			return errDrillTouched
		}
	}
	return nil
}

// sameCounts reports whether two tables have as much of everything. The kernel adds attributes of
// its own.
func sameCounts(a, b *native.Table) bool {
	chains, rules, elements := a.Counts()
	c, r, e := b.Counts()
	return chains == c && rules == r && elements == e
}

// takeMade takes the tables, unless another process has written to them. It returns when the
// kernel had taken them.
func (d *Daemon) takeMade(ctx context.Context, st *state, x *drill.Drill) (taken time.Time, err error) {
	r := &st.native
	var tables []*native.Table
	for _, id := range r.drill.tables {
		tables = append(tables, r.tables[id].want)
	}
	err = d.fresh(ctx, st, func(genid uint32) (err error) {
		if slices.ContainsFunc(r.drill.tables, func(id tableid.TableID) bool { return r.tables[id] == nil || !r.tables[id].dirty.IsZero() }) {
			return errDrillTouched
		}
		r.drill.genid = nft.Following(genid)
		taken, err = d.cfg.Native.Kernel.TakeDrill(genid, tables, native.Verdict(x.Kind()))
		return err
	})
	var refused *nft.RefusedError
	if err != nil && !errors.Is(err, nft.ErrStale) && !errors.Is(err, errDrillTouched) && !errors.As(err, &refused) {
		x.Reply.Result = api.DrillFailed
	}
	return taken, err
}

// fresh calls write with the genid up to which all commits were heard. It does so again if another
// process has committed since.
func (d *Daemon) fresh(ctx context.Context, st *state, write func(genid uint32) error) (err error) {
	for range nativestore.Tries {
		var genid uint32
		if genid, err = d.hearNow(ctx, st); err == nil {
			err = write(genid)
		}
		if !errors.Is(err, nft.ErrStale) {
			break
		}
	}
	return err
}

// drillDeed replaces the deeds of a drill's table whose commits were missed. The table has no owner
// that may have taken its lost parts.
func (t *nativeTable) drillDeed(now *native.Table) *native.Deed {
	deed := &native.Deed{Deleted: now == nil || now.Handle != t.want.Handle, Rules: map[string]int{}, By: native.NotOwner}
	if deed.Deleted && now != nil {
		deed.Made = now.Handle
	}
	for i := range t.want.Chains {
		deed.Rules[t.want.Chains[i].Name] = len(t.want.Chains[i].Rules)
	}
	return deed
}

// noteForeign notes whether another process wrote to a table of the drill.
func (x *nativeDrill) noteForeign(t *nativeTable) {
	x.foreign = x.foreign || slices.ContainsFunc(t.deeds, func(deed nativeDeed) bool { return deed.Genid != x.genid })
}

// onlyDrill reports whether all tables that are known to be lost are those of a drill.
func (r *nativeRealm) onlyDrill() bool {
	return r.drill.genid != 0 && !anyOf(r.tables, func(t *nativeTable) bool { return t.lost() && !t.drill })
}

// nameNativeDrill marks the open record as a drill's if a drill took all lost tables. A record that
// is no longer a drill's begins again as a flush, at the time of the flush. It returns the repairs
// that the record is about: a flush's record has no table of a drill.
func (d *Daemon) nameNativeDrill(st *state, repairs []native.Repair) []native.Repair {
	r, l := &st.native, st.native.loss
	var drilled, flushed []native.Repair
	for _, repair := range repairs {
		t := r.tables[repair.Want.ID]
		if !t.drill {
			flushed = append(flushed, repair)
			continue
		}
		drilled, l.drill = append(drilled, repair), true
		r.drill.noteForeign(t)
	}
	switch {
	case len(flushed) > 0 && l.drill && (l.record.Drill != "" || !l.known()):
		d.beginAsFlush(st, flushed)
		return flushed
	case len(flushed) > 0 || l.known() && l.record.Drill == "":
		return flushed
	case len(drilled) > 0:
		l.record.Drill = api.DrillCanary
	}
	return drilled
}

// beginAsFlush makes the record that a drill has opened begin with the first of these tables.
func (d *Daemon) beginAsFlush(st *state, flushed []native.Repair) {
	l, now := st.native.loss, time.Now()
	id := l.record.ID
	l.record = d.newNativeRecord(st, st.native.tables[flushed[0].Want.ID])
	for _, repair := range flushed[1:] {
		l.begin(d.newNativeRecord(st, st.native.tables[repair.Want.ID]))
	}
	l.record.ID = id
	if l.noticed.Before(l.record.Time) {
		l.noticed = now
	}
	l.record.NoticedSeconds = l.noticed.Sub(l.record.Time).Seconds()
	clear(l.hit)
}

// addDrillLoss puts a table of a drill into the record, without counts: no rule of another is lost.
func (l *nativeLoss) addDrillLoss(id tableid.TableID, verdict native.Verdict) {
	l.record.Kind = canary.Verdict(verdict)
	l.record.Native = append(l.record.Native, api.NativeLoss{Family: id.Family.NFT(), Table: id.NFT(), Kind: canary.Verdict(verdict), Why: "a drill took it"})
}

// course returns the loss as a drill sees it.
func (l *nativeLoss) course(st *state) drill.Course {
	var lost []string
	for _, n := range l.record.Native {
		lost = append(lost, n.Table+" "+string(n.Kind))
	}
	return drill.Course{Record: l.record, Recorded: l.shown(), Noticed: l.noticed, Lost: strings.Join(lost, ", "), Foreign: st.native.drill.foreign}
}

// nativeDrillAnswered ends the drill that is at native tables, if there is one, because the loss l
// of its tables has ended.
func (d *Daemon) nativeDrillAnswered(ctx context.Context, st *state, l *nativeLoss) {
	if x, r := st.drills.Under, &st.native; l.drill && x.At(true) {
		for _, id := range r.drill.tables {
			r.drill.noteForeign(r.tables[id])
		}
		result, reason := x.Answered(l.course(st))
		d.endDrill(ctx, st, result, reason)
	}
}

// leaveDrillTables forgets and removes the tables of a drill that has ended.
func (d *Daemon) leaveDrillTables(ctx context.Context, st *state, result api.DrillResult) {
	r, l := &st.native, st.native.loss
	if len(r.drill.tables) == 0 {
		return
	}
	r.forgetDrillTables()
	if l != nil && l.drill {
		d.endDrillLoss(ctx, st, result)
	}
	if mayRemoveDrills(st) {
		d.removeDrillTables(ctx, st)
	}
}

// endDrillLoss ends a loss of a drill's tables that lasts: nothing needs them any more. Its
// record is interrupted. A loss of other tables continues.
func (d *Daemon) endDrillLoss(ctx context.Context, st *state, result api.DrillResult) {
	r, l := &st.native, st.native.loss
	if l.drill = false; anyOf(r.tables, (*nativeTable).lost) {
		return
	}
	r.loss = nil
	if l.shown() {
		l.record.Outcome, l.record.Detail = api.Interrupted, "the drill has ended, and canaryd has removed its own tables"
		l.record.DrillFailed = l.record.Drill != "" && result == api.DrillFailed
		d.journal(ctx, st, l.openRecord)
	}
}

// forgetDrillTables forgets the tables of a drill. They are due to be removed from the kernel.
func (r *nativeRealm) forgetDrillTables() {
	for _, id := range r.drill.tables {
		delete(r.tables, id)
		if r.loss != nil {
			delete(r.loss.hit, id)
			delete(r.loss.unswept, id)
		}
	}
	r.drill.tables, r.drill.genid, r.drill.foreign, r.drill.removeAt = nil, 0, false, time.Now()
}

// mayRemoveDrills reports whether tables of drills are removed now: not during a replay, and not
// the present drill's.
func mayRemoveDrills(st *state) bool {
	return len(st.native.drill.tables) == 0 && st.nothingLost() && noNativeReplay(st)
}

// removeDrillTables removes the tables of drills from the kernel, also those of an earlier run.
func (d *Daemon) removeDrillTables(ctx context.Context, st *state) {
	x := &st.native.drill
	if x.removeAt = (time.Time{}); d.cfg.Native.RemoveDrills == nil {
		return
	}
	err := d.cfg.Native.RemoveDrills()
	if err != nil {
		x.removeAt = time.Now().Add(d.cfg.PollInterval)
	}
	x.unmoved.Report(pace.Warnings(ctx), err, "A drill's own table could not be removed; no packet meets it")
}
