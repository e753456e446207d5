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

// kubeProxyCanary is the chain that kube-proxy keeps in every table that it writes. When it is
// missing from mangle, kube-proxy takes that for a flush and does a full sync (k8s.io/kubernetes
// pkg/util/iptables Monitor, since 1.17).
const kubeProxyCanary = "KUBE-PROXY-CANARY"

// OtherOwner returns why chains that a declared source claims belong to a running kube-proxy, or
// "". The evidence is kube-proxy's canary in any guarded table.
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

// needsProxySync reports whether kube-proxy has to do a full sync after this result. It has to if
// the replay raced or wrote rules of before, because kube-proxy may have changed them since. It has
// to if the flush may have taken rules that were too new to be in the generation. And it has to if
// a saved mangle brought back its canary, which hides an earlier flush from it. Rules that
// kube-proxy wrote since the flush prove nothing: a partial sync writes only the services that
// changed.
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

// nudge makes kube-proxy do a full sync, by deleting its canary from the tables in which the proof
// saw it. Each table is a restore of its own, with mangle last, because kube-proxy looks there. It
// is not retried.
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

// ProxyCanaryStands reports whether the last read showed kube-proxy's canary in mangle. Only then
// can canaryd ask kube-proxy for a full sync.
func (r FamilyResult) ProxyCanaryStands() bool { return slices.Contains(r.proxyCanary, rules.Mangle) }

// ProxyCanaryStands reports whether a snapshot shows kube-proxy's canary in mangle.
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

// tablesWith returns the guarded tables in which a chain stands.
func tablesWith(snapshot iptables.Snapshot, chain string) []rules.TableName {
	var found []rules.TableName
	for _, table := range protect.Tables() {
		if snapshot.Tables[table].Chain(chain) != nil {
			found = append(found, table)
		}
	}
	return found
}

// removeDoubles plans to delete the copies of the task's doubled jumps that exceed the generation.
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

// composeRemoveDoubles returns the script that deletes surplus copies of jumps. It deletes by
// index, the last one first, so that the remaining indexes stay true.
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
