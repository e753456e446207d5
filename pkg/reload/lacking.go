package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Supplier has what rules lean on beside chains: *iptables.Sets or
// *iptablestest.Sets. What exists it never changes.
type Supplier interface {
	// Names returns the names of all ipsets.
	Names(context.Context) ([]string, error)
	// Create makes an ipset; the error is iptables.ErrSetStands if there is one.
	Create(context.Context, iptables.Set) error
	// Account makes an nfacct object unless there is one.
	Account(ctx context.Context, name string) error
}

// lacking is what rules lean on that is missing and cannot be had, by name with
// the reason, and rules that were found to be refused, by their text.
type lacking struct {
	sets, accounts, refused map[string]string
}

// supply makes the ipsets and nfacct objects that the tasks' tables lean on and
// that are missing, and returns those that cannot be had. Where it cannot be told
// what is missing, nothing is said to be: the restore will tell.
func (r run) supply(ctx context.Context, tasks []tableTask) lacking {
	lack := lacking{sets: map[string]string{}, accounts: map[string]string{}}
	if r.Supplier == nil || !r.act.rules {
		return lack
	}
	var needs rules.Needs
	for _, task := range tasks {
		if task.finding.Verdict.Loss() || len(task.held) > 0 || r.act.all {
			n := task.want.Section.Needs()
			needs.Sets, needs.Accounts = union(needs.Sets, n.Sets), union(needs.Accounts, n.Accounts)
		}
	}
	for _, name := range needs.Accounts {
		if err := r.Supplier.Account(ctx, name); err != nil {
			lack.accounts[name] = err.Error()
		}
	}
	if len(needs.Sets) == 0 {
		return lack
	}
	names, err := r.Supplier.Names(ctx)
	if err != nil {
		return lack
	}
	have := make(map[string]bool, len(names))
	for _, name := range names {
		have[name] = true
	}
	for _, name := range needs.Sets {
		if err := r.supplySet(ctx, name, have, nil); err != nil {
			lack.sets[name] = err.Error()
		}
	}
	return lack
}

// supplySet makes a set that is missing, and before it the sets that are members
// of it. within are the sets on the way to it.
func (r run) supplySet(ctx context.Context, name string, have map[string]bool, within []string) error {
	if have[name] {
		return nil
	}
	set, captured := r.job.Sets[name]
	if !captured || slices.Contains(within, name) {
		return fmt.Errorf("ipset %s is missing, and its members are not known", name)
	}
	for _, member := range set.Lists() {
		if err := r.supplySet(ctx, member, have, append(within, name)); err != nil {
			return fmt.Errorf("ipset %s is missing: %w", name, err)
		}
	}
	if err := r.Supplier.Create(ctx, set); err != nil && !errors.Is(err, iptables.ErrSetStands) {
		return fmt.Errorf("ipset %s is missing: %w", name, err)
	}
	have[name] = true
	return nil
}

// holds reports whether the jump is in quarantine.
func (t *tableTask) holds(h rules.Jump) bool {
	return slices.ContainsFunc(t.held, func(held Held) bool { return held.is(h.Chain, h.Rule) })
}

// troubled reports whether a rule cannot be written as it is.
func (t *tableTask) troubled(r rules.Rule) bool {
	if slices.Contains(t.want.Section.DependsOn, r.Target) && t.seen.Table.Chain(r.Target) == nil {
		return true
	}
	if _, refused := t.lacking.refused[r.Spec]; refused {
		return true
	}
	if _, opaque := r.Opaque(); opaque {
		return true
	}
	if len(t.lacking.sets) == 0 && len(t.lacking.accounts) == 0 {
		return false
	}
	return missing(t.lacking.sets, r.Needs().Sets) != "" || missing(t.lacking.accounts, r.Needs().Accounts) != ""
}

// missing returns the first of the names that is in the list.
func missing(list map[string]string, names []string) string {
	for _, name := range names {
		if _, ok := list[name]; ok {
			return name
		}
	}
	return ""
}

// admit returns the rule as it can be written, or false and puts it into the
// plan's quarantine. A match that only counts is dropped rather than the rule,
// but not from what somebody declared.
func (t *tableTask) admit(chain string, r rules.Rule, plan *tablePlan) (rules.Rule, bool) {
	hold := func(h Held) (rules.Rule, bool) {
		h.Chain, h.Rule = chain, r
		plan.quarantined = append(plan.quarantined, h)
		return r, false
	}
	if reason, opaque := r.Opaque(); opaque {
		return hold(Held{Reason: reason + "; its owner has to put it back"})
	}
	if slices.Contains(t.want.Section.DependsOn, r.Target) && t.seen.Table.Chain(r.Target) == nil {
		return hold(Held{Reason: fmt.Sprintf("chain %s is missing", r.Target), Lacks: r.Target})
	}
	if reason, refused := t.lacking.refused[r.Spec]; refused {
		return hold(Held{Reason: reason, Refused: true})
	}
	needs := r.Needs()
	if name := missing(t.lacking.sets, needs.Sets); name != "" {
		return hold(Held{Reason: t.lacking.sets[name]})
	}
	for name := missing(t.lacking.accounts, needs.Accounts); name != ""; name = missing(t.lacking.accounts, r.Needs().Accounts) {
		if t.claimed(chain) || t.claimed(r.Target) {
			return hold(Held{Reason: t.lacking.accounts[name]})
		}
		plan.weakened = append(plan.weakened, Held{Chain: chain, Rule: r, Reason: t.lacking.accounts[name]})
		lighter := r.WithoutAccount(name)
		if lighter.Spec == r.Spec {
			return hold(Held{Reason: t.lacking.accounts[name]}) // said in words that are not iptables-save's
		}
		r = lighter
	}
	return r, true
}

// keepHeld keeps in quarantine what the plan does not decide anew.
func (p *tablePlan) keepHeld(task tableTask) {
	for _, h := range task.held {
		decided := slices.ContainsFunc(slices.Concat(p.wrote, p.merged), func(c rules.Chain) bool { return c.Name == h.Chain })
		again := slices.ContainsFunc(p.quarantined, func(q Held) bool { return q.is(h.Chain, h.Rule) })
		placed := slices.ContainsFunc(p.jumps, func(k rules.Jump) bool { return h.is(k.Chain, k.Rule) })
		if !decided && !again && !placed {
			p.quarantined = append(p.quarantined, h)
		}
	}
	p.section = without(p.section, p.quarantined)
}
