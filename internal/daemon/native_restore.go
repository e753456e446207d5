package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// askedRemedy returns how a table is put back when an operator asks for it: also one that was
// deleted alone, that only the flag dormant disables, or of which a part is gone and the commit was
// missed.
func askedRemedy(f native.Finding, now *native.Table) native.Remedy {
	switch {
	case f.Remedy != native.NoRemedy:
		return f.Remedy
	case !nativeLost(f.Verdict):
		return native.NoRemedy
	case now == nil:
		return native.ByCreate
	case f.Open():
		return native.ByRefill
	case f.Verdict == native.Disabled && len(f.Changes) == 1 && f.Changes[0].Kind == nft.Tables:
		return native.ByReplace
	}
	return native.NoRemedy
}

// restoreNative puts back the native tables that are lost because an operator asks for it: also in
// a pause, in observe mode, and those that are not put back unasked. A dry run only says which.
func (d *Daemon) restoreNative(ctx context.Context, st *state, dry bool) []api.NativeRestored {
	r := &st.native
	if !d.guardsNative() {
		return nil
	}
	ctx, done := finishing(ctx)
	defer done()
	if !dry {
		d.nativeByItself(ctx, st)
	}
	if r.asleep {
		return nil
	}
	var scratch *nativeLoss // what writes and proves needs a loss; without a record this is for none
	defer func() {
		if r.loss == scratch && scratch != nil && !scratch.recorded {
			r.loss = nil
		}
	}()
	if !dry && !r.readmit.At.IsZero() {
		r.readmit.At = time.Now()
	}
	asked := nativeAsked{wanted: map[tableid.TableID]*native.Table{}, back: map[tableid.TableID]api.Outcome{}, less: map[tableid.TableID]error{}}
	defer func() { d.leaveAsked(st, asked, dry) }()
	var last error
	for range nativeStale {
		var plan nativePlan
		plan, last = d.planNative(ctx, st, r.mayBeLost, true)
		asked.take(plan)
		if d.endBack(ctx, st, nil); r.loss == nil {
			scratch = &nativeLoss{hit: map[tableid.TableID]bool{}}
			r.loss = scratch
		}
		if last != nil || dry || len(plan.repairs) == 0 {
			break
		}
		d.recordAsked(ctx, st, plan.repairs)
		var written []native.Repair
		written, last = d.replayNative(ctx, st, plan)
		d.endAsked(ctx, st, asked, written)
		if last == nil {
			d.nativeRecovered(ctx, st)
			break
		}
		if !errors.Is(last, nft.ErrStale) && !errors.Is(last, errOwnerWrote) {
			break
		}
	}
	return asked.rows(r.tables, dry, last)
}

// A nativeAsked is what becomes of the tables that an operator asks back, in all rounds.
type nativeAsked struct {
	wanted map[tableid.TableID]*native.Table
	left   []*native.Table                 // those that cannot be put back
	back   map[tableid.TableID]api.Outcome // those that were put back and proved
	less   map[tableid.TableID]error       // the parts and devices that they lack
}

// take takes up what another round found lost. A round that could read nothing changes nothing.
func (a *nativeAsked) take(plan nativePlan) {
	if plan.seen.Ruleset == nil {
		return
	}
	a.left = plan.left
	for _, repair := range plan.repairs {
		delete(a.back, repair.Want.ID)
		a.wanted[repair.Want.ID] = repair.Want
	}
}

// rows returns what a reply says of each table. An error that no row names gets one of its own.
func (a nativeAsked) rows(tables map[tableid.TableID]*nativeTable, dry bool, err error) []api.NativeRestored {
	rows, unsaid := nativeOutcomes(nil, a.left), err
	for id, want := range a.wanted {
		outcome, why := a.back[id], error(nil)
		switch t := tables[id]; {
		case slices.ContainsFunc(a.left, func(t *native.Table) bool { return t.ID == id }):
			continue
		case outcome == reload.Partial:
			why = cmp.Or(a.less[id], errDevicesLeft)
		case dry, outcome != "": // a dry run puts nothing back
		case t == nil || !t.lost():
			outcome, why = reload.Skipped, errOwnerFaster
		default:
			outcome, why, unsaid = reload.Failed, err, nil
		}
		rows = append(rows, nativeOutcome(want, outcome, why))
	}
	if unsaid != nil {
		rows = append(rows, api.NativeRestored{Table: "native tables", Outcome: reload.Failed, Detail: unsaid.Error()})
	}
	slices.SortFunc(rows, func(a, b api.NativeRestored) int { return cmp.Compare(a.Table, b.Table) })
	return rows
}

