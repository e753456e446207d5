package daemon

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Keeper keeps a family's NAT and connection tracking in place while its rules are missing:
// *iptables.Keeper, but for tests.
type Keeper interface {
	Keep(rules.Family) error
	Release(rules.Family) error
}

const (
	// keeperAgain is when a refused keeper is tried again at the latest. What a kernel lacks it
	// lacks until a module is loaded, which the kernel does not announce.
	keeperAgain = 5 * time.Minute
	// keeperTakenFor is how long a taken name is not logged. The table of a canaryd that was
	// killed goes with its socket, which a child may hold open for as long (lingers).
	keeperTakenFor = lingers
)

// keeping is what the loop knows of one family's keeper.
type keeping struct {
	state   api.KeeperState
	reason  string
	since   time.Time     // of the first try that failed; zero: none did
	wait    time.Duration // before the next try
	tryAt   time.Time     // of the next try; zero: none is due
	trouble trouble
}

// keeperBasis is what decides about the keeper. While it is the same, so is the decision.
type keeperBasis struct {
	edition int      // of the generation
	mode    api.Mode // observe writes nothing but marks
	losing  bool     // what a loss took may be why nothing translates
}

func (st *state) keeperBasis() keeperBasis {
	return keeperBasis{edition: st.generation.edition, mode: st.mode, losing: st.loss != nil}
}

// mayKeep reports whether there is a keeper at all.
func (d *Daemon) mayKeep() bool { return d.cfg.Keeper != nil }

// keep makes the keeper's tables where protected rules translate, and deletes them where none
// does. It is a step of the loop's, because its commit would make a replay stale if it came
// between the replay's read and write.
func (d *Daemon) keep(ctx context.Context, st *state) {
	st.keptBy = st.keeperBasis()
	g, now := st.want(), time.Now()
	for _, f := range rules.Families() {
		fs := st.families[f]
		if fs == nil {
			continue
		}
		if due(fs.keeper.tryAt, now) {
			fs.keeper.tryAt = time.Time{}
		}
		switch {
		case st.mode != api.Heal:
			d.release(ctx, f, &fs.keeper, api.KeeperOff, "observe mode writes nothing but marks")
		case g.Rewrites(f):
			d.keepFamily(ctx, f, &fs.keeper, now)
		case st.loss == nil || fs.keeper.state != api.KeeperKept:
			d.release(ctx, f, &fs.keeper, api.KeeperIdle, "no protected rule translates any more")
		}
	}
}

// keepFamily makes the family's table unless it stands, or is to be tried later.
func (d *Daemon) keepFamily(ctx context.Context, f rules.Family, k *keeping, now time.Time) {
	if k.state == api.KeeperKept || !k.tryAt.IsZero() {
		return
	}
	if err := d.cfg.Keeper.Keep(f); err != nil {
		d.keeperFailed(ctx, f, k, err, now)
		return
	}
	k.trouble.over()
	*k = keeping{state: api.KeeperKept, trouble: k.trouble}
	klog.FromContext(ctx).Info("Established connections live through a flush: an empty table keeps the kernel's NAT and connection tracking in place",
		"family", f, "table", iptables.KeeperTable)
}

// keeperFailed notes a try that failed, and plans the next one.
func (d *Daemon) keeperFailed(ctx context.Context, f rules.Family, k *keeping, err error, now time.Time) {
	if k.since.IsZero() {
		k.since = now
	}
	k.state, k.reason = api.KeeperUnavailable, err.Error()
	if k.wait = min(max(2*k.wait, firstTry), keeperAgain); errors.Is(err, iptables.ErrKeeperKernel) {
		k.wait = keeperAgain
	}
	k.tryAt = now.Add(k.wait)
	if errors.Is(err, iptables.ErrKeeperTaken) && now.Sub(k.since) < keeperTakenFor {
		return
	}
	if k.trouble.met(err, now) {
		klog.FromContext(ctx).Info("A flush may break established connections, which the keeper would prevent; nothing else depends on it",
			"family", f, "reason", err)
	}
}

// release deletes the family's table, if there is one.
func (d *Daemon) release(ctx context.Context, f rules.Family, k *keeping, into api.KeeperState, why string) {
	if k.state == api.KeeperKept {
		if err := d.cfg.Keeper.Release(f); err != nil {
			k.tryAt = time.Now().Add(keeperAgain)
			if k.trouble.met(err, time.Now()) {
				klog.FromContext(ctx).Error(err, "The keeper's table stays for now", "family", f, "table", iptables.KeeperTable)
			}
			return
		}
		klog.FromContext(ctx).Info("The keeper's table is deleted", "family", f, "table", iptables.KeeperTable, "because", why)
	}
	k.trouble.over()
	*k = keeping{state: into, trouble: k.trouble}
}

// stopKeeping deletes the keeper's tables after a cleanup.
func (d *Daemon) stopKeeping(ctx context.Context, st *state) {
	if !d.mayKeep() {
		return
	}
	for f, fs := range st.families {
		d.release(ctx, f, &fs.keeper, api.KeeperOff, "canaryd's marks were removed on request")
	}
}

// keepers returns the keeper's states as a Status has them.
func (d *Daemon) keepers(st *state) map[rules.Family]api.FamilyKeeper {
	all := map[rules.Family]api.FamilyKeeper{}
	for f, fs := range st.families {
		all[f] = api.FamilyKeeper{State: fs.keeper.state, Reason: fs.keeper.reason}
		switch {
		case !d.mayKeep():
			all[f] = api.FamilyKeeper{State: api.KeeperOff}
		case fs.keeper.state == "": // nothing is decided yet
			all[f] = api.FamilyKeeper{State: api.KeeperIdle}
		}
	}
	return all
}
