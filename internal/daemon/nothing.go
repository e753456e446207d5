package daemon

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// inventoryEvery is how often canaryd looks at what is there while nothing is protected:
	// one question to nf_tables, and reads of families that changed.
	inventoryEvery = 30 * time.Second
	nativeShown    = 20
	strangersShown = 5
)

// An inventory is what the loop knows of rules that are not protected, while none are.
type inventory struct {
	at      time.Time // the next look at what is there
	found   api.Nothing
	taken   bool
	edition int  // of the generation that bare is of
	bare    bool // that generation has nothing to guard
	strange map[rules.Family]strangers
}

// strangers are one family's rules that are not protected.
type strangers struct {
	digest uint64 // of what was read
	rules  int
	chains []string
}

// bareNow reports whether the generation has nothing to guard.
func (d *Daemon) bareNow(st *state) bool {
	if inv := &st.inventory; inv.edition != st.generation.edition {
		// Kubelet's chains are too little only if more than these is to be guarded.
		inv.edition, inv.bare = st.generation.edition, bare(st.want(), d.cfg.Protection.Chain(owners.ServicesChain))
	}
	return st.inventory.bare
}

// bare reports whether a generation has no rule, or only kubelet's.
func bare(g rules.Generation, beyondKubelet bool) bool {
	// kubelet's chains are guarded, but a node on which they are all is not what --protect=kube
	// is for.
	counts := func(chain string) bool { return !beyondKubelet || !owners.Kubelets(chain) }
	for _, s := range g {
		for _, c := range s.Chains {
			if len(c.Rules) > 0 && counts(c.Name) {
				return false
			}
		}
		for _, h := range s.Jumps {
			if counts(h.Into()) {
				return false
			}
		}
	}
	return true
}

// mayTakeInventory reports whether what is there may be looked at: once every table
// was read and nothing of it is to be guarded.
func (d *Daemon) mayTakeInventory(st *state) bool {
	return st.loss == nil && st.allPlanted() && d.bareNow(st)
}

// takeInventory looks what is there although nothing is protected.
func (d *Daemon) takeInventory(ctx context.Context, st *state) {
	inv := &st.inventory
	inv.at, inv.taken = time.Now().Add(inventoryEvery), true
	count, _ := st.want().Counts()
	found := api.Nothing{Kubelet: count > 0, Unknown: d.cfg.NativeTables == nil}
	if d.cfg.NativeTables != nil {
		native, err := d.cfg.NativeTables(ctx)
		found.NativeTables, found.Unknown = native[:min(len(native), nativeShown)], err != nil
	}
	for _, f := range d.cfg.Kernel.Families() {
		known, ok := inv.strange[f]
		if fs := st.families[f]; !ok || known.digest != fs.examined.digest {
			snapshot, err := d.cfg.Kernel.Read(ctx, f)
			if err != nil {
				found.Unknown = true
				continue
			}
			st.memory.scheduleFree(time.Now())
			known = d.strangersIn(st, snapshot)
			known.digest = fs.examined.digest
			inv.strange[f] = known
		}
		found.Rules += known.rules
		for _, chain := range known.chains {
			if !slices.Contains(found.Chains, chain) && len(found.Chains) < strangersShown {
				found.Chains = append(found.Chains, chain)
			}
		}
	}
	inv.found = found
}

// strangersIn returns the rules of a family that are neither protected nor canaryd's.
func (d *Daemon) strangersIn(st *state, snapshot iptables.Snapshot) strangers {
	found, protects := strangers{}, d.protection(st).Chain
	for _, t := range protect.Tables() {
		table := snapshot.Tables[t]
		if table == nil {
			continue
		}
		for _, c := range table.Chains {
			n := 0
			for _, r := range c.Rules {
				if !canary.IsMark(r) && !protects(c.Name) && !protects(r.Target) {
					n++
				}
			}
			found.rules += n
			if n > 0 && !rules.Builtin(t, c.Name) && len(found.chains) < strangersShown {
				found.chains = append(found.chains, c.Name)
			}
		}
	}
	return found
}

// guardsPackets reports whether a native table that is guarded decides on packets: it has rules, or
// a base chain, which has a policy.
func (r *nativeRealm) guardsPackets() bool {
	return anyOf(r.tables, func(t *nativeTable) bool {
		return slices.ContainsFunc(t.want.Chains, func(c native.Chain) bool { return c.Base || len(c.Rules) > 0 })
	})
}

// nothing returns that nothing is protected, for a Status that is ready; nil if
// something is.
func (d *Daemon) nothing(st *state, s api.Status) *api.Nothing {
	if !d.mayTakeInventory(st) || s.Ready() != nil || st.native.guardsPackets() {
		return nil
	}
	found := st.inventory.found
	found.Unknown = found.Unknown || !st.inventory.taken // that follows
	return &found
}
