package reload

import (
	"context"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// stagesFrom is how long a replay has to take, by its estimate, to be written in
// two stages. Filter and mangle are small, and while filter is missing a FORWARD
// chain with the policy DROP lets nothing through: at 5,000 services they are back
// after an eighth of the time that everything takes. A shorter replay is one
// transaction on nft, so that all of it comes back at one moment.
const stagesFrom = 100 * time.Millisecond

// The stages of a replay: what decides about packets, then what translates them.
const (
	deciding = iota
	translating
)

// stageOf returns the stage to which a table belongs.
func stageOf(table rules.TableName) int {
	if table == rules.Nat {
		return translating
	}
	return deciding
}

// A Pace is how long it takes to write a rule, as the last replays show. Zero
// is what a machine with two cores needs.
type Pace time.Duration

const (
	// firstPace is what a rule took on nft with all its tables lost, at 1,000
	// and 5,000 services (Linux 6.18); on legacy it was 10 µs.
	firstPace = Pace(16 * time.Microsecond)
	// paceFrom is how many rules tell what one takes. Of fewer, the start of
	// iptables-restore or the kernel's waiting for RCU is most.
	paceFrom = 500
)

// estimate returns how long it takes to write so many rules.
func (p Pace) estimate(rules int) time.Duration {
	if p == 0 {
		p = firstPace
	}
	return time.Duration(rules) * time.Duration(p)
}

// After returns the pace that a replay showed.
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

// write writes what is planned for all turns and not written yet, and notes what
// became of it.
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

// stage decides whether what is planned is written in stages.
func (r run) chooseStages(runs []*familyRun) {
	steps := 0
	for _, t := range runs {
		for _, p := range t.plans {
			steps += len(p.script.Steps)
		}
	}
	if !r.action.mayStage || r.job.Pace.estimate(steps) < stagesFrom {
		return
	}
	for _, t := range runs {
		t.staged = true
		sortByStage(t.plans)
	}
}

func sortByStage(plans []tablePlan) {
	slices.SortStableFunc(plans, func(a, b tablePlan) int { return stageOf(a.table) - stageOf(b.table) })
}

// payloads returns what is to be written, in its stages.
func payloads(runs []*familyRun) []iptables.Payload {
	stages := []iptables.Payload{{}, {}}
	for _, t := range runs {
		for _, p := range t.pending() {
			stage := stages[deciding]
			if t.staged {
				stage = stages[stageOf(p.table)]
			}
			stage[t.family] = append(stage[t.family], p.script)
		}
	}
	return slices.DeleteFunc(stages, func(p iptables.Payload) bool { return len(p) == 0 })
}

// pending returns the plans that have not landed.
func (t *familyRun) pending() []tablePlan {
	var pending []tablePlan
	for _, p := range t.plans {
		if !t.written[p.table] {
			pending = append(pending, p)
		}
	}
	return pending
}

// note notes what became of a write of payloads. A stage that was found stale was
// not written, and neither was one behind a stage that failed.
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
