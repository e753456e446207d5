package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

var errTooMany = errors.New("there are more rules than canaryd keeps of a family: raise --max-rules and the memory limit, or remove rules that are not needed")

// takeLeftOut notes the chains that the last read left out, because there are too many rules,
// for status and metrics. The log names them once.
func (d *Daemon) takeLeftOut(ctx context.Context, st *state) {
	if d.cfg.LeftOut == nil {
		return
	}
	now := d.cfg.LeftOut()
	place := func(l iptables.LeftOut) iptables.LeftOut { l.Rules = 0; return l }
	news := func(list, than []iptables.LeftOut) []iptables.LeftOut {
		known := make(map[iptables.LeftOut]bool, len(than))
		for _, l := range than {
			known[place(l)] = true
		}
		return slices.DeleteFunc(slices.Clone(list), func(l iptables.LeftOut) bool { return known[place(l)] })
	}
	log := klog.FromContext(ctx)
	if more := news(now, st.leftOut); len(more) > 0 {
		severity.Warnings(log).Error(errTooMany, "Chains are left out: their rules are NOT guarded", "chains", len(more), "largest", largest(more))
	}
	if again := news(st.leftOut, now); len(again) > 0 {
		severity.Notices(log).Info("Chains are no longer left out", "chains", len(again), "names", largest(again), "stillLeftOut", len(now))
	}
	st.leftOut = now
	counts := map[rules.TableID]int{}
	for _, l := range now {
		counts[l.Family.Table(l.Table)]++
	}
	for id := range st.tables() {
		d.cfg.Metrics.SetLeftOut(id.Family, id.Name, counts[id])
	}
}

// largest names the first few of a list.
func largest(list []iptables.LeftOut) string {
	var names []string
	for _, l := range list[:min(len(list), flushes.NamesKept)] {
		names = append(names, api.LeftOut(l).String())
	}
	return strings.Join(names, "; ")
}

// leftOutNow returns the chains that are left out, for a Status.
func (st *state) leftOutNow() []api.LeftOut {
	var list []api.LeftOut
	for _, l := range st.leftOut[:min(len(st.leftOut), api.LeftOutShown)] {
		list = append(list, api.LeftOut(l))
	}
	return list
}
