package reload

import (
	"context"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// mostNamed bounds how many rules a run leaves out one by one, because the kernel named them. Each
// takes a transaction of everything: 0.6 s at 5,000 services. After this many, bisecting is
// cheaper.
const mostNamed = 64

// A blamed rule is the rule that the kernel refused, with its error as the reason.
type blamed struct {
	rule   *iptables.RefusedRule
	reason string
}

// namedIn returns the rule for which the kernel refused the last write; nil if it named none.
// It may be a rule of another family: one transaction writes both.
func (t *familyRun) namedIn() *iptables.RefusedRule {
	if refused := refusalOf(t.answer.Err); refused != nil {
		return refused.Rule
	}
	return nil
}

// leaveNamed reports whether a family is to be written again because the kernel refused one rule of
// the transaction. It wrote nothing, so all families of the transaction are written again. The
// rule's own family leaves the rule out. If the table's rules have texts, iptables-restore tries
// this one alone. If it can write the rule, it writes the table. If it cannot try, for example
// because no iptables is installed, the kernel's answer counts.
//
// The kernel refuses some rules in one chain only. So the same rule in another chain is written,
// unless iptables-restore cannot write it anywhere.
//
// A strict job leaves no rule out. It bisects instead, because it reports all refused rules of the
// table.
func (r run) leaveNamed(ctx context.Context, t *familyRun) bool {
	named := t.namedIn()
	switch {
	case named == nil:
		return false
	case named.Family != t.family:
		return true
	case !r.action.writesRules || len(named.Rule.Needs().Sets) > 0 && r.setsGone(ctx, t):
		return false
	}
	table := named.Name
	at := slices.IndexFunc(t.plans, func(p tablePlan) bool { return p.table == table })
	if at < 0 || t.namedCount >= mostNamed || t.asText[table] != nil {
		return false
	}
	t.namedCount++
	reason, chain := t.answer.Err.Error(), named.Chain
	if !slices.ContainsFunc(t.plans[at].script.Steps, func(s iptables.Step) bool { _, opaque := s.Rule.Opaque(); return opaque }) {
		trial := newTrial(r.session, t.family, t.plans[at])
		trial.only, trial.asText, trial.interrupted = &named.Rule, true, r.job.Interrupted
		err := trial.run(ctx)
		refusedToo, bad := trial.bad[named.Rule.Key()]
		switch {
		case trial.ended || ctx.Err() != nil:
			return false
		case bad:
			reason, chain = refusedToo, anyChain
		case err == nil:
			if t.asText == nil {
				t.asText = map[rules.TableName]*blamed{}
			}
			t.asText[table] = &blamed{named, reason}
			return true
		}
	}
	if r.job.Strict {
		return false
	}
	t.leave(named, chain, reason)
	return true
}

// leave leaves a rule out of this run's writes to a chain; anyChain means all chains of the
// table. The next plan quarantines the rule with this reason.
func (t *familyRun) leave(named *iptables.RefusedRule, chain, reason string) {
	if t.named == nil {
		t.named = map[rules.TableName]placedReasons{}
	}
	if t.named[named.Name] == nil {
		t.named[named.Name] = placedReasons{}
	}
	t.named[named.Name].add(chain, named.Rule.Key(), reason)
}

// leaveInContext reports whether a family is to be written again without a rule that the kernel
// named. Such a rule is refused only at its place: iptables-restore could write it alone, but not
// with its table. An example is a match that works in some hooks only, next to another process's
// jump. bisect runs before it: it finds a rule of another table that is refused anywhere.
func (r run) leaveInContext(t *familyRun) (again bool) {
	refused := refusalOf(t.answer.Err)
	if refused == nil || refused.Exit <= 0 || r.job.Strict {
		return false
	}
	for table, blamed := range t.asText {
		if !t.written[table] {
			t.leave(blamed.rule, blamed.rule.Chain, blamed.reason)
			delete(t.asText, table)
			again = true
		}
	}
	return again
}
