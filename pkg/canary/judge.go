package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Verdict is the state of a table.
type Verdict string

// The verdicts. A replay does not answer Unknown, Intact, Changed, Refused and Partial.
const (
	Unknown      Verdict = "unknown"       // it could not be read, or nothing was planted yet
	Intact       Verdict = "intact"        // the generation is in force
	Changed      Verdict = "changed"       // marks are present; owners changed rules
	JumpsMissing Verdict = "jumps_missing" // a built-in chain was flushed, or jumps deleted by name
	Emptied      Verdict = "emptied"       // rules flushed, chains left (iptables -F), or rules purged
	ChainDeleted Verdict = "chain_deleted" // the canary's chain is gone (iptables -X, a full restore)
	TableDeleted Verdict = "table_deleted" // the table is gone (nft flush ruleset, nft delete table)
	Replaced     Verdict = "replaced"      // a canary with another nonce: saved rules were restored
	Drifted      Verdict = "drifted"       // another process changed a declared source's rules
	// Refused: declared rules are not in force, because the kernel refuses some of them. Judge
	// never returns it; the writer of declared rules does.
	Refused Verdict = "refused"
	// Partial: lost rules of the table could not be put back; the rest is in force. Judge never
	// returns it; a status does.
	Partial Verdict = "partial"
)

// Loss reports whether a replay answers the verdict. It is false for the empty verdict of a
// table that was not read.
func (v Verdict) Loss() bool {
	switch v {
	case "", Unknown, Intact, Changed, Refused, Partial:
		return false
	default:
		return true
	}
}

// LossKinds returns every verdict that shows loss.
func LossKinds() []Verdict {
	return []Verdict{JumpsMissing, Emptied, ChainDeleted, TableDeleted, Replaced, Drifted}
}

// Wanted is the content of a table that ought to be in force.
type Wanted struct {
	CanaryChain string
	Mark        Mark
	Section     rules.Section
	// OnDemand: the table needs marks only while it has something protected.
	OnDemand bool
	// Complete also has the quarantined rules. It shows which chains lead to which. Nil means
	// Section.
	Complete *rules.Section
	// Claimed reports whether a declared source owns a chain. Each change of such a chain is
	// drift. Nil means none.
	Claimed func(chain string) bool
	// Piecewise reports whether many owners share a chain. Each owner removes its own rules
	// before the chains that they lead to, and leaves shared chains. Nil means none.
	Piecewise func(chain string) bool
	// Robbed are living containers whose rules were deleted by name, by a process other than
	// their owner.
	Robbed map[protect.Attachment]bool
	// Purged reports whether a purge took rules from a chain, or from a built-in chain a jump
	// to target. A purge is a process that also deletes canaryd's marks by name, so it is no
	// owner. Nil means no purge.
	Purged func(chain, target string) bool
}

func (w Wanted) shared(chain string) bool { return w.Piecewise != nil && w.Piecewise(chain) }

// Needless reports whether a table needs no marks. It is guarded on demand, a read shows
// nothing protected in it, and nothing protected is wanted there.
func (w Wanted) Needless(seen Seen) bool {
	return w.OnDemand && seen.Err == nil && w.complete().Bare() && w.Section.Bare() && seen.Section.Bare()
}

// complete returns the section that shows which chains lead to which; see Wanted.Complete.
func (w Wanted) complete() rules.Section {
	if w.Complete != nil {
		return *w.Complete
	}
	return w.Section
}

// Seen is the content of a table in a full read.
type Seen struct {
	Table *rules.Table // nil: the table does not exist
	Err   error        // not nil: the table could not be read
	// Section is the result of rules.Protection.Extract for Table.
	Section rules.Section
	// Over reports whether the jump grace of an entry of Finding.Waiting is over. Then its
	// owner has had the time to write the jump again, or to delete the rest. Nil means none.
	Over func(rules.Jump) bool
	// Quiet says that the grace of every entry is over.
	Quiet bool
	// Before is the Finding of the last read during the same loss, or the zero Finding.
	Before Finding
}

