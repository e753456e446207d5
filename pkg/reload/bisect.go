package reload

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// trialChain is where rules are tried on, and trialTarget is where those jump to
	// that lead to a chain which is not there. No packet comes there, and nothing
	// protects chains of such names: no glob takes in what ends in -CANARY.
	trialChain  = "KUBE-CANARYD-TRIAL-CANARY"
	trialTarget = "KUBE-CANARYD-TRIAL-TO-CANARY"
	// Of 20,000 rules a bad one is found in 30 trials, at 0.1 to 0.3 s each.
	// What is not decided within these is left out as well.
	maxTrials = 256
	trialTime = 10 * time.Second
)

// bisect finds the rules for which a restore was refused, by writing halves of what
// was planned to a chain that nothing jumps to: on legacy the kernel does not say
// which rule it refuses, nor iptables-restore which of several. It returns false
// if it finds none: then it was not for single rules that the restore was refused.
// A turn is bisected once. Rules that were refused before are tried first: if they
// are all, a readmission that fails costs a few trials, however long the table.
func (r run) bisect(ctx context.Context, t *familyRun) bool {
	var refused *iptables.RestoreError
	if !r.action.writesRules || t.bisected || !errors.As(t.answer.Err, &refused) || refused.Exit < 0 {
		return false
	}
	if refused.Reason == iptables.ReasonLock || refused.Reason == iptables.ReasonIncompatible {
		return false
	}
	return r.tryRules(ctx, t, t.pending(), false)
}

// bisectSilent bisects where a restore was taken and proved to have had no effect: iptables-restore
// that reads a rule's word as an option of its own, such as -h, ends with 0 and writes nothing.
func (r run) bisectSilent(ctx context.Context, t *familyRun) bool {
	if r.job.Strict || !r.action.writesRules || t.bisected || t.answer.Err != nil || t.result.otherWrote || t.result.Err == nil {
		return false
	}
	unproved := slices.DeleteFunc(slices.Clone(t.plans), func(p tablePlan) bool {
		tr := t.result.Tables[p.table]
		return tr.Proved || !tr.Read
	})
	return len(unproved) > 0 && r.tryRules(ctx, t, unproved, true)
}

// tryRules tries the rules of plans, and reports whether one is bad. Where it looks, a rule is bad too
// if it was taken and does not stand then.
func (r run) tryRules(ctx context.Context, t *familyRun, plans []tablePlan, looks bool) bool {
	t.bisected, t.refused = true, map[rules.TableName]map[string]string{}
	found := false
	for _, plan := range plans {
		trial := newTrial(r.session, t.family, plan)
		trial.readsBack = looks
		trial.suspects = refusedOf(r.job.Quarantine[t.family.Table(plan.table)])
		trial.strict = r.job.Strict
		for _, refusal := range r.job.Refused[t.family.Table(plan.table)] {
			trial.suspects[refusal.Rule.Spec] = refusal.Reason
		}
		_ = trial.run(ctx) // the refusal stands for what could not be tried
		if len(trial.bad) == 0 && !looks {
			trial.bad = loopsAndDeepNests(plan, refusedAsTooDeep(t.answer.Err))
		}
		t.refused[plan.table] = trial.bad
		found = found || len(trial.bad) > 0
		if r.job.Strict {
			t.skipRefused(plan, trial, r.job.Claimed)
		}
	}
	return found
}

// A trial tries one table's rules.
type trial struct {
	session   iptables.Session
	family    rules.Family
	plan      tablePlan
	until     time.Time
	newChains map[string]bool // chains that rules may jump to and that are not there
	tried     int
	bad       map[string]string // rules by text, and why
	errs      map[string]error  // of those, what iptables said, as far as it did
	// suspects were refused before, by text.
	suspects map[string]string
	// strict: one rule that is still refused is enough to know, and others are
	// not tried.
	strict bool
	// looks: a rule is bad too if it was taken and does not stand then.
	readsBack bool
}

