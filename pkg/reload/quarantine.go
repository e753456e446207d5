package reload

import (
	"fmt"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A QuarantinedRule is a rule of the generation that cannot be put back yet. A replay leaves it
// out, so that the rest of its table comes back. It stays in the generation.
type QuarantinedRule struct {
	Chain string     `json:"chain"` // of a jump: the built-in chain
	Rule  rules.Rule `json:"rule"`
	// Reason says in words why; it may quote an error of iptables.
	Reason string `json:"reason"`
	// MissingChain is another owner's chain that the rule needs; empty if the reason is a different
	// one.
	MissingChain string `json:"lacks,omitempty"`
	// Refused means that the kernel refused the rule in a trial. A replay does not try it again in
	// the middle of an outage; Readmit does.
	Refused bool `json:"refused,omitempty"`
	// Misread means that iptables-restore made another rule of its text. It is never written again:
	// each try would put the other rule into force until the proof.
	Misread bool `json:"misread,omitempty"`
	// Waits means that the rule itself can be had. It waits for a rule before it: without that one
	// it would meet packets that the complete rules keep from it.
	Waits bool `json:"waits,omitempty"`
}

// A Quarantine holds the quarantined rules of each table. It is a value.
type Quarantine map[rules.TableID][]QuarantinedRule

// With returns q with other rules for one table.
func (q Quarantine) With(id rules.TableID, list []QuarantinedRule) Quarantine {
	next := tableid.With(q, id, list)
	if len(list) == 0 {
		delete(next, id)
	}
	return next
}

// MarshalJSON writes rules by family and table.
func (q Quarantine) MarshalJSON() ([]byte, error) { return tableid.Marshal(q) }

// UnmarshalJSON reads what MarshalJSON wrote.
func (q *Quarantine) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, q) }

// Count returns how many rules are quarantined.
func (q Quarantine) Count() int { return countAll(q) }

// Standing returns the chains that quarantined rules waited for and that the snapshot shows.
func (q Quarantine) Standing(snapshot iptables.Snapshot) map[iptables.Place]bool {
	there := map[iptables.Place]bool{}
	for t, list := range tableid.Of(q, snapshot.Family) {
		for _, h := range list {
			if h.MissingChain != "" && snapshot.Tables[t].Chain(h.MissingChain) != nil {
				there[iptables.Place{Table: t, Chain: h.MissingChain}] = true
			}
		}
	}
	return there
}

// Supplement returns what a read showed of one table as if its quarantined rules stood, so that
// learning does not forget them. It also returns the quarantine without rules whose chain its owner
// has written since, because the owner's word counts. want is the table's generation.
func (q Quarantine) Supplement(f rules.Family, t rules.TableName, want, seen rules.Section) (rules.Section, Quarantine) {
	list := q[f.Table(t)]
	if len(list) == 0 {
		return seen, q
	}
	short, held := without(want, list), heldRules(list)
	kept := map[string]bool{} // chains that stand as the replay left them
	seen.Chains = slices.Clone(seen.Chains)
	for i, c := range seen.Chains {
		left, ok := short.Chain(c.Name)
		if full, _ := want.Chain(c.Name); ok && len(full.Rules) > len(left.Rules) && rules.EqualRules(left.Rules, c.Rules) {
			seen.Chains[i], kept[c.Name] = full, true
		}
	}
	for _, h := range list {
		if h.Rule.LeftOut() && !rules.Builtin(t, h.Chain) {
			i := slices.IndexFunc(seen.Chains, func(c rules.Chain) bool { return c.Name == h.Chain })
			full, wanted := want.Chain(h.Chain)
			switch {
			case !wanted || i >= 0 && len(seen.Chains[i].Rules) > 0: // its owner wrote the chain
			case i < 0:
				seen.Chains, kept[h.Chain] = append(seen.Chains, full), true
			default:
				seen.Chains[i], kept[h.Chain] = full, true
			}
		}
	}
	missing := func(h rules.Jump) bool {
		if h.LeftOut() && slices.ContainsFunc(seen.Jumps, func(o rules.Jump) bool { return o.Chain == h.Chain }) {
			return false // its chain has jumps again
		}
		return !slices.ContainsFunc(seen.Jumps, h.Same) && held.has(h.Chain, h.Rule)
	}
	var still []QuarantinedRule
	for _, h := range list {
		jump := rules.Builtin(t, h.Chain)
		if kept[h.Chain] || jump && slices.ContainsFunc(want.Jumps, func(k rules.Jump) bool { return h.matches(k.Chain, k.Rule) && missing(k) }) {
			still = append(still, h)
		}
	}
	seen.Jumps = keepJumps(want.Jumps, seen.Jumps, missing)
	if len(kept) > 0 {
		seen.DependsOn = union(want.DependsOn, seen.DependsOn)
	}
	return seen, q.With(f.Table(t), still)
}

