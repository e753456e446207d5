package reload

import (
	"context"
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// RemoveContainers removes the rules of job.GoneContainers, and the chains that only they use. A
// replay put those rules back while, or before, their container was deleted. A result is Skipped if
// none of the rules is in force.
func (r Replayer) RemoveContainers(ctx context.Context, job Job) (Result, error) {
	plan := func(task tableTask, _ canary.Nonce) *tablePlan { return removeContainers(task, job.GoneContainers) }
	return r.each(ctx, job, action{plan: plan})
}

// removeContainers plans the removal for one table, if its marks are in force: a flushed table
// is replayed first. It returns nil if no rule of the containers is left.
func removeContainers(task tableTask, gone map[protect.Attachment]bool) *tablePlan {
	if v := task.finding.Verdict; task.table != rules.Nat || v != canary.Intact && v != canary.Changed {
		return nil
	}
	leaves := func(r rules.Rule) bool {
		a, ok := protect.AttachmentOf(r)
		return ok && gone[a]
	}
	plan := task.plan(task.want.Mark)
	s := &plan.steps
	left := protect.Detach(task.seen.Section, gone)
	for _, h := range task.seen.Section.Jumps {
		if leaves(h.Rule) && !slices.ContainsFunc(left.Jumps, h.Same) {
			s.remove = append(s.remove, deleteRule(h.Chain, h.Rule))
		}
	}
	for _, c := range task.seen.Section.Chains {
		kept, stays := left.Chain(c.Name)
		switch {
		case !stays && !referencedByOthers(task, c.Name, leaves):
			plan.removed = append(plan.removed, c.Name)
		case !stays || len(kept.Rules) < len(c.Rules):
			for _, r := range c.Rules {
				if leaves(r) {
					s.remove = append(s.remove, deleteRule(c.Name, r))
				}
			}
		}
	}
	plan.dropRemoved()
	if plan.scripted().script.Empty() {
		return nil
	}
	return plan
}

// referencedByOthers reports whether a remaining rule references a chain; leaves reports which
// rules are removed. The kernel would refuse to delete that chain, and the table's whole
// transaction with it. So removeContainers keeps it.
func referencedByOthers(task tableTask, chain string, leaves func(rules.Rule) bool) bool {
	return slices.ContainsFunc(task.seen.Table.Chains, func(c rules.Chain) bool {
		return slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain && !leaves(r) })
	})
}

// WithoutAttachments returns the learned generation without the rules of these containers.
func (l Learned) WithoutAttachments(gone map[protect.Attachment]bool) Learned {
	l.Generation = protect.DetachAll(l.Generation, gone)
	return l
}

// KeepContainers returns a read of nat, with all rules that want has of the containers in kept
// added. canaryd does not know yet which process removed them, so the daemon must not learn the
// removal.
func KeepContainers(want, seen rules.Section, kept map[protect.Attachment]bool) rules.Section {
	if len(kept) == 0 {
		return seen
	}
	own, taken := map[string]bool{}, []rules.Jump(nil)
	for a, lack := range protect.Lacking(want, seen, maps.Keys(kept)) {
		if kept[a] {
			taken = append(taken, lack.Rules...)
			for _, name := range lack.Chains {
				own[name] = true
			}
		}
	}
	if len(own)+len(taken) == 0 {
		return seen
	}
	isTaken := func(h rules.Jump) bool { return slices.ContainsFunc(taken, h.Same) }
	seen.Chains = slices.Clone(seen.Chains)
	for _, c := range want.Chains {
		i := slices.IndexFunc(seen.Chains, func(o rules.Chain) bool { return o.Name == c.Name })
		lacks := slices.ContainsFunc(taken, func(h rules.Jump) bool { return h.Chain == c.Name })
		switch {
		case !own[c.Name] && !lacks:
			continue
		case i < 0:
			i = len(seen.Chains)
			seen.Chains = append(seen.Chains, rules.Chain{Name: c.Name})
		}
		if own[c.Name] {
			seen.Chains[i].Rules = c.Rules
			continue
		}
		var merged []rules.Rule
		for _, h := range keepJumps(asJumps(c), asJumps(seen.Chains[i]), isTaken) {
			merged = append(merged, h.Rule)
		}
		seen.Chains[i].Rules = merged
	}
	seen.Jumps = keepJumps(want.Jumps, seen.Jumps, isTaken)
	seen.DependsOn = seen.NotLedTo(union(want.DependsOn, seen.DependsOn))
	return seen
}

// asJumps returns a chain's rules in the form of jumps, so that keepJumps can merge two chains.
func asJumps(c rules.Chain) []rules.Jump {
	list := make([]rules.Jump, 0, len(c.Rules))
	for _, r := range c.Rules {
		list = append(list, rules.Jump{Chain: c.Name, Rule: r})
	}
	return list
}
