package reload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// Trials write rules to the chain in which the writer learns the bytes of rules.
	trialChain, trialTarget = iptables.TrialChain, iptables.TrialTarget
	// maxTrials and trialTime bound the search in one table. Among 20,000 rules it finds a bad one
	// in 30 trials of 0.1 to 0.3 s, and the first trial takes longest. A busy node has 30 times the
	// duration of its first trial, up to mostTrialTime. Rules that are undecided by then are
	// quarantined, too.
	maxTrials     = 256
	trialTime     = 10 * time.Second
	mostTrialTime = 30 * time.Second
)

// bisect finds the rules for which a restore was refused, and reports whether there are any. It
// writes ever smaller halves of the plan to a chain that nothing jumps to. On legacy the kernel
// does not name the rule that it refuses, and iptables-restore does not either if there are
// several. On nft the kernel names a rule that was written by its bytes (leaveNamed). If bisect
// finds none, the kernel refused the table as a whole. Each family is bisected once in a run. Rules
// that were refused before are tried first: if they are the cause, a failed readmission takes few
// trials, however long the table is.
func (r run) bisect(ctx context.Context, t *familyRun) bool {
	refused := refusalOf(t.answer.Err)
	if !r.action.writesRules || t.refused != nil || refused == nil || refused.Reason == iptables.ReasonIncompatible {
		return false
	}
	found := r.tryRules(ctx, t, t.pending(), false)
	if found && t.discarded < staleReads && r.tablesMoved(ctx, t) {
		// Another process's write may be the reason of each refusal in the trial.
		t.refused = nil
		t.discarded++
	}
	return found
}

// leaveBytes reports whether a restore was refused because rules without a text could not be
// written by their bytes. No single one of them is the cause: the transaction may have been too
// large. The next try leaves them out.
func (r run) leaveBytes(t *familyRun) bool {
	refused := refusalOf(t.answer.Err)
	if refused == nil || !refused.Textless || t.textOnly {
		return false
	}
	t.textOnly = true
	return true
}

// bisectSilent reports whether to write again without the bad rules of a restore that succeeded
// and wrote something else. If the proof shows another rule of a text, that rule is bad. If
// nothing was written, the plan is bisected. iptables-restore may read a word of a rule as an
// option of its own, such as -h, and then exits with 0.
func (r run) bisectSilent(ctx context.Context, t *familyRun) bool {
	if r.job.Strict || !r.action.writesRules || t.answer.Err != nil || t.result.otherWrote || t.result.Err == nil {
		return false
	}
	unproved := slices.DeleteFunc(slices.Clone(t.plans), func(p tablePlan) bool {
		tr := t.result.Tables[p.table]
		return tr.Proved || !tr.Read
	})
	if t.noteMisread(unproved) {
		return true
	}
	return len(unproved) > 0 && t.refused == nil && r.tryRules(ctx, t, unproved, true)
}

// tryRules tries the rules of plans one table after another, and reports whether one is bad. It
// keeps them in t.refused, for the next plan. With readsBack, a rule is also bad if the restore
// took it, but a read does not show it.
func (r run) tryRules(ctx context.Context, t *familyRun, plans []tablePlan, readsBack bool) bool {
	t.refused = map[rules.TableName]reasons{}
	found := false
	for _, plan := range plans {
		trial := newTrial(r.session, t.family, plan)
		trial.readsBack = readsBack
		trial.suspects = refusedOf(r.job.Quarantine[t.family.Table(plan.table)])
		trial.strict, trial.interrupted, trial.claimed = r.job.Strict, r.job.Interrupted, r.job.Claimed
		trial.asText = refusedAsText(t.answer.Err)
		for _, refusal := range r.job.Refused[t.family.Table(plan.table)] {
			trial.suspects[refusal.Rule.Key()] = refusal.Reason
		}
		_ = trial.run(ctx) // a rule that could not be tried counts as refused
		if trial.ended {
			t.refused = nil
			return false
		}
		if len(trial.bad) == 0 && !readsBack {
			trial.bad = loopsAndDeepNests(plan, strings.Contains(t.answer.Err.Error(), saysTooDeep))
		}
		t.refused[plan.table] = trial.bad
		t.noteMisreadIn(trial)
		found = found || len(trial.bad) > 0
		if r.job.Strict {
			t.skipRefused(plan, trial, r.job.Claimed)
		}
	}
	return found
}

// refusedAsText reports whether iptables-restore refused rules, and not the kernel their bytes.
func refusedAsText(err error) bool {
	refused := refusalOf(err)
	return refused != nil && refused.Exit > 0
}

// A trial finds the bad rules of one table.
type trial struct {
	session   iptables.Session
	family    rules.Family
	plan      tablePlan
	began     time.Time
	first     time.Duration   // how long the first trial with rules took
	newChains map[string]bool // chains that the plan writes and that do not exist yet
	tried     int
	bad       reasons             // the bad rules
	errs      map[rules.Key]error // the error of each bad rule that was tried alone
	// suspects are the rules that were refused before.
	suspects reasons
	// strict ends the trial at the first suspect that is still refused: the table is refused then.
	strict bool
	// only is the one rule to try; nil: all of the plan.
	only *rules.Rule
	// asText makes iptables-restore try the rules. It refuses some words although the kernel would
	// take the bytes.
	asText bool
	// readsBack makes a rule bad, too, if the restore took it, but a read shows no rule or another
	// one. A claimed chain's rules may read differently; declared has them.
	readsBack bool
	// interrupted is Job.Interrupted. ended: it ended the trial, which found nothing.
	interrupted func() bool
	ended       bool
	claimed     func(chain string) bool
	declared    map[rules.Key]bool
}