// A Finding is a verdict and its evidence.
type Finding struct {
	Verdict Verdict
	// MarkLost says that the canary is missing, empty, or has another nonce. Then findings from
	// before this planting say nothing about the table.
	MarkLost bool
	// Unmarked says that the table needs no marks and has none. If it had marks, nothing
	// protected was lost with them.
	Unmarked bool
	// Witnesses are the built-in chains whose witness is missing.
	Witnesses []string
	// Jumps are the lost jumps, which a replay must put back.
	Jumps []rules.Jump
	// Waiting are jumps that may be lost, but whose owner may still be at work until the grace
	// is over. There are three kinds. A jump may be missing while its witness is present. Or it
	// is the first rule of an emptied chain that its owner may soon fill or delete. Or it led
	// from an emptied chain to a chain that still has rules, and many owners share either
	// chain.
	Waiting []rules.Jump
	// Emptied and Missing are lost protected chains: without a rule, or deleted. In a table
	// that lost its mark, these are all such chains.
	Emptied []string
	Missing []string
	// Taken are lost rules of protected chains that still hold others: rules of robbed
	// containers, and rules that a purge deleted.
	Taken []rules.Jump
	// Released are missing protected chains, although the flush deleted no chains: their owner
	// removed them meanwhile.
	Released []string
	// Restored is the canary of the saved rules that were restored during this loss; empty
	// without saved rules. Brought are protected chains that only the saved rules had, and that
	// are still empty. Lacked are missing chains that were already missing in the first read.
	// That is the first read of a table without chains, or the first read after saved rules
	// were restored.
	Restored string
	Brought  []string
	Lacked   []string
	// Drilled says that a drill of canaryd took the canary, and no flush did, because its
	// stand-in is present. Then MarkLost is false, and the content is judged as if the canary
	// were present.
	Drilled bool
	// Drift lists the differences of claimed chains and jumps from their declaration.
	Drift rules.Difference
	// Err is the reason why the verdict is unknown.
	Err error
}

// Judge returns the verdict on a table, with its evidence. It is a pure function. Its rules, in
// order:
//
//   - A table that could not be read, or never had a canary, is unknown. But a table
//     that does not exist and has no wanted content is intact, and so is a table that
//     needs no marks.
//   - If the canary is missing, empty or has another nonce, the table was deleted,
//     flushed or replaced. A flush that empties the canary deletes no chains. So the
//     few missing chains were removed by their owner (a pod's, by CNI DEL), unless they
//     were missing before the flush: see lacked. If only a drill of canaryd took the
//     canary, the rest is judged as if the canary were present.
//   - If a witness is missing, its built-in chain was flushed.
//   - An emptied chain is lost if its owner never leaves it empty (owners.EmptyingOf), or
//     if a chain that only it referenced still has rules. Some cases wait for the grace.
//     If many owners share a chain, the last owner removes its rule first and then the
//     chain (portmap, netavark). A chain that only an emptied chain led to may also be
//     shared: portmap first flushes a pod's chain, which leads to CNI-HOSTPORT-SETMARK.
//     And an owner may flush a chain before it fills or deletes it.
//   - A jump that is missing while its witness is present was deleted by name. It is lost
//     only if its target still has rules or lost them, and if no other jump leads there.
//     The grace since the deletion must be over, too. A Named jump (Docker's MASQUERADE)
//     is never lost: its owner deletes just that rule with the network.
//   - A chain that is guarded only because protected rules lead to it may be empty or missing:
//     its owner rewrites it freely. If a rule that leads there is lost, the chain is lost too.
//   - Rules and chains that a purge deleted by name are lost, even if others remain. A process
//     that also deletes canaryd's marks is no owner.
//   - Claimed chains, and the jumps into them, that differ from their declaration have drifted.
//     Undeclared chains that other owners' rules lead to do not count.
//   - Every other difference is a decision of the rules' owner.
func Judge(want Wanted, seen Seen) Finding {
	if seen.Err != nil {
		return Finding{Verdict: Unknown, Err: seen.Err}
	}
	unmarked := want.Needless(seen)
	if want.Mark.Nonce == "" {
		if unmarked || seen.Table == nil && want.Section.Bare() {
			return Finding{Verdict: Intact, Unmarked: unmarked}
		}
		return Finding{Verdict: Unknown}
	}
	v := judgeCanary(want, seen.Table)
	if v == Intact {
		return judgeStanding(want, seen)
	}
	drilled := want.Mark.drilled(seen.Table)
	if unmarked && !drilled {
		return Finding{Verdict: Intact, Unmarked: true}
	}
	if drilled {
		f := judgeStanding(want, seen)
		if f.Drilled = true; !f.Verdict.Loss() {
			f.Verdict = v
		}
		return f
	}
	f := Finding{Verdict: v, MarkLost: true, Witnesses: missingWitnesses(want, seen.Table)}
	for _, h := range missingJumps(want.Section, seen.Table) {
		// Its owner may already have written the jump in other words. Then the owner's version
		// counts.
		if v == Replaced || !Superseded(want.Section, seen.Table.Rules(h.Chain), h) {
			f.Jumps = append(f.Jumps, h)
		}
	}
	emptied, missing := lostChains(want.Section, seen)
	f.Emptied, f.Missing = rules.ChainNames(emptied), missing
	f.remember(want, seen)
	f.rememberPurged(want, seen)
	return f
}

