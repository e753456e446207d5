package daemon

import (
	"cmp"
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
)

// rideMost is how many chains, rules, sets and elements native tables may have to be written in
// the transaction of iptables' tables. iptables' tables are not in force before all of it is.
// The kernel takes 6 ms for the 700 of 100 services, and 0.3 s for the 6,400 of 1,000 (Linux
// 6.18, 2 cores). Larger native tables are written right after.
const rideMost = 1500

// A nativeRide is the part of native tables in the transaction that puts iptables' tables back.
// After `nft flush ruleset` took both, the kernel accepts both or none.
type nativeRide struct {
	nativePlan
	left []string // devices that were left out
	at   time.Time
	used time.Duration // the daemon's processor time before
}

// rider plans the ride right before iptables' tables are written. Only tables that a commit
// deleted ride. To judge others, canaryd has to read them, and iptables' tables need not wait
// for that. nil: none ride, and healNative puts native tables back later.
func (d *Daemon) rider(ctx context.Context, st *state, ride *nativeRide) *iptables.Rider {
	r := &st.native
	if !d.guardsNative() || r.asleep || d.cfg.Kernel.Info().Backend != iptables.NFT || !ride.at.IsZero() || r.loss != nil && r.loss.attempts > 0 || r.contention.limit.Wait(time.Now()) > 0 {
		return nil
	}
	plan, err := d.planNative(ctx, st, func(t *nativeTable) bool { return t != nil && t.gone() && !r.all }, false)
	d.endBack(ctx, st, nil)
	for _, repair := range plan.repairs {
		d.loseNative(st, repair.Want.ID)
	}
	if err != nil || !r.mayRide(plan.repairs) {
		return nil // healNative says why
	}
	ride.nativePlan = plan
	return &iptables.Rider{
		Genid: plan.seen.Genid,
		Append: func(b *nft.Batch) (err error) {
			ride.left, err = d.cfg.Native.Kernel.Append(b, plan.repairs, plan.witnesses)
			return err
		},
		Sent: func(err error) {
			if err == nil {
				ride.at = time.Now()
			} else if !errors.Is(err, nft.ErrStale) {
				klog.FromContext(ctx).Info("Native tables are written after iptables' tables, not in the same transaction", "reason", err)
			}
		},
	}
}

// mayRide reports whether the kernel is expected to take the repairs, and to take them soon: a
// refused ride would delay iptables' rules.
func (r *nativeRealm) mayRide(repairs []native.Repair) bool {
	size := 0
	for _, repair := range repairs {
		chains, rules, elements := repair.Want.Counts()
		size += chains + rules + elements + len(repair.Want.Sets)
		if r.tables[repair.Want.ID].refused.There() {
			return false
		}
	}
	return len(repairs) > 0 && size <= rideMost
}

// concludeRide proves the native tables that rode. Then they join the flush record of iptables'
// tables, unless they have a record already, or that record cannot show their outcome.
func (d *Daemon) concludeRide(ctx context.Context, st *state, ride *nativeRide) {
	if ride.at.IsZero() {
		return
	}
	l, native := st.loss, st.native.loss
	st.native.contention.limit.Spend(time.Now(), d.cpu()-ride.used)
	d.noteLeft(ctx, st, ride.left)
	d.wroteNative(st, ride.nativePlan, ride.at)
	added, recorded := d.addNativeLosses(st, ride.repairs), native.recorded
	err := d.proveNative(ctx, st, ride.seen.Genid, ride.repairs)
	if err != nil || recorded || native.lacking || native.partial || l.record.Drill != "" {
		if added > 0 {
			d.announceNative(st.nativeLog(ctx), native.record, added, recorded)
		}
		native.recorded = true
		switch {
		case errors.Is(err, nativestore.ErrOwnerWrote), err == nil && st.native.moreLost():
			native.retry.At = time.Now() // healNative continues, and ends the record
		case err != nil:
			d.nativeFailed(ctx, st, err)
		default:
			d.nativeRecovered(ctx, st)
		}
		return
	}
	d.shutStandby(ctx, st)
	d.endNative(st)
	joinRecord(&l.record, native.record)
	l.addDiff(native.takeUnkept()...)
	d.announceNative(st.flushLog(ctx), l.record, added, l.counted)
	d.countNativeReplay(native.record.Native, native.outcome())
	l.counted, l.recovery.ridden = true, time.Now()
}

// moreLost reports whether a table is known to be lost that canaryd puts back.
func (r *nativeRealm) moreLost() bool {
	return anyOf(r.tables, func(t *nativeTable) bool { return t.lost() && t.finding.Remedy != native.NoRemedy })
}

// joinRecord puts the losses of native tables into the record of iptables' tables, because one
// transaction has put both back.
func joinRecord(to *api.Flush, from api.Flush) {
	to.Native = append(to.Native, from.Native...)
	to.Standby = to.Standby.Joined(from.Standby, from.Time.Sub(to.Time))
	to.Older = cmp.Or(to.Older, from.Older)
	to.Lost.Rules += from.Lost.Rules
	to.Lost.Chains += from.Lost.Chains
	to.Lost.Elements += from.Lost.Elements
	if flushes.Graver(from.Kind, to.Kind) {
		to.Kind = from.Kind
	}
	for _, c := range from.Culprits {
		flushes.AddCulprit(to, c)
	}
	to.LastInForce, to.Stalled = pace.Earliest(to.LastInForce, from.LastInForce), to.Stalled || from.Stalled
	to.CulpritsMissed = to.CulpritsMissed || from.CulpritsMissed
	flushes.SettleCulprit(to)
}
