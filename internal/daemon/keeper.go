package daemon

import (
	"cmp"
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Keeper keeps a family's NAT and connection tracking in place while its rules are missing:
// *iptables.Keeper, but for tests.
type Keeper interface {
	Keep(rules.Family) error
	Release(rules.Family) error
}

// keeping is the loop's knowledge of one family's keeper.
type keeping struct {
	state  api.KeeperState
	reason string
	making pace.Making
}

// keeperBasis is the basis of the decision about the keeper. While it is the same, so is the
// decision.
type keeperBasis struct {
	edition int      // of the generation
	mode    api.Mode // observe writes nothing but marks
	losing  bool     // a loss may be why nothing translates
}

func (st *state) keeperBasis() keeperBasis {
	return keeperBasis{edition: st.generation.edition, mode: st.mode, losing: st.loss != nil}
}

// mayKeep reports whether there is a keeper at all.
func (d *Daemon) mayKeep(*state) bool { return d.cfg.Keeper != nil }

// keep makes the keeper's tables where protected rules translate, and deletes them where none
// does. It is a step of the loop, because a commit between a replay's read and its write makes
// the replay stale.
func (d *Daemon) keep(ctx context.Context, st *state) {
	st.keptBy = st.keeperBasis()
	g, now := st.want(), time.Now()
	for f, fs := range st.inOrder() {
		if pace.Due(fs.keeper.making.TryAt, now) {
			fs.keeper.making.TryAt = time.Time{}
		}
		switch {
		case st.mode != api.Heal:
			d.release(ctx, f, &fs.keeper, api.KeeperOff, "observe mode writes nothing but marks")
		case g.Rewrites(f):
			d.keepFamily(ctx, f, &fs.keeper)
		case st.loss == nil || fs.keeper.state != api.KeeperKept:
			d.release(ctx, f, &fs.keeper, api.KeeperIdle, "no protected rule translates any more")
		}
	}
}

// keepFamily makes the family's table, so that a flush breaks no established connections,
// unless the table exists or is to be tried later.
func (d *Daemon) keepFamily(ctx context.Context, f rules.Family, k *keeping) {
	if k.state == api.KeeperKept || !k.making.TryAt.IsZero() {
		return
	}
	if err := d.cfg.Keeper.Keep(f); err != nil {
		k.state, k.reason = api.KeeperUnavailable, err.Error()
		if k.making.Failed(err, iptables.ErrKeeperKernel, iptables.ErrKeeperTaken) {
			severity.Warnings(klog.FromContext(ctx)).Info("There is no keeper: a flush may break established connections; nothing else depends on it",
				"family", f, "reason", err)
		}
		return
	}
	*k = keeping{state: api.KeeperKept, making: k.making.Over()}
	klog.FromContext(ctx).Info("Established connections live through a flush: an empty table keeps the kernel's NAT and connection tracking in place",
		"family", f, "table", iptables.KeeperTable)
}

// release deletes the family's keeper table, if there is one. into is the keeper's state from
// then on, and why the log's reason. After an error the table stays and is tried again.
func (d *Daemon) release(ctx context.Context, f rules.Family, k *keeping, into api.KeeperState, why string) {
	if k.state == api.KeeperKept {
		if err := d.cfg.Keeper.Release(f); err != nil {
			if k.making.Stays(err) {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "The keeper's table could not be deleted yet", "family", f, "table", iptables.KeeperTable)
			}
			return
		}
		klog.FromContext(ctx).Info("The keeper's table is deleted", "family", f, "table", iptables.KeeperTable, "because", why)
	}
	*k = keeping{state: into, making: k.making.Over()}
}

// stopKeeping deletes the keeper's tables after a cleanup.
func (d *Daemon) stopKeeping(ctx context.Context, st *state) {
	if !d.mayKeep(st) {
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
		// Without a state nothing is decided yet.
		all[f] = api.FamilyKeeper{State: cmp.Or(fs.keeper.state, api.KeeperIdle), Reason: fs.keeper.reason}
		if !d.mayKeep(st) {
			all[f] = api.FamilyKeeper{State: api.KeeperOff}
		}
	}
	return all
}
