package daemon

import (
	"context"
	"runtime"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Tracker knows the node's flows: conntrack.Kernel, but for tests.
type Tracker interface {
	Look(ctx context.Context) (nat.Site, error)
	Sweep(ctx context.Context, f rules.Family, since time.Time, by conntrack.Rules) (conntrack.Deleted, error)
}

// sweepTime limits one sweep. With 100,000 flows a sweep took 0.2 s, and 0.4 s if the kernel
// cannot filter (before Linux 5.15). It is not cut short when the daemon stops: the rules are
// back, and no other sweep follows.
const sweepTime = 4 * time.Second

// A sweep follows a replay of nat, or the opening of the standby. It ends the flows that began
// while the rules were missing, so that the next packet of each is translated.
type sweep struct {
	// since is when the rules of each family were seen complete last.
	since      map[rules.Family]time.Time
	generation rules.Generation
	native     []*native.Table
}

// askSweep starts a sweep. It never waits: a request during a sweep is done afterwards, by the
// newest rules.
func (d *Daemon) askSweep(next sweep) {
	if d.cfg.Flows == nil {
		return
	}
	select {
	case waiting := <-d.sweeps:
		for f, at := range waiting.since {
			if own, ok := next.since[f]; !ok || at.Before(own) {
				next.since[f] = at
			}
		}
		if next.generation == nil {
			next.generation = waiting.generation
		}
		for _, t := range waiting.native {
			if !slices.ContainsFunc(next.native, func(own *native.Table) bool { return own.ID == t.ID }) {
				next.native = append(next.native, t)
			}
		}
	default:
	}
	d.sweeps <- next // the loop alone sends, and there is room for one
}

// sweepNative starts a sweep of the families of native tables that are proved to be back, or
// that the standby has begun to translate for. intact is when they were last known to be in
// force.
func (d *Daemon) sweepNative(back []*native.Table, intact time.Time) {
	next := sweep{since: map[rules.Family]time.Time{}}
	for _, t := range back {
		for _, f := range rules.Families() {
			if t.ID.Family == f || t.ID.Family == tableid.Inet {
				next.since[f] = intact
			}
		}
		next.native = append(next.native, t)
	}
	if len(next.since) > 0 {
		d.askSweep(next)
	}
}

// sweepAfter starts a sweep of a family if its nat was lost and is proved to be back.
//
// intact is when nat was last seen complete. Its rules may be missing from then on: a flush
// takes effect before anything shows it, nearly a second before on a busy node. So its flows
// began before canaryd noticed it.
func (d *Daemon) sweepAfter(g rules.Generation, f rules.Family, result reload.FamilyResult, intact time.Time) {
	nat, ok := result.Tables[rules.Nat]
	if ok && nat.Proved && nat.Finding.Verdict.Loss() && !nat.Finding.OnlyDrilled() {
		d.sweepNat(g, f, intact)
	}
}

// sweepNat starts a sweep of a family whose nat is proved to be back, or is translated by the
// standby. Otherwise a flow that began before would wait for the proof. At 5,000 services of
// kube-proxy's nftables mode a replay takes 2 to 9 s. There 33 of 16,420 connections were not
// made within 15 s (Linux 6.18).
func (d *Daemon) sweepNat(g rules.Generation, f rules.Family, intact time.Time) {
	d.askSweep(sweep{since: map[rules.Family]time.Time{f: intact}, generation: g})
}

// runSweeps sweeps until sweeps is closed. It has a goroutine of its own, so that the answer to
// the next flush does not wait for it. It has a thread of its own, so that its cost is known.
func (d *Daemon) runSweeps(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for s := range d.sweeps {
		used := d.threadCPU()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
		for _, f := range rules.Families() {
			if since, ok := s.since[f]; ok {
				d.sweep(ctx, f, since, s)
			}
		}
		cancel()
		d.elsewhere.Add(int64(d.threadCPU() - used))
	}
}

// sweep ends the flows of a family that the rules of s would translate otherwise: conntrack
// would leave them as they are until they end. runSweeps calls it once nat is back, or the
// standby translates. Of most kinds, only flows that began after since end. An error is
// logged and counted; no replay waits for it.
func (d *Daemon) sweep(ctx context.Context, f rules.Family, since time.Time, s sweep) {
	log := klog.FromContext(ctx)
	site, err := d.cfg.Flows.Look(ctx)
	var deleted conntrack.Deleted
	if err == nil {
		translations := nat.New(site, s.generation.NatHooks(f), native.NatHooks(s.native, f))
		if translations.Empty() {
			return
		}
		deleted, err = d.cfg.Flows.Sweep(ctx, f, since, translations)
	}
	d.cfg.Metrics.ObserveSweep(f, deleted, err != nil)
	if err != nil {
		severity.Warnings(log).Error(err, "Flows that began while the rules were missing may stay untranslated until they end", "family", f)
	}
	if count := deleted.ByProtocol; len(count) > 0 {
		log.Info("Ended flows that began while the rules were missing; their next packets are translated", "family", f,
			"tcp", count[nat.TCP], "udp", count[nat.UDP], "sctp", count[nat.SCTP], "unmasqueraded", deleted.Unmasqueraded)
	}
}

// threadCPU returns the CPU time that the calling thread has used; 0 where CPU time does not
// count.
func (d *Daemon) threadCPU() time.Duration {
	if d.cfg.CPU == nil {
		return 0
	}
	return here.ThreadCPU()
}