func newTrial(s iptables.Session, f rules.Family, plan tablePlan) trial {
	return trial{session: s, family: f, plan: plan, began: time.Now(), bad: reasons{}, errs: map[rules.Key]error{}}
}

// run tries the plan's rules, or only t.only, in a chain that nothing jumps to, and leaves the
// bad ones in t.bad. It begins with the suspects; a strict trial tries no others if one of them
// is still refused. findBad halves a list after an error. An error of run means that the trial
// chain itself could not be written.
func (t *trial) run(ctx context.Context) error {
	var all []rules.Rule
	t.newChains = map[string]bool{}
	t.declared = map[rules.Key]bool{}
	add := func(into string, list ...rules.Rule) {
		all = append(all, list...)
		for _, r := range list {
			if t.claimed != nil && t.claimed(into) {
				t.declared[r.Key()] = true
			}
		}
	}
	for _, c := range t.plan.merged {
		add(c.Name, c.Rules...)
	}
	for _, c := range t.plan.wrote {
		add(c.Name, c.Rules...)
		t.newChains[c.Name] = t.plan.seen.Chain(c.Name) == nil
	}
	for _, h := range t.plan.jumps {
		add(h.Into(), h.Rule)
	}
	if t.only != nil {
		all = []rules.Rule{*t.only}
	}
	if len(all) == 0 {
		return nil
	}
	if err := t.write(ctx, nil); err != nil {
		return err
	}
	suspect := func(r rules.Rule) bool { _, yes := t.suspects[r.Key()]; return yes }
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

// removeChains deletes the trial's chains at the end of run. It ignores an error: Remove
// deletes chains that a trial left.
func (t *trial) removeChains(ctx context.Context) {
	// A declaration empties the chains, and only an empty chain can be deleted.
	script := iptables.Script{Table: t.plan.table, Declare: trialChains()}
	for _, name := range trialChains() {
		script.Steps = append(script.Steps, iptables.Step{Verb: iptables.Drop, Chain: name})
	}
	t.restore(ctx, script)
}

func trialChains() []string { return []string{trialChain, trialTarget} }

// findBad writes the rules of list to the trial chain, and after an error each half of them
// alone, until the bad rules are found. run calls it for the suspects, and for all others. At
// the limits of maxTrials and trialTime, all remaining rules count as bad.
func (t *trial) findBad(ctx context.Context, list []rules.Rule) {
	t.ended = t.ended || t.interrupted != nil && t.interrupted()
	if len(list) == 0 || t.ended {
		return
	}
	if t.tried >= maxTrials || time.Since(t.began) > min(max(trialTime, 30*t.first), mostTrialTime) || ctx.Err() != nil {
		for _, r := range list {
			t.bad[r.Key()] = fmt.Sprintf("so many rules are refused that %s could not be tried one by one", t.plan.table)
		}
		return
	}
	start := time.Now()
	err := t.write(ctx, list)
	t.first = cmp.Or(t.first, time.Since(start))
	switch {
	case err == nil:
	case len(list) == 1:
		t.bad[list[0].Key()], t.errs[list[0].Key()] = err.Error(), err
	default:
		t.findBad(ctx, list[:len(list)/2])
		t.findBad(ctx, list[len(list)/2:])
	}
}

// write writes rules to the trial chain. An error says why one of them is bad. It leaves the
// chains of the plan alone, because their owner may be writing them. run first passes nil, to
// see whether the chain can be written.
func (t *trial) write(ctx context.Context, list []rules.Rule) error {
	t.tried++
	if t.readsBack { // remove the rules of the last trial, or they pass for this trial's rules
		if err := t.restore(ctx, iptables.Script{Table: t.plan.table, Declare: trialChains()}); err != nil {
			return err
		}
	}
	script := iptables.Script{Table: t.plan.table, Declare: trialChains()}
	var written, tried []rules.Rule
	for _, r := range list {
		_, opaque := r.Opaque()
		if opaque && t.newChains[r.Target] {
			continue // its bytes name the chain that it jumps to, and that chain does not exist yet
		}
		tried = append(tried, r)
		if t.newChains[r.Target] {
			r = r.WithTarget(trialTarget)
		}
		written = append(written, r)
		script.Steps = append(script.Steps, appendRule(trialChain, r))
	}
	if err := t.restore(ctx, script); err != nil || !t.readsBack {
		return err
	}
	snapshot, err := t.session.Read(ctx, t.family)
	if err != nil {
		return err
	}
	if snapshot.Moved { // another process wrote, so the read proves nothing
		return nil
	}
	switch c := snapshot.Tables[t.plan.table].Chain(trialChain); {
	case c == nil || len(c.Rules) != len(tried):
		return errNoEffect
	default:
		for i, r := range c.Rules {
			if !t.declared[tried[i].Key()] && !r.Equal(written[i]) {
				return errMisread
			}
		}
		return nil
	}
}

// errNoEffect is the reason of a rule that iptables-restore accepts and does not write.
var errNoEffect = errors.New("iptables-restore ended without an error and without writing the rule")

// restore writes without a guard. On legacy canaryd holds the lock. On nft only canaryd uses the
// trial chain, so writes of other processes do not matter.
func (t *trial) restore(ctx context.Context, script iptables.Script) error {
	script.AsText = t.asText
	return t.session.RestoreAnyway(ctx, iptables.Payload{t.family: {script}})[t.family].Err
}
