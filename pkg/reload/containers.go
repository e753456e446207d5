package reload

import (
	"context"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// RemoveContainers removes the rules of job.GoneContainers, and the chains that only they use. A
// replay put those rules back while, or before, their container was deleted. A result is Skipped if
// none of the rules stand.
func (r Replayer) RemoveContainers(ctx context.Context, job Job) (Result, error) {
	plan := func(task tableTask, _ canary.Nonce) *tablePlan { return removeContainers(task, job.GoneContainers) }
	return r.each(ctx, job, action{plan: plan})
}

// removeContainers plans the removal for one table, if its marks stand: a flushed table is replayed
// first.
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

// referencedByOthers reports whether a remaining rule references a chain. The kernel would refuse
// to delete that chain, and the table's whole transaction with it.
func referencedByOthers(task tableTask, chain string, leaves func(rules.Rule) bool) bool {
	return slices.ContainsFunc(task.seen.Table.Chains, func(c rules.Chain) bool {
		return slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain && !leaves(r) })
	})
}

// WithoutAttachments returns what is learned without the rules of these containers.
func (l Learned) WithoutAttachments(gone map[protect.Attachment]bool) Learned {
	l.Generation = protect.DetachAll(l.Generation, gone)
	return l
}
