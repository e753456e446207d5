package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// kubeProxyCanary is the chain by whose absence from mangle kube-proxy learns
// of a flush; it then writes everything anew (k8s.io/kubernetes
// pkg/util/iptables Monitor, since 1.17).
const kubeProxyCanary = "KUBE-PROXY-CANARY"

// OtherOwner returns why chains that a declared source claims are somebody
// else's, or nothing: kube-proxy keeps its canary in every table that it writes.
func OtherOwner(snapshot iptables.Snapshot, claims func(chain string) bool) string {
	if claims == nil || !claims("KUBE-SERVICES") {
		return ""
	}
	for _, table := range protect.Tables() {
		if snapshot.Tables[table].Chain(kubeProxyCanary) != nil {
			return fmt.Sprintf("kube-proxy writes the chains that the manifest claims: its %s stands in %s %s", kubeProxyCanary, snapshot.Family, table)
		}
	}
	return ""
}

// owed reports whether kube-proxy is to have the last word: a replay bridged
// the gap with rules of before, the flush may have taken some that were too
// new to be known, or a saved mangle brought back its canary, by whose absence it was
// to learn of an earlier flush. What kube-proxy wrote itself since the flush is no sign that
// it missed nothing: a partial sync names the chains of those services only that
// changed after it.
func needsProxySync(result FamilyResult) bool {
	return result.Outcome == Raced || slices.ContainsFunc(protect.Tables(), func(t rules.TableName) bool {
		tr := result.Tables[t]
		missed := tr.flushed
		if t == rules.Mangle { // where it has its canary and nothing else
			missed = tr.restored
		}
		return tr.Proved && (tr.Wrote > 0 || missed)
	})
}

// nudge makes kube-proxy do its own full sync, by deleting its canary where a
// flush left it standing. One restore per table, mangle last, because its
// absence there is what kube-proxy looks for. It is not retried.
func nudge(ctx context.Context, s iptables.Session, f rules.Family, result FamilyResult) error {
	for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		if !slices.Contains(result.proxyCanary, table) {
			continue
		}
		// Declaring first makes -X safe if kube-proxy deletes it meanwhile.
		script := iptables.Script{
			Table:   table,
			Declare: []string{kubeProxyCanary},
			Steps:   []iptables.Step{{Verb: iptables.Drop, Chain: kubeProxyCanary}},
		}
		written := s.RestoreAnyway(ctx, iptables.Payload{f: {script}})
		if err := written[f].Err; err != nil {
			return fmt.Errorf("deleting %s from %s %s, so that kube-proxy syncs: %w", kubeProxyCanary, f, table, err)
		}
	}
	return nil
}

// ProxyStands reports whether the last read showed the canary by which kube-proxy
// can be asked for a full sync.
func (r FamilyResult) ProxyCanaryStands() bool { return slices.Contains(r.proxyCanary, rules.Mangle) }

// ProxyStands reports whether the canary stands by which kube-proxy can be asked for a
// full sync.
func ProxyCanaryStands(snapshot iptables.Snapshot) bool {
	return snapshot.Tables[rules.Mangle].Chain(kubeProxyCanary) != nil
}

// Nudge makes kube-proxy do a full sync of a family, if its canary stands.
func (r Replayer) Nudge(ctx context.Context, f rules.Family) error {
	s, err := r.Kernel.Begin(ctx)
	if err != nil {
		return fmt.Errorf("beginning a guarded write: %w", err)
	}
	snapshot, err := s.Read(ctx, f)
	if err == nil {
		err = nudge(ctx, s, f, FamilyResult{proxyCanary: tablesWith(snapshot, kubeProxyCanary)})
	}
	return errors.Join(err, s.Close())
}

func tablesWith(snapshot iptables.Snapshot, chain string) []rules.TableName {
	var found []rules.TableName
	for _, table := range protect.Tables() {
		if snapshot.Tables[table].Chain(chain) != nil {
			found = append(found, table)
		}
	}
	return found
}

// undouble plans to leave of each of the task's doubled jumps as many as the
// generation has.
func removeDoubles(task tableTask, _ canary.Nonce) *tablePlan {
	if v := task.finding.Verdict; v != canary.Intact && v != canary.Changed {
		return nil
	}
	script := composeRemoveDoubles(task, task.doubled)
	if script.Empty() {
		return nil
	}
	return &tablePlan{table: task.table, mark: task.want.Mark, script: script}
}

// composeUndouble deletes copies of some jumps by index, the last one first so that
// the indexes before it stay true.
func composeRemoveDoubles(task tableTask, jumps []rules.Jump) iptables.Script {
	script := iptables.Script{Table: task.table}
	if task.seen.Err != nil || task.seen.Table == nil {
		return script
	}
	for _, chain := range task.want.Section.JumpChains(task.table) {
		left := map[string]int{}
		for _, h := range task.want.Section.Jumps {
			if h.Chain == chain && slices.ContainsFunc(jumps, h.Same) {
				left[h.Rule.Spec]++
			}
		}
		c := task.seen.Table.Chain(chain)
		if c == nil {
			continue
		}
		var extra []iptables.Step
		for i, rule := range c.Rules {
			n, wanted := left[rule.Spec]
			switch {
			case !wanted:
			case n > 0:
				left[rule.Spec]--
			default:
				extra = append(extra, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
		slices.Reverse(extra)
		script.Steps = append(script.Steps, extra...)
	}
	return script
}