var (
	// errDevicesLeft: a chain or flowtable came back without network devices that it had.
	errDevicesLeft = errors.New("network devices that the node lacks were left out")
	// errOwnerFaster: its owner has written a table while it was put back.
	errOwnerFaster = errors.New("its owner has written it meanwhile")
)

// devicesLeft is errDevicesLeft with the devices; nil if there are none.
func devicesLeft(left []string) error {
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", errDevicesLeft, strings.Join(left, ", "))
}

// endAsked ends the records of the tables that were written, as far as that is proved.
func (d *Daemon) endAsked(ctx context.Context, st *state, asked nativeAsked, written []native.Repair) {
	for _, repair := range written {
		id, outcome := repair.Want.ID, reload.Proved
		if asked.less[id] = partsLeft(repair.Held()); st.native.loss.lacking || asked.less[id] != nil {
			outcome = reload.Partial
		}
		if t := st.native.tables[id]; t != nil && !t.lost() {
			asked.back[id] = outcome
			if absent, waited := d.endWaiting(ctx, st, id, outcome, backOnRequest); waited {
				d.cfg.Metrics.ObserveRecovery(absent, nil)
				d.cfg.Metrics.ObserveNativeReplay(id.Family.NFT(), outcome)
			}
		}
	}
}

// leaveAsked leaves to the loop what a restore did not end: it tries again what has a record, and
// reads the tables that are still lost, as they may stand by now, or have no record yet.
func (d *Daemon) leaveAsked(st *state, asked nativeAsked, dry bool) {
	r, now := &st.native, time.Now()
	if !dry && r.loss != nil && r.loss.recorded {
		r.loss.retry.At = now
	}
	for _, want := range slices.AppendSeq(slices.Clone(asked.left), maps.Values(asked.wanted)) {
		if t := r.tables[want.ID]; t != nil && t.lost() {
			t.touch(now, now, true)
		}
	}
	r.planReads(now)
}

// nativeByItself does what the loop would do next: what it puts back unasked needs no asking.
func (d *Daemon) nativeByItself(ctx context.Context, st *state) {
	r := &st.native
	r.asked = time.Time{}
	d.lookNative(ctx, st)
	if pace.Due(r.readAt, time.Now()) {
		d.readNative(ctx, st)
	}
	if r.loss != nil && st.heals() {
		d.healNative(ctx, st)
	}
}

// recordAsked puts those tables into the flush record that wait in no record of their own.
func (d *Daemon) recordAsked(ctx context.Context, st *state, repairs []native.Repair) {
	r := &st.native
	fresh := slices.DeleteFunc(slices.Clone(repairs), func(repair native.Repair) bool { return r.waiting[repair.Want.ID] != nil })
	if len(fresh) == 0 {
		return
	}
	if r.loss.record.ID == "" {
		r.loss.record = d.newNativeRecord(st, r.tables[fresh[0].Want.ID])
	}
	d.recordNative(ctx, st, fresh)
}

// endWaiting ends the record of a table that waited for its owner or an operator, with this line in
// the log. It returns for how long the table was lost, and false if there is no such record.
func (d *Daemon) endWaiting(ctx context.Context, st *state, id tableid.TableID, outcome api.Outcome, what string) (absent time.Duration, waited bool) {
	w := st.native.waiting[id]
	if w == nil {
		return 0, false
	}
	delete(st.native.waiting, id)
	if w.Outcome = outcome; outcome == reload.Proved || outcome == reload.Partial {
		w.Older = st.native.older.takenFrom(id, st.native.tables[id].contentID)
	}
	absent = flushes.EndAbsence(w, time.Now())
	log := klog.FromContext(ctx)
	if st.journal.FoldsInto(*w) != nil {
		log = log.V(2)
	}
	d.keepRecord(ctx, st, *w, false, func() { d.write(ctx, *w, nil) })
	severity.Notices(log).Info(what, "flush", w.ID, "table", id.NFT(), "outcome", outcome)
	return absent, true
}

