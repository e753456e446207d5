package daemon

import (
	"context"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ledTo holds the chains of other owners that are guarded because protected rules lead to them.
type ledTo struct {
	edition int         // of the generation; see state
	shown   []api.LedTo // the first ones
	logged  map[string]bool
}

// takeLedTo notes the led-to chains of other owners for the status, when the generation has
// changed. The log names each once.
func takeLedTo(ctx context.Context, st *state) {
	l := &st.ledTo
	if l.logged != nil && l.edition == st.generation.edition {
		return
	}
	want, named := st.want(), map[string]bool{}
	l.edition, l.shown = st.generation.edition, nil
	var news []string
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			section := want[f.Table(t)]
			for _, chain := range section.LedTo {
				led := api.LedTo{Family: f, Table: t, Chain: chain, From: leadsFrom(section, chain)}
				if len(l.shown) < api.LedToShown {
					l.shown = append(l.shown, led)
				}
				place := f.Table(t).String() + " " + chain
				if named[place] = true; !l.logged[place] {
					news = append(news, led.String())
				}
			}
		}
	}
	l.logged = named
	if len(news) > 0 {
		klog.FromContext(ctx).Info("Chains of other owners are guarded too, because protected rules lead to them",
			"chains", len(news), "names", strings.Join(news[:min(len(news), flushes.NamesKept)], "; "))
	}
}

// leadsFrom returns the first chain of a section with a rule that leads to a chain; "" if only
// a built-in chain has one.
func leadsFrom(s rules.Section, chain string) string {
	for _, c := range s.Chains {
		if slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain }) {
			return c.Name
		}
	}
	return ""
}
