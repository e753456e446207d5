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
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

var errLeadsOut = errors.New("a word rule: of --protect names rules that lead into chains which no word names: name these chains instead")

// leadsOut holds the rules of built-in chains that a word of --protect names in vain.
type leadsOut struct {
	read  map[rules.TableID]uint64       // digests of the reads that were looked at
	jumps map[rules.TableID][]rules.Jump // by table
	shown []api.LeadsOut                 // the first ones
}

// takeLeadsOut notes the rules that --protect names in vain, when a table was read again. The
// log names each once.
func (d *Daemon) takeLeadsOut(ctx context.Context, st *state) {
	l, moved := &st.leadsOut, false
	p := d.protection(st)
	var news []string
	for id, ts := range st.tables() {
		if ts.standing.digest == 0 || l.read[id] == ts.standing.digest {
			continue
		}
		if l.read == nil {
			l.read, l.jumps = map[rules.TableID]uint64{}, map[rules.TableID][]rules.Jump{}
		}
		known := l.jumps[id]
		l.read[id], l.jumps[id], moved = ts.standing.digest, p.LeadingOut(ts.standing.table, canary.IsMark), true
		for _, h := range l.jumps[id] {
			if !slices.ContainsFunc(known, h.Same) {
				news = append(news, id.String()+" "+h.String())
			}
		}
	}
	if !moved {
		return
	}
	l.shown = nil
	for id := range st.tables() {
		for _, h := range l.jumps[id] {
			out := api.LeadsOut{Family: id.Family, Table: id.Name, Chain: h.Chain, To: h.Rule.Target}
			if len(l.shown) < api.LeadsOutShown && !slices.Contains(l.shown, out) {
				l.shown = append(l.shown, out)
			}
		}
	}
	if len(news) > 0 {
		severity.Warnings(klog.FromContext(ctx)).Error(errLeadsOut, "Rules that --protect names are NOT guarded",
			"rules", len(news), "first", strings.Join(news[:min(len(news), flushes.NamesKept)], "; "))
	}
}
