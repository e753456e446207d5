package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Supplier creates the objects other than chains that rules depend on, and never changes an
// object that exists. *iptables.Sets is one, and *iptablestest.Sets in tests.
type Supplier interface {
	// Names returns the names of all ipsets.
	Names(context.Context) ([]string, error)
	// Create creates an ipset. The error is iptables.ErrSetStands if one of that name exists.
	Create(context.Context, iptables.Set) error
	// Account creates an nfacct object unless it exists.
	Account(ctx context.Context, name string) error
}

// unavailable has the parts that a replay cannot use. These are refused and misread rules, and
// missing ipsets and nfacct objects that cannot be created, by name with the reason.
type unavailable struct {
	sets, nfaccts map[string]string
	refused       placedReasons
	misread       reasons
}

// supply creates the missing ipsets and nfacct objects that the tasks' tables depend on. It
// returns the objects that it could not create: rules that need them are quarantined. If it
// cannot list the ipsets, it reports none as missing, and the restore finds out.
func (r run) supply(ctx context.Context, t *familyRun, tasks []tableTask) unavailable {
	t.sets = nil
	absent := unavailable{sets: map[string]string{}, nfaccts: map[string]string{}}
	if r.Supplier == nil || !r.action.writesRules {
		return absent
	}
	var needs rules.Needs
	for _, task := range tasks {
		if task.finding.Verdict.Loss() || len(task.quarantined) > 0 || r.action.allTables {
			n := task.want.Section.Needs()
			needs.Sets, needs.Accounts = union(needs.Sets, n.Sets), union(needs.Accounts, n.Accounts)
		}
	}
	for _, name := range needs.Accounts {
		if err := r.Supplier.Account(ctx, name); err != nil {
			absent.nfaccts[name] = err.Error()
		}
	}
	if len(needs.Sets) == 0 {
		return absent
	}
	names, err := r.Supplier.Names(ctx)
	if err != nil {
		return absent
	}
	have := nameSet(names)
	for _, name := range needs.Sets {
		if err := r.supplySet(ctx, name, have, nil); err != nil {
			absent.sets[name] = err.Error()
			continue
		}
		t.sets = append(t.sets, name)
	}
	return absent
}