// refusedOf returns the refused rules of a list, by text with the reason.
func refusedOf(list []QuarantinedRule) map[string]string {
	refused := map[string]string{}
	for _, h := range list {
		if h.Refused {
			refused[h.Rule.Spec] = h.Reason
		}
	}
	return refused
}

// matches reports whether h is this rule of this chain.
func (h QuarantinedRule) matches(chain string, r rules.Rule) bool {
	return h.Chain == chain && h.Rule.Spec == r.Spec
}

// In reports whether a list has the rule.
func (h QuarantinedRule) In(list []QuarantinedRule) bool { return heldRules(list).has(h.Chain, h.Rule) }

// Stands reports whether a section has the rule where it belongs.
func (h QuarantinedRule) Stands(s rules.Section) bool {
	c, _ := s.Chain(h.Chain)
	return slices.ContainsFunc(c.Rules, h.Rule.Equal) ||
		slices.ContainsFunc(s.Jumps, func(j rules.Jump) bool { return j.Chain == h.Chain && j.Rule.Equal(h.Rule) })
}

// A heldIndex counts quarantined rules by chain and text. A chain may hold a rule twice, of which
// only the second copy waits.
type heldIndex map[string]map[string]int

func heldRules(list []QuarantinedRule) heldIndex {
	held := heldIndex{}
	for _, h := range list {
		if held[h.Chain] == nil {
			held[h.Chain] = map[string]int{}
		}
		held[h.Chain][h.Rule.Spec]++
	}
	return held
}

func (x heldIndex) has(chain string, r rules.Rule) bool { return x[chain][r.Spec] > 0 }

// take counts one copy less of a rule. It returns false if none is left.
func (x heldIndex) take(chain string, r rules.Rule) bool {
	if !x.has(chain, r) {
		return false
	}
	x[chain][r.Spec]--
	return true
}

// without returns a section without its quarantined rules. Of several copies the last ones are
// quarantined, because what waits stands behind what does not.
func without(s rules.Section, list []QuarantinedRule) rules.Section {
	if len(list) == 0 {
		return s
	}
	held := heldRules(list)
	s.Chains = slices.Clone(s.Chains)
	// nothing of a chain that is left out is expected to stand, not even the chain
	s.Chains = slices.DeleteFunc(s.Chains, func(c rules.Chain) bool { return c.LeftOut() && held.has(c.Name, c.Rules[0]) })
	for i, c := range s.Chains {
		if held[c.Name] == nil {
			continue
		}
		left := make([]rules.Rule, 0, len(c.Rules))
		for _, r := range slices.Backward(c.Rules) {
			if !held.take(c.Name, r) {
				left = append(left, r)
			}
		}
		slices.Reverse(left)
		s.Chains[i].Rules = left
	}
	jumps := make([]rules.Jump, 0, len(s.Jumps))
	for _, h := range slices.Backward(s.Jumps) {
		if !held.take(h.Chain, h.Rule) {
			jumps = append(jumps, h)
		}
	}
	slices.Reverse(jumps)
	s.Jumps = jumps
	return s
}

// WithoutQuarantined returns what is learned without quarantined rules: an operator accepts that
// they are lost.
func (l Learned) WithoutQuarantined(q Quarantine) Learned {
	for id, list := range q {
		if s, known := l.Generation[id]; known {
			l.Generation = l.Generation.With(id, without(s, list))
		}
	}
	return l
}

// readmit plans to put back the quarantined rules that can be written by now.
func readmit(task tableTask, nonce canary.Nonce) *tablePlan {
	if len(task.quarantined) == 0 || task.seen.Err != nil || task.finding.Verdict.Loss() || task.finding.Verdict == canary.Unknown {
		return nil
	}
	short := without(task.want.Section, task.quarantined)
	task.finding = canary.Finding{Verdict: canary.Changed}
	task.readmit = map[string]bool{}
	for _, h := range task.quarantined {
		standing := task.seen.Table.Chain(h.Chain)
		left, ok := short.Chain(h.Chain)
		task.readmit[h.Chain] = ok && standing != nil && rules.EqualRules(standing.Rules, left.Rules)
		for _, jump := range task.want.Section.Jumps {
			if h.matches(jump.Chain, jump.Rule) {
				task.finding.Jumps = append(task.finding.Jumps, jump)
			}
		}
	}
	plan := composeReplay(task, nonce)
	still := heldRules(plan.quarantined)
	if plan.script.Empty() || !slices.ContainsFunc(task.quarantined, func(h QuarantinedRule) bool { return !still.take(h.Chain, h.Rule) }) {
		return nil
	}
	return plan
}

// reasonsOf returns the reasons of quarantined rules in one line, each reason once.
func reasonsOf(list []QuarantinedRule) string {
	var reasons []string
	for _, h := range list {
		if !slices.Contains(reasons, h.Reason) {
			reasons = append(reasons, h.Reason)
		}
	}
	const shown = 5
	if n := len(reasons); n > shown {
		reasons = append(reasons[:shown], fmt.Sprintf("and %d more", n-shown))
	}
	return strings.Join(reasons, "; ")
}
