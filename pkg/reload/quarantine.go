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
// out, so that the rest of its table is restored. It stays in the generation.
type QuarantinedRule struct {
	Chain string     `json:"chain"` // of a jump: the built-in chain
	Rule  rules.Rule `json:"rule"`
	// Reason is the cause in words; it may quote an error of iptables.
	Reason string `json:"reason"`
	// MissingChain is another owner's chain that the rule needs; empty if there is a different
	// reason.
	MissingChain string `json:"lacks,omitempty"`
	// Refused means that the kernel refused the rule in a trial. A replay does not try it again in
	// the middle of an outage; Readmit does.
	Refused bool `json:"refused,omitempty"`
	// Misread means that iptables-restore made another rule of its text. It is never written again:
	// each try would put the other rule into force until the proof.
	Misread bool `json:"misread,omitempty"`
	// Waits means that the rule itself can be written. It waits for an earlier rule: without that
	// rule it would meet packets that the complete rules keep from it.
	Waits bool `json:"waits,omitempty"`
	// Flush is the ID of the flush that took it. The daemon sets it.
	Flush string `json:"flush,omitempty"`
}

// A Quarantine holds the quarantined rules of each table. It is a value.
type Quarantine map[rules.TableID][]QuarantinedRule

// With returns q with list as the quarantined rules of one table, in place of the former ones.
func (q Quarantine) With(id rules.TableID, list []QuarantinedRule) Quarantine {
	next := tableid.With(q, id, list)
	if len(list) == 0 {
		delete(next, id)
	}
	return next
}

// MarshalJSON writes rules by family and table.
func (q Quarantine) MarshalJSON() ([]byte, error) { return tableid.Marshal(q) }

// UnmarshalJSON reads the output of MarshalJSON.
func (q *Quarantine) UnmarshalJSON(data []byte) error { return tableid.Unmarshal(data, q) }

// Count returns how many rules are quarantined.
func (q Quarantine) Count() int { return countAll(q) }

// Split returns the rules that cannot be written, and the rules that wait for them. An operator
// may accept the loss of the former; then Readmit puts the latter back.
func (q Quarantine) Split() (missing, waiting Quarantine) {
	missing, waiting = Quarantine{}, Quarantine{}
	for id, list := range q {
		for _, h := range list {
			if h.Waits {
				waiting[id] = append(waiting[id], h)
			} else {
				missing[id] = append(missing[id], h)
			}
		}
	}
	return missing, waiting
}

// Standing returns the chains in the snapshot that quarantined rules waited for. If one is new,
// the daemon tries to put the rules back.
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

// reasons have the reason why each rule cannot be written.
type reasons map[rules.Key]string

// placedReasons are the reasons of rules in one chain, or in anyChain.
type placedReasons map[string]reasons

// anyChain means all chains of a table.
const anyChain = ""

// add notes why a rule must stay out of a chain; anyChain means all chains of the table.
// refusals adds the rules that earlier runs and trials found refused. leave adds a rule that
// the kernel named.
func (p placedReasons) add(chain string, rule rules.Key, reason string) {
	if p[chain] == nil {
		p[chain] = reasons{}
	}
	p[chain][rule] = reason
}

// of returns why a rule must not be written to a chain, so that it is quarantined. It returns
// false if the rule may be written.
func (p placedReasons) of(chain string, rule rules.Key) (reason string, has bool) {
	if reason, has = p[chain][rule]; !has {
		reason, has = p[anyChain][rule]
	}
	return reason, has
}

// refusedOf returns the refused rules of a list. tryRules tries them first, because they are
// the likely cause of the next refusal.
func refusedOf(list []QuarantinedRule) reasons {
	refused := reasons{}
	for _, h := range list {
		if h.Refused {
			refused[h.Rule.Key()] = h.Reason
		}
	}
	return refused
}

// matches reports whether h is this rule of this chain.
func (h QuarantinedRule) matches(chain string, r rules.Rule) bool {
	return h.Chain == chain && h.Rule.Is(r)
}

// A heldIndex counts quarantined rules by chain. A chain may hold a rule twice, and only the second
// copy may wait.
type heldIndex map[string]map[rules.Key]int

// heldRules counts the rules of a list by chain. The caller may change the result by add and
// take.
func heldRules(list []QuarantinedRule) heldIndex {
	held := heldIndex{}
	for _, h := range list {
		held.add(h.Chain, h.Rule)
	}
	return held
}

// add counts one copy more of a rule in a chain.
func (x heldIndex) add(chain string, r rules.Rule) {
	if x[chain] == nil {
		x[chain] = map[rules.Key]int{}
	}
	x[chain][r.Key()]++
}

func (x heldIndex) has(chain string, r rules.Rule) bool { return x[chain][r.Key()] > 0 }

// take counts one copy less of a rule. It returns false if none is left: the rule in hand is
// then not quarantined.
func (x heldIndex) take(chain string, r rules.Rule) bool {
	if !x.has(chain, r) {
		return false
	}
	x[chain][r.Key()]--
	return true
}

// without returns a section without its quarantined rules, as the judge and the proof expect
// it. The last of several copies are quarantined, because waiting rules are behind rules that
// do not wait.
func without(s rules.Section, list []QuarantinedRule) rules.Section {
	if len(list) == 0 {
		return s
	}
	held := heldRules(list)
	s.Chains = slices.Clone(s.Chains)
	// A chain that is left out is not expected to hold any rule, or to exist.
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

// WithoutQuarantined returns the learned generation without the rules of q. They no longer
// count as lost: an operator accepted their loss, or their owner removed them.
func (l Learned) WithoutQuarantined(q Quarantine) Learned {
	for id, list := range q {
		if s, known := l.Generation[id]; known {
			l.Generation = l.Generation.With(id, without(s, list))
		}
	}
	return l
}

// readmit plans to put back the quarantined rules that can be written by now, for Readmit. It
// returns nil if there are none, or if the table has a loss: a replay then decides about them.
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

// reasonsOf returns the reasons of quarantined rules in one line, each reason once and five at
// most. quarantinedError shows them.
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