// judgeStanding judges a table with its canary, claimed chains included, for Judge.
func judgeStanding(want Wanted, seen Seen) Finding {
	if want.Claimed == nil {
		return judgeContent(want, seen)
	}
	declared, others := want.Section.Split(want.Claimed)
	standing, rest := seen.Section.Split(want.Claimed)
	want.Section, seen.Section = others, rest
	standing.Chains = withoutReferenced(declared, standing.Chains, seen.Table, want.Claimed)
	declared, standing = withoutLeftOut(declared, standing, seen.Table)
	f := judgeContent(want, seen)
	if !sameContent(declared, standing) {
		f.Drift = rules.Diff(declared, standing)
		if !f.Verdict.Loss() {
			f.Verdict = Drifted
		}
		_, _, led := withoutLedTo(others, seen)
		f.losesWith(declared.Join(others), seen.Table, led)
	}
	return f
}

// judgeCanary returns Intact if the canary is present, or else the loss that it shows.
func judgeCanary(want Wanted, t *rules.Table) Verdict {
	if t == nil {
		return TableDeleted
	}
	c := t.Chain(want.CanaryChain)
	switch {
	case c == nil:
		return ChainDeleted
	case len(c.Rules) == 0:
		return Emptied
	case want.Mark.Nonce.standsIn(c.Rules):
		return Intact
	default:
		return Replaced
	}
}

// judgeContent judges a table with its canary, without claimed chains, for judgeStanding.
func judgeContent(want Wanted, seen Seen) Finding {
	f := Finding{Verdict: Intact, Witnesses: missingWitnesses(want, seen.Table)}
	var removed []rules.Jump // perhaps
	for _, h := range missingJumps(want.Section, seen.Table) {
		switch {
		case slices.Contains(f.Witnesses, h.Chain):
			if !Superseded(want.Section, seen.Table.Rules(h.Chain), h) {
				f.Jumps = append(f.Jumps, h)
			}
		case want.jumpPurged(h):
			f.Jumps = append(f.Jumps, h)
		case h.Named || hasOtherJump(seen.Table, h):
			// Its owner removed it. If a Named jump is missing, nothing else shows whether its
			// owner removed it.
		case !hasRules(seen.Table, h.Rule.Target):
			removed = append(removed, h)
		case seen.over(h):
			f.Jumps = append(f.Jumps, h)
		default:
			f.Waiting = append(f.Waiting, h)
		}
	}
	emptied, missing, led := withoutLedTo(want.Section, seen)
	gone := f.judgePurged(want, &emptied, missing, led)
	f.judgeEmptied(want, seen, emptied)
	// The jump to a chain that is put back may have been deleted with the chain's rules: an
	// `iptables-restore --noflush` does both at once. Jumps to other empty chains were removed
	// by their owner.
	for _, h := range removed {
		if slices.Contains(f.Emptied, h.Rule.Target) {
			f.Waiting = append(f.Waiting, h)
		}
	}
	robbed := f.judgeRobbed(want, seen)
	thinned := f.takePurged(want, seen.Table)
	switch {
	case len(f.Emptied)+len(gone) > 0 || thinned:
		f.Verdict = Emptied
		// Missing chains below an emptied chain were lost with it.
		f.Missing = merge(slices.Concat(f.Missing, below(want.Section, f.Emptied, missing)), gone)
	case len(f.Jumps) > 0 || len(f.Witnesses) > 0 || robbed:
		f.Verdict = JumpsMissing
	case !sameContent(want.Section, seen.Section):
		f.Verdict = Changed
	}
	if f.Verdict.Loss() {
		f.losesWith(want.Section, seen.Table, led)
	}
	return f
}

func isComment(r rules.Rule, comment string) bool {
	c, ok := markComment(r)
	return ok && c == comment
}

