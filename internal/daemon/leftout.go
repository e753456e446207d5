package daemon

import (
	"context"
	"errors"
	"fmt"
	"github.com/canaryd/canaryd/pkg/tableid"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A LeftOut is a chain that is not guarded, because there are more rules than canaryd keeps.
type LeftOut struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"` // a built-in one: the jumps in it are not guarded
	Rules  int             `json:"rules"` // that it holds, as of the last count
}

// String says it for people.
func (l LeftOut) String() string {
	return fmt.Sprintf("%s %s %s: it holds %d rules", l.Family, l.Table, l.Chain, l.Rules)
}

// leftOutShown is how many chains a Status names; the gauge counts all.
const leftOutShown = 100

var errTooMany = errors.New("there are more rules than canaryd keeps of a family: raise --max-rules and the memory limit, or remove what nobody needs")

// noteLeftOut takes down which chains the last read left out. The log names them once.
func (d *Daemon) noteLeftOut(ctx context.Context, st *state) {
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
		log.Error(errTooMany, "Chains are left out: their rules are NOT guarded", "chains", len(more), "largest", largest(more))
	}
	if again := news(st.leftOut, now); len(again) > 0 {
		log.Info("Chains are no longer left out", "chains", len(again), "names", largest(again), "stillLeftOut", len(now))
	}
	st.leftOut = now
	counts := map[rules.TableID]int{}
	for _, l := range now {
		counts[l.Family.Table(l.Table)]++
	}
	for f := range st.families {
		for _, t := range rules.Guarded() {
			d.cfg.Metrics.SetLeftOut(f, t, counts[f.Table(t)])
		}
	}
}

// largest names the first few of a list.
func largest(list []iptables.LeftOut) string {
	var names []string
	for _, l := range list[:min(len(list), namesKept)] {
		names = append(names, LeftOut(l).String())
	}
	return strings.Join(names, "; ")
}

// leftOutNow returns what is left out as a Status has it.
func (st *state) leftOutNow() []LeftOut {
	var list []LeftOut
	for _, l := range st.leftOut[:min(len(st.leftOut), leftOutShown)] {
		list = append(list, LeftOut(l))
	}
	return list
}

// leftOutText counts chains that are left out, of which a Status has the first only.
func leftOutText(n int) string {
	switch {
	case n == 1:
		return "one chain"
	case n >= leftOutShown:
		return fmt.Sprintf("%d chains or more", n)
	default:
		return fmt.Sprintf("%d chains", n)
	}
}

// NotGuarded says in a few words what is in force and not guarded; empty if all is.
func (s Status) NotGuarded() string {
	switch n := len(s.LeftOut); n {
	case 0:
		return ""
	case 1:
		return "the rules of one chain are not guarded"
	default:
		return "the rules of " + leftOutText(n) + " are not guarded"
	}
}
