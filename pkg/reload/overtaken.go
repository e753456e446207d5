package reload

import (
	"context"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// overtaken reports whether another process wrote between the guarded read and a refusal. Such a
// refusal says nothing about the rules: a flusher that deletes chains during iptables-restore makes
// it refuse any of them. The family is then read and planned again, as after a stale write.
func (r run) overtaken(ctx context.Context, t *familyRun) bool {
	t.overtaken = false
	refused := refusalOf(t.answer.Err)
	if refused == nil || !r.action.writesRules { // a rotation is refused because of a flush, as it ought to be
		return false
	}
	t.overtaken = refused.Reason == iptables.ReasonMissingSet && r.setsGone(ctx, t) || r.tablesMoved(ctx, t)
	return t.overtaken
}

// tablesMoved reports whether a planned table differs both from the guarded read and from the
// plan. Then another process wrote, and a refusal proves nothing. A table that cannot be read
// shows nothing.
func (r run) tablesMoved(ctx context.Context, t *familyRun) bool {
	snapshot, err := r.session.Read(ctx, t.family)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(t.plans, func(p tablePlan) bool {
		now := Examiner{Protection: r.Protection}.seenOf(snapshot, p.table, p.quarantined)
		if now.Err != nil || sameTable(t.seen[p.table], now.Table) {
			return false
		}
		return proveTable(p, now, canary.Judge(p.want, now), false) != nil
	})
}

// sameTable reports whether two reads showed the same chains and rules, except for the trials'
// chains. If so, tablesMoved finds that no other process wrote. nil means that there is no
// table.
func sameTable(a, b *rules.Table) bool {
	if a == nil || b == nil || a == b {
		return a == b
	}
	chains := func(t *rules.Table) []rules.Chain {
		return slices.DeleteFunc(slices.Clone(t.Chains), func(c rules.Chain) bool { return slices.Contains(trialChains(), c.Name) })
	}
	return slices.EqualFunc(chains(a), chains(b), func(a, b rules.Chain) bool {
		return a.Name == b.Name && rules.EqualRules(a.Rules, b.Rules)
	})
}

// setsGone reports whether an ipset is missing that the plans counted on. Then the rule that
// names it is not to blame. A flusher destroys ipsets after the rules that name them, which
// moves no table.
func (r run) setsGone(ctx context.Context, t *familyRun) bool {
	if r.Supplier == nil || len(t.sets) == 0 {
		return false
	}
	names, err := r.Supplier.Names(ctx)
	if err != nil {
		return false
	}
	have := nameSet(names)
	return slices.ContainsFunc(t.sets, func(name string) bool { return !have[name] })
}

// acceptedFirst returns the families, with the refused ones last. To find the cause of a refusal
// may take seconds, and the others need not wait for it.
func acceptedFirst(runs []*familyRun) []*familyRun {
	order := slices.Clone(runs)
	refused := func(t *familyRun) int {
		if refusalOf(t.answer.Err) != nil {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(order, func(a, b *familyRun) int { return refused(a) - refused(b) })
	return order
}