// loadFor is load for a command without a daemon that compares the tables that protects names with
// the kernel, nil for one without nf_tables. What cannot be compared is unknown: an error.
func (s *NativeStore) loadFor(kernel NativeKernel, protects func(tableid.TableID) bool) (storedNative, error) {
	stored, err := s.load()
	if err != nil {
		return storedNative{}, err
	}
	if stored.foreign != "" {
		return storedNative{}, fmt.Errorf("what is stored of native tables says nothing of those here: %s", stored.foreign)
	}
	if kernel == nil && slices.ContainsFunc(stored.Tables, func(t storedNativeTable) bool { return protects(t.generation.Table.ID) }) {
		return storedNative{}, errNoNFTables
	}
	if kernel == nil {
		return storedNative{}, nil
	}
	return stored, nil
}

// RestoreStored puts back, without a daemon, the stored native tables that protects names and that
// are lost. With dry it only says which.
func (s *NativeStore) RestoreStored(kernel NativeKernel, protects func(tableid.TableID) bool, dry bool) ([]api.NativeRestored, error) {
	stored, err := s.loadFor(kernel, protects)
	if err != nil || len(stored.Tables) == 0 {
		return nil, err
	}
	for range nativeStale {
		var seen *native.Ruleset
		if seen, err = kernel.Capture(func(t nft.Table) bool { return protects(t.Family.Table(t.Name)) }); err != nil {
			return nil, err
		}
		repairs, left, judgeErr := stored.repairs(kernel, seen, protects)
		if judgeErr != nil || dry || len(repairs) == 0 {
			return nativeOutcomes(repairs, left), judgeErr
		}
		w := writeAndProve(kernel, seen.Genid, repairs)
		if err = w.err; w.stale() {
			continue
		}
		rows := nativeOutcomes(nil, left)
		var proved []storedNativeTable
		for _, repair := range repairs {
			i := slices.IndexFunc(stored.Tables, func(t storedNativeTable) bool { return t.generation.Table == repair.Want })
			proved = append(proved, storedNativeTable{generation: stored.Tables[i].generation, Held: repair.Held()})
			rows = append(rows, w.row(repair))
		}
		slices.SortFunc(rows, func(a, b api.NativeRestored) int { return cmp.Compare(a.Table, b.Table) })
		if err != nil {
			return rows, nil
		}
		return rows, s.saveProved(kernel, stored, proved, w.proof)
	}
	return nil, fmt.Errorf("restoring native tables, %d times: %w", nativeStale, err)
}

// CheckStored judges, without a daemon, the stored native tables that protects names.
func (s *NativeStore) CheckStored(kernel NativeKernel, protects func(tableid.TableID) bool) ([]api.NativeTable, error) {
	stored, err := s.loadFor(kernel, protects)
	if err != nil || len(stored.Tables) == 0 {
		return nil, err
	}
	seen, err := kernel.Capture(func(t nft.Table) bool { return protects(t.Family.Table(t.Name)) })
	if err != nil {
		return nil, err
	}
	judged, err := stored.judge(kernel, seen, protects)
	var rows []api.NativeTable
	for _, j := range judged {
		id := j.generation.Table.ID
		row := api.NativeTable{Family: id.Family.NFT(), Table: id.NFT(), Verdict: canary.Verdict(j.finding.Verdict), Why: j.finding.Why, Generation: j.generation.ID}
		row.Chains, row.Rules, row.Elements = j.generation.Table.Counts()
		if n := len(j.held); n > 0 && !nativeLost(j.finding.Verdict) {
			row.Verdict, row.Why = canary.Partial, partOfIt
			row.Quarantined, row.QuarantinedParts = publishHeld(j.held), n
		}
		if now := seen.Tables[id]; now != nil && now.Immune() {
			row.Verdict, row.Immune, row.Why = canary.Intact, true, "one process owns it, and no other can flush it"
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b api.NativeTable) int { return cmp.Compare(a.Table, b.Table) })
	return rows, err
}

