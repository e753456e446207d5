package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Tracker knows the node's flows: conntrack.Kernel, but for tests.
type Tracker interface {
	Look() (rules.Site, error)
	Sweep(ctx context.Context, f rules.Family, since time.Time, nat conntrack.Rules) (conntrack.Deleted, error)
}

// sweepTime is what one sweep may take; with 100,000 flows it took 0.2 s, 0.4 s
// where the kernel cannot filter (before Linux 5.15). It is not cut short when the
// daemon stops: the rules are back, and nothing else would look.
const sweepTime = 4 * time.Second

// A sweep is what follows a replay of nat: flows that began while its rules
// were missing are ended, so that the next packet of each is translated.
type sweep struct {
	// since is when the rules of each family were seen complete last.
	since      map[rules.Family]time.Time
	generation rules.Generation
}

// sweepAfter asks for a sweep of a family if its nat was lost and is proved to
// be back. It never waits: what is asked for while a sweep runs is done
// afterwards, by the newest generation.
//
// intact is when nat was last seen complete. Its rules may be missing from then
// on: a flush takes effect before anything shows it, nearly a second before on a
// busy node, so its flows began before it was noticed.
func (d *Daemon) sweepAfter(g rules.Generation, f rules.Family, result reload.FamilyResult, intact time.Time) {
	nat, ok := result.Tables[rules.Nat]
	if d.cfg.Flows == nil || !ok || !nat.Proved || !nat.Finding.Verdict.Loss() || nat.Finding.OnlyDrilled() {
		return
	}
	next := sweep{since: map[rules.Family]time.Time{f: intact}, generation: g}
	select {
	case waiting := <-d.sweeps:
		for f, at := range waiting.since {
			if own, ok := next.since[f]; !ok || at.Before(own) {
				next.since[f] = at
			}
		}
	default:
	}
	d.sweeps <- next // the loop alone sends, and there is room for one
}

// runSweeps sweeps until sweeps is closed. It has a goroutine of its own, so that the answer
// to the next flush does not wait for it.
func (d *Daemon) runSweeps(ctx context.Context) {
	for s := range d.sweeps {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
		for _, f := range rules.Families() {
			if since, ok := s.since[f]; ok {
				d.sweep(ctx, f, since, s.generation)
			}
		}
		cancel()
	}
}

func (d *Daemon) sweep(ctx context.Context, f rules.Family, since time.Time, g rules.Generation) {
	log := klog.FromContext(ctx)
	site, err := d.cfg.Flows.Look()
	var deleted conntrack.Deleted
	if err == nil {
		nat := g.Translations(f, site)
		if nat.Empty() {
			return
		}
		deleted, err = d.cfg.Flows.Sweep(ctx, f, since, nat)
	}
	d.cfg.Metrics.ObserveSweep(f, deleted, err != nil)
	if err != nil {
		log.Error(err, "Flows that began while the rules were missing may stay untranslated until they end", "family", f)
	}
	if count := deleted.ByProtocol; len(count) > 0 {
		log.Info("Ended flows that began while the rules were missing; their next packets are translated", "family", f,
			"tcp", count[rules.TCP], "udp", count[rules.UDP], "sctp", count[rules.SCTP], "unmasqueraded", deleted.Unmasqueraded)
	}
}
