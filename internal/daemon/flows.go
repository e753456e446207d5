package daemon

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Tracker knows the node's flows: conntrack.Kernel, but for tests.
type Tracker interface {
	Look() (rules.Site, error)
	DeleteUntranslated(ctx context.Context, f rules.Family, translated func(rules.Flow) bool) (conntrack.Deleted, error)
}

// sweepTime is what one sweep may take; 100,000 flows took 0.2 s. It is not cut
// short when the daemon stops: the rules are back, and nobody else would look.
const sweepTime = 4 * time.Second

// A sweep is what follows a replay of nat: flows that began while its rules
// were missing are ended, so that the next packet of each is translated.
type sweep struct {
	families   []rules.Family
	generation rules.Generation
}

// sweepAfter asks for a sweep of the families whose nat was lost and is proved
// to be back. It never waits: what is asked for while a sweep runs is done
// afterwards, by the newest generation.
func (d *Daemon) sweepAfter(g rules.Generation, result reload.Result) {
	next := sweep{generation: g}
	for _, f := range rules.Families() {
		if nat, ok := result[f].Tables[rules.Nat]; ok && nat.Proved && nat.Finding.Verdict.Loss() {
			next.families = append(next.families, f)
		}
	}
	if d.cfg.Flows == nil || len(next.families) == 0 {
		return
	}
	select {
	case waiting := <-d.sweeps:
		next.families = slices.Compact(slices.Sorted(slices.Values(slices.Concat(waiting.families, next.families))))
	default:
	}
	d.sweeps <- next // the loop alone sends, and there is room for one
}

// runSweeps sweeps until sweeps is closed, beside the loop: the next flush
// does not wait for it.
func (d *Daemon) runSweeps(ctx context.Context) {
	for s := range d.sweeps {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sweepTime)
		for _, f := range s.families {
			d.sweep(ctx, f, s.generation)
		}
		cancel()
	}
}

func (d *Daemon) sweep(ctx context.Context, f rules.Family, g rules.Generation) {
	log := klog.FromContext(ctx)
	translations := g.Translations(f)
	if translations.Empty() {
		return
	}
	site, err := d.cfg.Flows.Look()
	var deleted conntrack.Deleted
	if err == nil {
		deleted, err = d.cfg.Flows.DeleteUntranslated(ctx, f, func(flow rules.Flow) bool { return translations.Translates(flow, site) })
	}
	d.cfg.Metrics.ObserveSweep(f, deleted, err != nil)
	if err != nil {
		log.Error(err, "Flows that began while the rules were missing may stay untranslated until they end", "family", f)
	}
	if udp, sctp := deleted[rules.UDP], deleted[rules.SCTP]; udp+sctp > 0 {
		log.Info("Ended flows that began while the rules were missing; their next packets are translated", "family", f, "udp", udp, "sctp", sctp)
	}
}
