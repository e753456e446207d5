package reload

import (
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A tableTask is one table of a family that is being judged and planned. It has the wanted rules,
// the table as the guarded read showed it, and the judge's finding.
type tableTask struct {
	table       rules.TableName
	want        canary.Wanted
	known       bool // the generation has the table
	seen        canary.Seen
	finding     canary.Finding
	leaveAbsent bool              // see Job.LeaveAbsent
	quarantined []QuarantinedRule // rules that earlier replays quarantined
	readmit     map[string]bool   // chains to write again because a quarantined rule of theirs may be writable now
	unavailable unavailable
	doubled     []rules.Jump     // see Job.Doubled
	misread     misread          // rules in force because an earlier write went wrong
	session     iptables.Session // the session that will write the table; nil if it is only judged
	textOnly    bool             // rules cannot be written by their bytes in this run
	lostMarks   rules.MarkLoss   // how marks of packets may differ because of other tables
	// unwrittenLed are the chains of LedTo that the plan does not write.
	unwrittenLed map[string]bool
}

// A tablePlan has a restore's changes to one table, and the table that the proof then expects.
type tablePlan struct {
	table rules.TableName
	// want is the state that the proof expects. Its mark is empty if marks are removed, and its
	// section if only marks are written.
	want        canary.Wanted
	wrote       []rules.Chain // chains that are emptied and written with exactly these rules
	merged      []rules.Chain // chains that hold rules of their owners and get the missing rules
	removed     []string
	jumps       []rules.Jump      // jumps that are put back
	jumpsTaken  []rules.Jump      // jumps that are deleted; some of them are put back elsewhere
	change      Change            // the changes that a preview or a check gets
	skipped     []string          // chains that differ from the generation because their owner wrote them again
	seen        *rules.Table      // the table when the plan was made, without its strays
	replay      bool              // rules are written, and not marks alone
	quarantined []QuarantinedRule // rules that this plan leaves out
	weakened    []QuarantinedRule // rules that this plan writes without a match that only counts
	short       []rules.Chain     // chains of wrote that lack rules of the generation
	meant       rules.Section     // see TableResult
	lostMarks   rules.MarkLoss    // how marks may differ in other tables after this plan
	steps       section
	script      iptables.Script // made of steps and wrote; a drill of the canary has its own
}

// A section collects the steps of one table's script in the order in which they must run. Jumps are
// deleted before chains are rewritten, and the canary is last.
type section struct {
	declare []string        // chains that are declared in addition to the written chains
	remove  []iptables.Step // jumps and witnesses to delete
	jump    []iptables.Step
	drop    []iptables.Step // chains to delete
	mark    []iptables.Step // witnesses, then the canary
}

// plan returns a plan that writes nothing yet. Its proof expects this mark.
func (t tableTask) plan(mark canary.Mark) *tablePlan {
	return &tablePlan{table: t.table, want: canary.Wanted{CanaryChain: t.want.CanaryChain, Mark: mark, OnDemand: t.want.OnDemand}}
}

// scripted returns the plan with its script, made of the plan's steps and chains in the order
// that section describes. Each function that composes a plan calls it at its end.
func (p *tablePlan) scripted() *tablePlan {
	s := &p.steps
	n := len(s.remove) + len(s.jump) + len(s.drop) + len(s.mark)
	for i := range p.wrote {
		n += len(p.wrote[i].Rules)
	}
	p.script = iptables.Script{Table: p.table, Declare: slices.Concat(s.declare, rules.ChainNames(p.wrote))}
	steps := append(make([]iptables.Step, 0, n), s.remove...)
	for i := range p.wrote {
		for _, r := range p.wrote[i].Rules {
			steps = append(steps, appendRule(p.wrote[i].Name, r))
		}
	}
	for _, part := range [][]iptables.Step{s.jump, s.drop, s.mark} {
		steps = append(steps, part...)
	}
	p.script.Steps = steps
	return p
}

// composeReplay plans how to put back the lost rules of one table.
//
// A table that lost its canary gets a new nonce and the complete generation. Chains that hold rules
// already stay as they are: their owner wrote them after the flush, and its rules are newer. Chains
// that many owners share get the missing rules. If saved rules replaced the table, nothing in it is
// newer than the generation, so its protected part becomes exactly the generation. A table that the
// generation does not have stays as it is.
func composeReplay(task tableTask, nonce canary.Nonce) *tablePlan {
	task, strays := task.withoutStrays()
	plan := &tablePlan{table: task.table, want: task.want, seen: task.seen.Table, replay: true}
	chains := chooseChains(task, plan)
	task.unwrittenLed = task.unwrittenOf(chains.write)
	planRemovals(task, plan)
	jumps := chooseJumps(task, chains)
	if task.lostMarks != (rules.MarkLoss{}) || task.lacksRules(chains, jumps) {
		chains.keepStanding(&task)
		plan.lostMarks = task.findGaps(chains, jumps)
	}
	planChains(task, chains, plan)
	plan.removeFirst(strays)
	planJumps(task, jumps, plan)
	if task.finding.MarkLost || task.finding.Drilled {
		planMarks(task, plan, nonce)
	} else {
		for _, chain := range task.finding.Witnesses {
			plan.steps.mark = append(plan.steps.mark, appendRule(chain, task.want.Mark.Nonce.Witness()))
		}
	}
	plan.keepQuarantined(task)
	return plan.scripted()
}

// composePlant plans new marks with this nonce for a table, and nothing else. plant calls it,
// and heal if only a drill took the canary.
func composePlant(task tableTask, nonce canary.Nonce) *tablePlan {
	plan := task.plan(canary.Mark{})
	planMarks(task, plan, nonce)
	return plan.scripted()
}

// composeRotation plans to replace planted marks by new ones. The first step deletes the old canary
// by its nonce. If another process flushed or replaced the table meanwhile, that step fails, and
// the whole script with it. So new marks never hide a loss.
func composeRotation(task tableTask, nonce canary.Nonce) *tablePlan {
	plan := task.plan(canary.Mark{})
	s := &plan.steps
	s.remove = append(s.remove, deleteRule(task.want.CanaryChain, task.want.Mark.Nonce.Rule()))
	planMarks(task, plan, nonce)
	// A declaration would empty the canary before the check.
	s.declare = slices.DeleteFunc(s.declare, func(name string) bool { return name == task.want.CanaryChain })
	return plan.scripted()
}

// composeWithdrawal plans to remove the marks of a table that needs none any more, for rotate.
// As in a rotation, the first step deletes the old canary by its nonce.
func composeWithdrawal(task tableTask) *tablePlan {
	plan := task.plan(canary.Mark{})
	s := &plan.steps
	s.remove = append(s.remove, deleteRule(task.want.CanaryChain, task.want.Mark.Nonce.Rule()))
	removeWitnesses(task.seen.Table, s)
	if task.seen.Table.Chain(canary.DrillChain) != nil { // a drill is over
		s.declare = append(s.declare, canary.DrillChain)
		s.drop = append(s.drop, iptables.Step{Verb: iptables.Drop, Chain: canary.DrillChain})
	}
	s.drop = append(s.drop, iptables.Step{Verb: iptables.Drop, Chain: task.want.CanaryChain})
	return plan.scripted()
}

// composeRemoval plans to remove canaryd's marks from a table and, with everything, also the
// protected chains and the jumps into them. Remove calls it, and plant for marks that canaryd
// no longer knows.
func composeRemoval(task tableTask, everything bool) *tablePlan {
	plan := task.plan(canary.Mark{})
	s := &plan.steps
	removeWitnesses(task.seen.Table, s)
	if everything {
		s.remove = append(s.remove, deleteOpaque(task.seen)...)
		for _, h := range task.seen.Section.Jumps {
			if _, opaque := h.Rule.Opaque(); !opaque {
				s.remove = append(s.remove, deleteRule(h.Chain, h.Rule))
			}
		}
		dropChains(task, task.seen.Section.NotLedTo(rules.ChainNames(task.seen.Section.Chains)), nil, plan)
	}
	// A trial or a drill leaves its chains behind only if canaryd was killed in the middle of it.
	for _, name := range append(trialChains(), iptables.TextChain, canary.DrillChain, task.want.CanaryChain) {
		if task.seen.Table.Chain(name) != nil {
			s.declare = append(s.declare, name)
			s.mark = append(s.mark, iptables.Step{Verb: iptables.Drop, Chain: name})
		}
	}
	return plan.scripted()
}

// deleteOpaque returns the steps by which composeRemoval deletes opaque jumps: by index. They
// are first in the script, and the last index is deleted first, so that the indexes stay true.
func deleteOpaque(seen canary.Seen) []iptables.Step {
	var steps []iptables.Step
	for _, chain := range seen.Section.JumpChains(seen.Table.Name) {
		for i, r := range slices.Backward(seen.Table.Rules(chain)) {
			_, opaque := r.Opaque()
			opaque = opaque && !r.LeftOut() // a rule in place of a chain that is left out has no index
			isJump := func(h rules.Jump) bool { return h.Chain == chain && h.Rule == r }
			if opaque && slices.ContainsFunc(seen.Section.Jumps, isJump) {
				steps = append(steps, iptables.Step{Verb: iptables.Delete, Chain: chain, Index: i + 1})
			}
		}
	}
	return steps
}

func appendRule(chain string, r rules.Rule) iptables.Step {
	return iptables.Step{Verb: iptables.Append, Chain: chain, Rule: r}
}

// deleteRule returns the step that deletes the first rule of the chain that means the same as r.
func deleteRule(chain string, r rules.Rule) iptables.Step {
	return iptables.Step{Verb: iptables.Delete, Chain: chain, Rule: r}
}

// planChains plans to write and to merge the chains that composeReplay chose. A lost chain that
// --max-rules left out is quarantined instead.
func planChains(task tableTask, chosen *chosenChains, plan *tablePlan) {
	for _, c := range chosen.leftOut {
		_, _, held := task.admit(c.Name, c.Rules[0])
		plan.quarantined = append(plan.quarantined, *held)
	}
	if chosen.lines == nil && len(chosen.ownerRemoved) == 0 && len(chosen.merge) == 0 {
		plan.wrote = chosen.write // all of it, and no copy of a large list
		return
	}
	if chosen.lines == nil {
		chosen.readLines(&task)
	}
	for _, c := range chosen.write {
		writeChain(task, c, chosen.lines[c.Name], plan)
	}
	for _, c := range chosen.merge {
		mergeChain(task, c, chosen.lines[c.Name], plan)
	}
}

// writeChain plans to write a chain with its lines, for planChains. It leaves out quarantined
// rules, and rules that lead to a chain that its owner removed. A chain to readmit stays as it
// is if it would gain no rule.
func writeChain(task tableTask, c rules.Chain, lines []*line, plan *tablePlan) {
	written := rules.Chain{Name: c.Name, Rules: make([]rules.Rule, 0, len(lines))}
	for _, l := range lines {
		if l.held == nil && !l.removed {
			written.Rules = append(written.Rules, l.writable)
		}
	}
	if task.readmit[c.Name] && len(written.Rules) <= len(task.seen.Table.Rules(c.Name)) {
		return // it stays as it is, and so does its quarantine
	}
	plan.hold(lines)
	plan.mean(c, lines)
	plan.wrote = append(plan.wrote, written)
	plan.short = append(plan.short, written)
}

// hold quarantines lines, and notes the rules that are written without a match, for reports.
func (p *tablePlan) hold(lines []*line) {
	for _, l := range lines {
		if l.held != nil {
			p.quarantined = append(p.quarantined, *l.held)
		} else if !l.stands {
			p.weakened = append(p.weakened, l.weakened...)
		}
	}
}

// proveAsWritten makes the proof expect chains that lack rules as the plan writes them.
// Otherwise no replay with a quarantined rule could be proved.
func (p *tablePlan) proveAsWritten() {
	if len(p.short) == 0 {
		return
	}
	at := make(map[string]int, len(p.short))
	for i, c := range p.short {
		at[c.Name] = i
	}
	p.want.Section.Chains = slices.Clone(p.want.Section.Chains)
	for i, c := range p.want.Section.Chains {
		if k, short := at[c.Name]; short {
			p.want.Section.Chains[i] = p.short[k]
		}
	}
}

func (t tableTask) claimed(chain string) bool {
	return chain != "" && t.want.Claimed != nil && t.want.Claimed(chain)
}

// mustEqual reports whether a chain has to be exactly as the generation has it. That applies if
// older, saved rules replaced its table, and to each chain of a declared source.
func (t tableTask) mustEqual(chain string) bool {
	return t.finding.Verdict == canary.Replaced && t.known || t.claimed(chain)
}

// planRemovals plans to remove protected chains and jumps that a saved file brought back. It also
// removes undeclared chains and jumps of a declared source.
func planRemovals(task tableTask, plan *tablePlan) {
	// An owner may have written a jump after the flush into a chain that a file had brought.
	jumpedTo := map[string]bool{}
	for i, h := range task.seen.Section.Jumps {
		if !extraJump(task, i) {
			jumpedTo[h.Rule.Target] = true
			continue
		}
		plan.steps.remove = append(plan.steps.remove, deleteRule(h.Chain, h.Rule))
		plan.jumpsTaken = append(plan.jumpsTaken, h)
	}
	var stale []string
	fromFile := nameSet(task.finding.Brought)
	for _, c := range task.seen.Section.Chains {
		if (task.known && fromFile[c.Name] || task.mustEqual(c.Name)) && !task.seen.Section.IsLedTo(c.Name) {
			stale = append(stale, c.Name)
		}
	}
	if len(stale) > 0 {
		wanted := nameSet(rules.ChainNames(task.want.Section.Chains))
		stale = slices.DeleteFunc(stale, func(name string) bool { return wanted[name] })
	}
	dropChains(task, stale, jumpedTo, plan)
}

// extraJump reports whether the i-th jump of the read is to be deleted, because the table has more
// copies of it than the generation. All its copies are deleted then, and the wanted copies are put
// back in their place. A deletion by value takes the first copy, which may be the wrong one. A
// deletion by index may take another owner's rule, if one is inserted meanwhile.
func extraJump(task tableTask, i int) bool {
	h := task.seen.Section.Jumps[i]
	if _, opaque := h.Rule.Opaque(); opaque || !task.mustEqual(h.Into()) {
		return false // an opaque jump could not be put back
	}
	return rules.Copies(task.seen.Section.Jumps, h) > rules.Copies(task.want.Section.Jumps, h)
}

// dropChains plans to empty and delete the chains in stale. It keeps each chain in jumpedTo, or
// to which another remaining rule leads, and all chains that can be reached from there.
func dropChains(task tableTask, stale []string, jumpedTo map[string]bool, plan *tablePlan) {
	if len(stale) == 0 || leftOutStays(task.seen.Table, func(name string) bool { return !slices.Contains(stale, name) }) {
		return
	}
	referenced := referencedTargets(task, stale)
	maps.Copy(referenced, jumpedTo)
	for grown := true; grown; {
		grown = false
		for _, name := range stale {
			if !referenced[name] {
				continue
			}
			for _, r := range task.seen.Table.Chain(name).Rules {
				grown = grown || !referenced[r.Target]
				referenced[r.Target] = true
			}
		}
	}
	if leftOutStays(task.seen.Table, func(name string) bool { return referenced[name] }) {
		return
	}
	for _, name := range stale {
		if !referenced[name] {
			plan.removed = append(plan.removed, name)
		}
	}
	plan.dropRemoved()
}

// dropRemoved plans to empty and delete the chains that the plan removes.
func (p *tablePlan) dropRemoved() {
	for _, verb := range []iptables.Verb{iptables.Flush, iptables.Drop} {
		for _, name := range p.removed {
			p.steps.drop = append(p.steps.drop, iptables.Step{Verb: verb, Chain: name})
		}
	}
}

// leftOutStays reports whether a chain that stays is left out by --max-rules. canaryd did not read
// its rules, and they may jump to any other chain.
func leftOutStays(t *rules.Table, stays func(chain string) bool) bool {
	return slices.ContainsFunc(t.Chains, func(c rules.Chain) bool { return c.LeftOut() && stays(c.Name) })
}

// referencedTargets returns the chains that remaining rules reference. The rules of unprotected
// chains remain. Where only a declared source's chains are corrected, so do the rules of learned
// chains.
func referencedTargets(task tableTask, stale []string) map[string]bool {
	ours := nameSet(stale)
	for _, c := range task.seen.Section.Chains {
		ours[c.Name] = ours[c.Name] || task.mustEqual(c.Name) && !task.seen.Section.IsLedTo(c.Name)
	}
	referenced := map[string]bool{}
	for _, c := range task.seen.Table.Chains {
		if ours[c.Name] || rules.Builtin(task.table, c.Name) {
			continue // a built-in chain's rules that lead here are jumps, which planRemovals handles
		}
		for _, r := range c.Rules {
			referenced[r.Target] = true
		}
	}
	return referenced
}

// planJumps plans to put back the chosen jumps by built-in chain, each at its anchor. A jump
// that cannot be written is quarantined.
func planJumps(task tableTask, chosen map[string]*chosenJumps, plan *tablePlan) {
	for _, chain := range task.want.Section.JumpChains(task.table) {
		jumps := chosen[chain]
		if jumps == nil {
			continue
		}
		var wanted []rules.Jump
		for i, l := range jumps.lines {
			if l.held == nil && !l.gone {
				h := jumps.wanted[i]
				h.Rule = l.writable
				wanted = append(wanted, h)
			}
		}
		plan.hold(jumps.lines)
		if slices.ContainsFunc(jumps.lines, func(l *line) bool { return l.held != nil }) {
			plan.meant.Jumps = append(plan.meant.Jumps, jumps.wanted...)
		}
		steps, placed := placeJumps(chain, standingRules(task, chain), wanted)
		plan.steps.jump = append(plan.steps.jump, steps...)
		plan.jumps = append(plan.jumps, placed...)
	}
}

func stands(t *rules.Table, h rules.Jump) bool {
	return slices.ContainsFunc(t.Rules(h.Chain), h.Rule.Equal)
}

// standingRules returns the rules of a built-in chain as they are after the section's
// deletions. A replay puts jumps back among them.
func standingRules(task tableTask, chain string) []rules.Rule {
	extra := map[rules.Key]int{}
	for i, h := range task.seen.Section.Jumps {
		if h.Chain == chain && extraJump(task, i) {
			extra[h.Rule.Key()]++
		}
	}
	var standing []rules.Rule
	for _, r := range task.seen.Table.Rules(chain) {
		switch {
		case (task.finding.MarkLost || task.finding.Drilled) && canary.IsWitness(r):
		case extra[r.Key()] > 0: // -D deletes the first equal rule
			extra[r.Key()]--
		default:
			standing = append(standing, r)
		}
	}
	return standing
}
