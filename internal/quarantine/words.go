package quarantine

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A part is a rule or a part of a native table: all that is said about it, and its record.
type part struct {
	api.Quarantined
	key         any // equal for the same part of a table
	next        string
	flush, ends *string
}

// parts returns the parts of a table. This is where the kinds of table differ.
func (t *table) parts(id tableid.TableID) []part {
	type key struct {
		chain, text string
		rule        rules.Key
	}
	list := make([]part, 0, len(t.rules)+len(t.held))
	for i := range t.rules {
		h := &t.rules[i]
		p := part{api.QuarantinedOf(id, *h), key{chain: h.Chain, rule: h.Rule.Key()}, tried, &h.Flush, &h.Ends}
		if _, opaque := h.Rule.Opaque(); opaque && !h.Refused {
			p.next = "its owner has to put it back"
		}
		list = append(list, p)
	}
	for i := range t.held {
		h := &t.held[i]
		p := part{api.HeldOf(id, *h), key{chain: h.Name, text: h.Kind.String() + h.Text}, tried, &h.Flush, &h.Ends}
		if h.Fleeting {
			p.next = "its time is running out, and it is not tried again"
		}
		list = append(list, p)
	}
	return list
}

const tried = "it is tried again"

// A change is a change of one table's list, for the log.
type change struct {
	id           tableid.TableID
	by           Cause
	fresh, left  []part
	back, remain int // how many of left stand, and how many parts remain
}

// Take logs the changes since the last call, and returns the flushes that lack no part any more.
func (s *State) Take(ctx context.Context) []Ended {
	for _, c := range s.said {
		c.log(klog.FromContext(ctx))
	}
	ended := s.ended
	s.said, s.ended = nil, nil
	return ended
}

// log logs a change. It names the first parts, and counts the others.
func (c change) log(log klog.Logger) {
	log = log.WithValues("table", api.Quarantined{Family: c.id.Family, Table: c.id.Name, Native: c.native()}.TableName())
	missing, waiting := split(c.fresh)
	for _, p := range missing[:min(flushes.NamesKept, len(missing))] {
		severity.Errors(log).Info("A part of a table is in quarantine: it could not be put back", "part", p.Part(), "reason", p.Reason, "next", p.next)
	}
	if more := len(missing) - flushes.NamesKept; more > 0 {
		severity.Errors(log).Info("More parts of a table are in quarantine", "parts", more)
	}
	chains := api.WaitingChains(waiting)
	for _, w := range chains[:min(flushes.NamesKept, len(chains))] {
		severity.Errors(log).Info("Rules of a chain wait, because missing rules decide which packets reach them", "chain", w.Chain, "rules", w.Rules,
			"reason", w.Reason, "next", "they are put back in their places when those are back")
	}
	back := c.back
	switch notice := severity.Notices(log); c.by {
	case Operator:
		for _, p := range c.left[:min(flushes.NamesKept, len(c.left))] {
			notice.Info("An operator has accepted that a part of a table in quarantine is lost", "part", p.Part(), "reason", p.Reason)
		}
	case Owner:
		back = 0
		fallthrough
	case Replay:
		if back > 0 {
			notice.Info("Parts of a table were put back from quarantine", "parts", back, "left", c.remain)
		}
		if n := len(c.left) - back; n > 0 {
			notice.Info("Parts of a table left the quarantine: a write put them or others in their place, or removed them", "parts", n, "left", c.remain)
		}
	}
}

func (c change) native() bool {
	return slices.ContainsFunc(slices.Concat(c.fresh, c.left), func(p part) bool { return p.Native })
}

// split returns the parts that cannot be put back, and those that wait for them.
func split(list []part) (missing []part, waiting []api.Quarantined) {
	for _, p := range list {
		if p.Waits {
			waiting = append(waiting, p.Quarantined)
		} else {
			missing = append(missing, p)
		}
	}
	return missing, waiting
}

// Status puts the parts of all tables into a status. Parts that wait are last in the list, so that
// they hide no part that they wait for.
func (s *State) Status(to *api.Status) {
	var all []part
	for _, id := range s.ids() {
		all = append(all, s.tables[id].parts(id)...)
	}
	missing, waiting := split(all)
	var list []api.Quarantined
	for _, p := range missing {
		list = append(list, p.Quarantined)
	}
	to.ShowQuarantined(append(list, waiting...))
}
