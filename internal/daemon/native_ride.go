package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/nativestore"
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
	if !d.guardsNative() || r.asleep || d.cfg.Kernel.Info().Backend != iptables.NFT || !ride.at.IsZero() || !st.heals() || r.loss != nil && r.loss.attempts > 0 || r.contention.limit.Wait(time.Now()) > 0 {
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

// concludeRide records and proves the native tables that rode. Their loss ends then, unless more
// is lost or the proof fails.
func (d *Daemon) concludeRide(ctx context.Context, st *state, ride *nativeRide) {
	if ride.at.IsZero() {
		return
	}
	st.native.contention.limit.Spend(time.Now(), d.cpu()-ride.used)
	d.noteLeft(ctx, st, ride.left)
	d.wroteNative(st, ride.nativePlan, ride.repairs, ride.at)
	d.recordNative(ctx, st, ride.repairs)
	switch err := d.proveNative(ctx, st, ride.seen.Genid, ride.repairs); {
	case errors.Is(err, nativestore.ErrOwnerWrote), err == nil && st.native.moreLost():
		st.native.loss.retry.At = time.Now() // healNative continues, and ends the loss
	case err != nil:
		d.nativeFailed(ctx, st, err)
	default:
		d.nativeRecovered(ctx, st)
	}
}

// moreLost reports whether a table is known to be lost that canaryd puts back.
func (r *nativeRealm) moreLost() bool {
	return anyOf(r.tables, func(t *nativeTable) bool { return t.lost() && t.finding.Remedy != native.NoRemedy })
}