func newTrial(s iptables.Session, f rules.Family, plan tablePlan) trial {
	return trial{session: s, family: f, plan: plan, until: time.Now().Add(trialTime), bad: map[string]string{}, errs: map[string]error{}}
}

// run tries all rules. The error says why nothing could be tried.
func (t *trial) run(ctx context.Context) error {
	var all []rules.Rule
	t.newChains = map[string]bool{}
	for _, c := range t.plan.merged {
		all = append(all, c.Rules...)
	}
	for _, c := range t.plan.wrote {
		all = append(all, c.Rules...)
		t.newChains[c.Name] = t.plan.seen.Chain(c.Name) == nil
	}
	for _, h := range t.plan.jumps {
		all = append(all, h.Rule)
	}
	if len(all) == 0 {
		return nil
	}
	if err := t.write(ctx, nil); err != nil {
		return err
	}
	suspect := func(r rules.Rule) bool { _, yes := t.suspects[r.Spec]; return yes }
	var suspects []rules.Rule
	for _, r := range all {
		if suspect(r) {
			suspects = append(suspects, r)
		}
	}
	t.findBad(ctx, suspects)
	if !t.strict || len(t.bad) == 0 {
		t.findBad(ctx, slices.DeleteFunc(all, suspect))
	}
	t.removeChains(ctx)
	return nil
}

// clear removes the chains of the trial.
func (t *trial) removeChains(ctx context.Context) {
	// Declared first, so that they are empty and can be deleted.
	script := iptables.Script{Table: t.plan.table, Declare: trialChains()}
	for _, name := range trialChains() {
		script.Steps = append(script.Steps, iptables.Step{Verb: iptables.Drop, Chain: name})
	}
	t.restore(ctx, script)
}

func trialChains() []string { return []string{trialChain, trialTarget} }

// sift puts the bad ones of list into t.bad.
func (t *trial) findBad(ctx context.Context, list []rules.Rule) {
	if len(list) == 0 {
		return
	}
	if t.tried >= maxTrials || time.Now().After(t.until) || ctx.Err() != nil {
		for _, r := range list {
			t.bad[r.Spec] = fmt.Sprintf("so many rules are refused that %s could not be tried one by one", t.plan.table)
		}
		return
	}
	err := t.write(ctx, list)
	switch {
	case err == nil:
	case len(list) == 1:
		t.bad[list[0].Spec], t.errs[list[0].Spec] = err.Error(), err
	default:
		t.findBad(ctx, list[:len(list)/2])
		t.findBad(ctx, list[len(list)/2:])
	}
}

// write tries rules. No chain of the plan is touched: its owner may be writing it.
func (t *trial) write(ctx context.Context, list []rules.Rule) error {
	t.tried++
	if t.readsBack { // what an earlier one left would be taken for its effect
		if err := t.restore(ctx, iptables.Script{Table: t.plan.table, Declare: trialChains()}); err != nil {
			return err
		}
	}
	script := iptables.Script{Table: t.plan.table, Declare: trialChains()}
	for _, r := range list {
		if t.newChains[r.Target] {
			r = r.WithTarget(trialTarget)
		}
		script.Steps = append(script.Steps, appendRule(trialChain, r))
	}
	if err := t.restore(ctx, script); err != nil || !t.readsBack {
		return err
	}
	snapshot, err := t.session.Read(ctx, t.family)
	if err != nil {
		return err
	}
	if snapshot.Moved { // another process wrote: what stands says nothing
		return nil
	}
	if c := snapshot.Tables[t.plan.table].Chain(trialChain); c == nil || len(c.Rules) != len(list) {
		return errNoEffect
	}
	return nil
}

// errNoEffect is the reason why a rule is left out that a restore takes and does not write.
var errNoEffect = errors.New("iptables-restore ended without an error and without writing the rule")

// restore asks for no guard: on legacy the lock is held, on nft what is done to a
// chain of nobody's is right whatever somebody writes meanwhile.
func (t *trial) restore(ctx context.Context, script iptables.Script) error {
	return t.session.RestoreAnyway(ctx, iptables.Payload{t.family: {script}})[t.family].Err
}
