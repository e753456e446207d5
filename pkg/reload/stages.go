package reload

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// stagesFrom is the estimated time from which a replay is written in two stages. Filter and mangle
// are small, and without filter a FORWARD chain with the policy DROP lets nothing through. At 5,000
// services they are back after an eighth of the whole time. A shorter replay is one transaction on
// nft, so that all tables are back at the same time.
const stagesFrom = 100 * time.Millisecond

// stageOf returns the stage in which a table is written: 0 if it decides about packets, 1 if it
// translates them.
func stageOf(table rules.TableName) int {
	if table == rules.Nat {
		return 1
	}
	return 0
}

// A Pace is the time to write one rule, as the last replays showed it. Zero means firstPace.
type Pace time.Duration

const (
	// firstPace was measured with 2 cores on nft, all tables lost, at 1,000 and 5,000 services
	// (Linux 6.18). On legacy it was 10 µs.
	firstPace = Pace(16 * time.Microsecond)
	// paceFrom is how many rules a replay must have to count. A smaller replay spends most of its
	// time on the start of iptables-restore, or on the kernel's wait for RCU.
	paceFrom = 500
)

// Estimate returns how long so many rules take. A replay that takes longer than stagesFrom is
// written in two stages.
func (p Pace) Estimate(rules int) time.Duration {
	if p == 0 {
		p = firstPace
	}
	return time.Duration(rules) * time.Duration(p)
}

// After returns the pace after a replay, for the next Job. A replay of few rules does not
// change it.
func (p Pace) After(result Result) Pace {
	rules, took := 0, time.Duration(0)
	for _, fr := range result {
		rules += fr.wroteRules
		took = max(took, fr.writing) // all families are written by one restore
	}
	if rules >= paceFrom {
		return Pace(took) / Pace(rules)
	}
	return p
}

// write writes the planned steps that are not written yet, and records the kernel's answer.
// restore is the session's Restore, or RestoreAnyway to write without a guard.
func (r run) write(ctx context.Context, runs []*familyRun, restore func(context.Context, ...iptables.Payload) map[rules.Family]iptables.Written) {
	if len(runs) == 0 {
		return
	}
	payloads := payloads(runs)
	start := time.Now()
	written := restore(ctx, payloads...)
	took := time.Since(start)
	for _, t := range runs {
		t.recordWrite(payloads, written[t.family])
		t.result.writing = took
	}
}

// chooseStages decides whether the plans are written in stages, and then sorts them. They are
// if the action allows it and the write will take long.
func (r run) chooseStages(runs []*familyRun) {
	steps := 0
	for _, t := range runs {
		for _, p := range t.plans {
			steps += len(p.script.Steps)
		}
	}
	if !r.action.mayStage || r.job.Pace.Estimate(steps) < stagesFrom {
		return
	}
	for _, t := range runs {
		t.staged = true
		sortByStage(t.plans)
	}
}

func sortByStage(plans []tablePlan) {
	sorting.Stable(plans, func(a, b tablePlan) int { return stageOf(a.table) - stageOf(b.table) })
}

// payloads returns the steps to write, a payload for each stage. The session writes them in
// this order. Without stages there is one for all tables.
func payloads(runs []*familyRun) []iptables.Payload {
	stages := []iptables.Payload{{}, {}}
	for _, t := range runs {
		for _, p := range t.pending() {
			stage := stages[0]
			if t.staged {
				stage = stages[stageOf(p.table)]
			}
			p.script.AsText = p.script.AsText || t.asText[p.table] != nil
			stage[t.family] = append(stage[t.family], p.script)
		}
	}
	return slices.DeleteFunc(stages, func(p iptables.Payload) bool { return len(p) == 0 })
}

// pending returns the plans that are not written yet. payloads writes these, and bisect tries
// their rules after a refusal.
func (t *familyRun) pending() []tablePlan {
	var pending []tablePlan
	for _, p := range t.plans {
		if !t.written[p.table] {
			pending = append(pending, p)
		}
	}
	return pending
}

// recordWrite records the result of a write in sent, written and answer, for the next try and
// the proof. A stale stage was not written, and neither was a stage behind a failed one.
func (t *familyRun) recordWrite(payloads []iptables.Payload, w iptables.Written) {
	if t.sent == nil { // of this try
		t.sent, t.written = map[rules.TableName]bool{}, map[rules.TableName]bool{}
		t.answer = iptables.Written{}
	}
	w.Direct = slices.Concat(t.answer.Direct, w.Direct)
	t.answer = w
	for stage, payload := range payloads {
		for _, script := range payload[t.family] {
			landed := stage < w.Stages
			if landed || stage == w.Stages && !t.stale() {
				t.sent[script.Table] = true
				t.result.wroteRules += len(script.Steps)
			}
			if landed {
				t.written[script.Table] = true
			}
		}
	}
}