// A storedFinding says what became of a stored table.
type storedFinding struct {
	generation nativeGeneration
	finding    native.Finding
	held       []native.Held
}

// judge judges stored tables by what a read shows. No commit was heard of meanwhile.
func (s storedNative) judge(kernel NativeKernel, seen *native.Ruleset, protects func(tableid.TableID) bool) (all []storedFinding, err error) {
	for i, t := range s.Tables {
		want := t.generation.Table
		id := want.ID
		if i >= protect.MaxNative || !protects(id) {
			continue
		}
		witness, err := kernel.Witness(id.Family)
		if err != nil {
			return nil, err
		}
		all = append(all, storedFinding{t.generation, native.Judge(native.Evidence{Was: want, Now: seen.Tables[id], Missed: true,
			Habits: owners.HabitsOf(id), WitnessLost: t.Witness != "" && witness.Nonce != t.Witness}), t.Held})
	}
	return all, nil
}

// repairs returns what puts back the stored tables that are lost, and those that nothing can.
func (s storedNative) repairs(kernel NativeKernel, seen *native.Ruleset, protects func(tableid.TableID) bool) (all []native.Repair, left []*native.Table, err error) {
	up := here.Uptime()
	judged, err := s.judge(kernel, seen, protects)
	for _, j := range judged {
		want, now := j.generation.Table, seen.Tables[j.generation.Table.ID]
		switch remedy := askedRemedy(j.finding, now); {
		case now != nil && now.Immune(): // no other process can write it, nor flush it
		case remedy != native.NoRemedy:
			all = append(all, native.NewRepair(remedy, want, now, up-j.generation.Read))
		case nativeLost(j.finding.Verdict):
			left = append(left, want)
		}
	}
	slices.SortFunc(all, func(a, b native.Repair) int { return cmp.Compare(a.Want.Handle, b.Want.Handle) })
	return all, left, err
}

// A nativeWrite is what became of repairs that were written at once.
type nativeWrite struct {
	wrote bool            // the kernel took them
	left  []string        // devices that the node lacks
	proof *native.Ruleset // the last read; nil: there is none after the write
	err   error           // nil: they are in force, but for devices and parts that were left out
}

// writeAndProve writes repairs under the genid of a read, and proves them by another one.
func writeAndProve(kernel NativeKernel, genid uint32, repairs []native.Repair) (w nativeWrite) {
	if w.left, w.err = kernel.Write(genid, repairs, nil); w.err != nil {
		return w
	}
	w.wrote = true
	wanted := func(t nft.Table) bool {
		return slices.ContainsFunc(repairs, func(r native.Repair) bool { return r.Want.ID == t.Family.Table(t.Name) })
	}
	if w.proof, w.err = kernel.Capture(wanted); w.err != nil {
		w.err = fmt.Errorf("it was written, and whether it is in force is unknown: %w", w.err)
		return w
	}
	for _, repair := range repairs {
		if id := repair.Want.ID; !repair.Repaired(w.proof.Tables[id], len(w.left) > 0) {
			why := errNotInForce
			if w.proof.Genid != nft.Following(genid) {
				why = errOwnerWrote
			}
			w.err = fmt.Errorf("%s: %w", id.NFT(), why)
		}
	}
	return w
}

// proved reports whether the read shows them in force, perhaps less what was left out.
func (w nativeWrite) proved() bool { return w.proof != nil && w.err == nil }

// stale reports whether nothing was written, because another process wrote after the read.
func (w nativeWrite) stale() bool { return !w.wrote && errors.Is(w.err, nft.ErrStale) }

// row returns what a reply says of a repair.
func (w nativeWrite) row(repair native.Repair) api.NativeRestored {
	if w.err != nil {
		return nativeOutcome(repair.Want, reload.Failed, w.err)
	}
	if why := errors.Join(devicesLeft(w.left), partsLeft(repair.Held())); why != nil {
		return nativeOutcome(repair.Want, reload.Partial, why)
	}
	return nativeOutcome(repair.Want, reload.Proved, nil)
}