// missingWitnesses returns the built-in chains whose witness is missing: they were flushed.
func missingWitnesses(want Wanted, t *rules.Table) []string {
	var gone []string
	for _, chain := range want.Mark.Witnessed {
		isWitness := func(r rules.Rule) bool { return isComment(r, want.Mark.Nonce.WitnessComment()) }
		if !t.Chain(chain).LeftOut() && !slices.ContainsFunc(t.Rules(chain), isWitness) {
			gone = append(gone, chain)
		}
	}
	return gone
}

// missingJumps returns the jumps that t lacks. It counts copies: if a jump is wanted twice and
// t has it once, it is missing once.
func missingJumps(s rules.Section, t *rules.Table) []rules.Jump {
	var missing []rules.Jump
	for i, h := range s.Jumps {
		if t.Chain(h.Chain).LeftOut() {
			continue // its jumps are unknown
		}
		if countRule(t, h) <= rules.Copies(s.Jumps[:i], h) {
			missing = append(missing, h)
		}
	}
	return missing
}

// countRule returns how often the jump's chain in t has the jump's rule, in any spelling.
// missingJumps compares it with the copies that ought to be there.
func countRule(t *rules.Table, h rules.Jump) int {
	n := 0
	for _, r := range t.Rules(h.Chain) {
		if r.Equal(h.Rule) {
			n++
		}
	}
	return n
}

// hasOtherJump reports whether another rule of the built-in chain jumps to the jump's target.
// An owner that rewrites a jump inserts the new jump first, and deletes the old one by name
// later.
func hasOtherJump(t *rules.Table, h rules.Jump) bool {
	return slices.ContainsFunc(t.Rules(h.Chain), func(r rules.Rule) bool {
		return r.Target == h.Rule.Target && !r.Equal(h.Rule)
	})
}

// Superseded reports whether the built-in chain, which now holds the standing rules, has a new
// jump to the same target. Then its owner rewrote the jump, as kube-proxy does when an upgrade
// changes a match. It is false for a Named jump: another MASQUERADE belongs to another network.
func Superseded(s rules.Section, standing []rules.Rule, h rules.Jump) bool {
	return !h.Named && slices.ContainsFunc(standing, func(r rules.Rule) bool {
		return r.Target == h.Rule.Target && !slices.ContainsFunc(s.Jumps, func(k rules.Jump) bool {
			return k.Chain == h.Chain && k.Rule.Equal(r)
		})
	})
}

func hasRules(t *rules.Table, chain string) bool { return len(t.Rules(chain)) > 0 }

// lostChains returns the wanted chains of s that have lost all of their rules, and the names of
// wanted chains that do not exist.
func lostChains(s rules.Section, seen Seen) (emptied []rules.Chain, missing []string) {
	for _, changed := range rules.ChangedChains(s.Chains, seen.Section.Chains) {
		if changed.Was < 0 {
			break // the section has no more chains
		}
		wanted := s.Chains[changed.Was]
		switch c := seen.Table.Chain(wanted.Name); {
		case c == nil:
			missing = append(missing, wanted.Name)
		case len(c.Rules) == 0 && len(wanted.Rules) > 0:
			emptied = append(emptied, wanted)
		}
	}
	return emptied, missing
}

// orphaned returns the index of a rule of the emptied chain, or -1. The rule led to a chain
// that still has rules and that only this chain referenced. An owner that empties its chain on
// purpose removes the chains below it in the same transaction, except shared chains. So a rule
// that leads to a shared chain is the last choice.
func orphaned(want Wanted, t *rules.Table, emptied rules.Chain) int {
	toShared := -1
	for i, r := range emptied.Rules {
		switch {
		case !hasRules(t, r.Target) || referenced(t, r.Target) || !onlyReferrer(want.complete(), emptied.Name, r.Target):
		case !want.shared(r.Target):
			return i
		case toShared < 0:
			toShared = i
		}
	}
	return toShared
}

// leads reports whether a rule of c leads to a chain.
func leads(c rules.Chain, chain string) bool {
	return slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain })
}

func referenced(t *rules.Table, chain string) bool {
	return slices.ContainsFunc(t.Chains, func(c rules.Chain) bool { return leads(c, chain) })
}

func onlyReferrer(s rules.Section, from, chain string) bool {
	return !slices.ContainsFunc(s.Chains, func(c rules.Chain) bool { return c.Name != from && leads(c, chain) }) &&
		!slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool { return h.Rule.Target == chain })
}