// supplySet creates a missing ipset, after the sets that are its members. have has the existing
// sets, and it adds new ones. within are the sets that led to it: a loop is an error.
func (r run) supplySet(ctx context.Context, name string, have map[string]bool, within []string) error {
	if have[name] {
		return nil
	}
	set, captured := r.job.Sets[name]
	if !captured || slices.Contains(within, name) {
		return fmt.Errorf("ipset %s is missing, and its members are unknown", name)
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

// writes reports whether the backend can write a rule at all. It can write a rule without a text
// only by its bytes.
func (t *tableTask) writes(r rules.Rule) bool {
	_, opaque := r.Opaque()
	return !opaque || !t.textOnly && t.session != nil && t.session.Writes(r)
}

// lacksChain reports whether a chain of another owner is missing and this plan does not write it.
func (t *tableTask) lacksChain(name string) bool {
	depends := slices.Contains(t.want.Section.DependsOn, name) && !t.want.Section.IsLedTo(name) || t.unwrittenLed[name]
	return depends && t.seen.Table.Chain(name) == nil
}

// unwrittenOf returns the chains of LedTo that the plan does not write. lacksChain quarantines
// rules that lead to one of them, if it does not exist.
func (t *tableTask) unwrittenOf(write []rules.Chain) map[string]bool {
	if len(t.want.Section.LedTo) == 0 {
		return nil
	}
	left := nameSet(t.want.Section.LedTo)
	for _, c := range write {
		delete(left, c.Name)
	}
	return left
}

// unwritable reports whether a rule cannot be written to a chain as it is. Then admit decides
// how it is written, or why not.
func (t *tableTask) unwritable(chain string, r rules.Rule) bool {
	if t.lacksChain(r.Target) {
		return true
	}
	if _, refused := t.unavailable.refused.of(chain, r.Key()); refused {
		return true
	}
	if _, misread := t.unavailable.misread[r.Key()]; misread {
		return true
	}
	if !t.writes(r) {
		return true
	}
	if len(t.unavailable.sets) == 0 && len(t.unavailable.nfaccts) == 0 {
		return false
	}
	return missing(t.unavailable.sets, r.Needs().Sets) != "" || missing(t.unavailable.nfaccts, r.Needs().Accounts) != ""
}

// missing returns the first of the names that is in list, the objects that do not exist; "" if
// all exist.
func missing(list map[string]string, names []string) string {
	for _, name := range names {
		if _, ok := list[name]; ok {
			return name
		}
	}
	return ""
}

// admit returns a rule as it can be written, or why it cannot be. If only a match that counts
// depends on a missing object, the rule is written without it, and weakened lists the match. A
// declared rule never is. A nil held means that the rule is written.
func (t *tableTask) admit(chain string, r rules.Rule) (writable rules.Rule, weakened []QuarantinedRule, held *QuarantinedRule) {
	quarantine := func(h QuarantinedRule) (rules.Rule, []QuarantinedRule, *QuarantinedRule) {
		h.Chain, h.Rule = chain, r
		return r, nil, &h
	}
	if reason, _ := r.Opaque(); !t.writes(r) {
		return quarantine(QuarantinedRule{Reason: reason + "; its owner has to put it back"})
	}
	if t.lacksChain(r.Target) {
		return quarantine(QuarantinedRule{Reason: fmt.Sprintf("chain %s is missing", r.Target), MissingChain: r.Target})
	}
	if reason, misread := t.unavailable.misread[r.Key()]; misread {
		otherSet := reason == errOtherSet.Error() // Readmit tries it again
		return quarantine(QuarantinedRule{Reason: reason, Misread: !otherSet, Refused: otherSet})
	}
	if reason, refused := t.unavailable.refused.of(chain, r.Key()); refused {
		return quarantine(QuarantinedRule{Reason: reason, Refused: true})
	}
	needs := r.Needs()
	if name := missing(t.unavailable.sets, needs.Sets); name != "" {
		return quarantine(QuarantinedRule{Reason: t.unavailable.sets[name]})
	}
	lighter := r
	for name := missing(t.unavailable.nfaccts, needs.Accounts); name != ""; name = missing(t.unavailable.nfaccts, lighter.Needs().Accounts) {
		next := lighter.WithoutAccount(name)
		if t.claimed(chain) || t.claimed(r.Target) || next.Is(lighter) { // the latter is not in iptables-save's words
			return quarantine(QuarantinedRule{Reason: t.unavailable.nfaccts[name]})
		}
		weakened = append(weakened, QuarantinedRule{Chain: chain, Rule: lighter, Reason: t.unavailable.nfaccts[name]})
		lighter = next
	}
	return lighter, weakened, nil
}

// keepQuarantined keeps the rules quarantined that the plan does not decide about. Then it
// takes all quarantined rules out of the content that the proof expects. composeReplay calls it
// at its end.
func (p *tablePlan) keepQuarantined(task tableTask) {
	var decided map[string]bool
	if len(task.quarantined) > 0 {
		decided = nameSet(rules.ChainNames(p.wrote), rules.ChainNames(p.merged))
	}
	again := heldRules(p.quarantined)
	for _, h := range task.quarantined {
		placed := slices.ContainsFunc(p.jumps, func(k rules.Jump) bool { return h.matches(k.Chain, k.Rule) })
		if !decided[h.Chain] && !again.has(h.Chain, h.Rule) && !placed {
			p.quarantined = append(p.quarantined, h)
		}
	}
	p.want.Section = without(p.want.Section, p.quarantined)
	p.proveAsWritten()
}
