package daemon

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An Origin says where a rule is declared.
type Origin struct {
	Source string // as metrics name it
	Where  string // file and line, or as much as is known
}

// refused has the declared rules that are refused.
type refused struct {
	list  reload.Refusals
	shown []api.Refused // as a Status has them
}

// refusalMeanings say why a rule is refused without quoting it.
var refusalMeanings = map[iptables.Reason]string{
	iptables.ReasonMissingChain: "it jumps to a chain or target that does not exist",
	iptables.ReasonMissingSet:   "it names an ipset that does not exist",
	iptables.ReasonParse:        "iptables does not understand it",
	iptables.ReasonIncompatible: "its table holds rules that iptables cannot read",
}

// takeRefused notes the declared rules for which a write was refused. Each new refusal is
// logged and counted as an error of its source.
func (d *Daemon) takeRefused(ctx context.Context, st *state, result reload.Result) {
	st.refused.list = st.refused.list.After(result)
	before := map[string]api.Refused{}
	for _, r := range st.refused.shown {
		before[keyOf(r)] = r
	}
	st.refused.shown = nil
	for id := range st.tables() {
		for _, refusal := range st.refused.list[id] {
			r := st.refusedOf(id, refusal)
			if old, known := before[keyOf(r)]; known {
				r.Since = old.Since
			} else {
				if r.Source != "" {
					d.cfg.Metrics.ObserveSourceError(r.Source)
				}
				klog.FromContext(ctx).Error(nil, "A declared rule is refused; its table keeps the rules that were in force, other tables follow the declaration",
					"family", r.Family, "table", r.Table, "chain", r.Chain, "rule", r.Rule, "where", r.Where, "reason", r.Reason)
			}
			st.refused.shown = append(st.refused.shown, r)
		}
		d.cfg.Metrics.SetDeclaredRefused(id.Family, id.Name, len(st.refused.list[id]))
	}
	if len(st.refused.shown) == 0 && len(before) > 0 {
		severity.Notices(klog.FromContext(ctx)).Info("No declared rule is refused any more")
	}
}

// keyOf returns a key by which takeRefused knows a refusal that it has logged.
func keyOf(r api.Refused) string {
	return fmt.Sprintf("%s %s %s\n%s\n%s", r.Family, r.Table, r.Chain, r.Rule, r.Where)
}

// refusedOf returns a refusal as the status has it, with the place where the rule is declared.
func (st *state) refusedOf(id rules.TableID, refusal reload.Refusal) api.Refused {
	r := api.Refused{
		Family: id.Family, Table: id.Name, Chain: refusal.Chain, Rule: refusal.Rule.Label(), Reason: refusal.Reason,
		Class: refusal.Class, Meaning: cmp.Or(refusalMeanings[refusal.Class], "iptables or the kernel refuses it"), Since: time.Now(),
	}
	if st.declared.now.Origin != nil {
		origin := st.declared.now.Origin(id.Family, id.Name, refusal.Chain, refusal.Rule)
		r.Source, r.Where = origin.Source, origin.Where
	}
	return r
}

// refuses reports whether something that is declared for the table is refused.
func (st *state) refuses(id rules.TableID) bool { return len(st.refused.list[id]) > 0 }

// takeFirst makes the first written rules the measure, although tables were refused. For
// refused tables it is their present content. An earlier run left that content, and it must
// come back after a flush until the declaration is mended.
func (st *state) takeFirst(result reload.Result) {
	if st.declared.inForce != nil || len(st.refused.shown) == 0 {
		return
	}
	g := rules.Generation{}
	for id := range st.tables() {
		tr := result[id.Family].Tables[id.Name]
		switch {
		case tr.Proved || tr.Read && !tr.Finding.Verdict.Loss() && tr.Finding.Verdict != canary.Unknown:
			g[id] = st.declared.now.Generation[id]
		case tr.Read && st.refuses(id):
			g[id], _ = tr.Section.Split(st.declared.now.Claims)
		default:
			return // this table is unknown
		}
	}
	st.declared.inForce = st.declared.now.with(g)
	st.generation.change(time.Now())
}

// addRefused adds the refused declared rules to a reply, because no replay brings them.
func (st *state) addRefused(reply *api.RestoreReply) {
	for _, r := range st.refused.shown {
		if reply.Outcomes[r.Family].Done() {
			reply.Outcomes[r.Family] = reload.Partial
		}
		detail := fmt.Sprintf("%s %s: declared rules are refused: %s: %s", r.Family, r.Table, r.Place(), cmp.Or(r.Reason, r.Meaning))
		reply.Detail = strings.TrimPrefix(reply.Detail+"; "+detail, "; ")
	}
}
