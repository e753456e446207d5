package canary

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Verdict says what became of one table.
type Verdict string

// The verdicts. Unknown, Intact, Changed and Refused are no loss.
const (
	Unknown      Verdict = "unknown"       // it could not be read, or nothing was planted yet
	Intact       Verdict = "intact"        // the generation is in force
	Changed      Verdict = "changed"       // marks stand, content moved: its owner decided so
	JumpsMissing Verdict = "jumps_missing" // a built-in chain was flushed, or jumps deleted by name
	Emptied      Verdict = "emptied"       // rules flushed, chains left (iptables -F)
	ChainDeleted Verdict = "chain_deleted" // the canary's chain is gone (iptables -X, a full restore)
	TableDeleted Verdict = "table_deleted" // the table is gone (nft flush ruleset, nft delete table)
	Replaced     Verdict = "replaced"      // a canary of another planting: saved rules were restored
	Drifted      Verdict = "drifted"       // a declared source's rules were changed by a stranger
	// Refused: what is declared is not in force, because the kernel refuses a rule of
	// it. Judge does not give this one; it is for who writes what is declared.
	Refused Verdict = "refused"
)

// Loss reports whether the verdict is one that a replay answers. No verdict at
// all, of a table that was not read, is none.
func (v Verdict) Loss() bool {
	switch v {
	case "", Unknown, Intact, Changed, Refused:
		return false
	default:
		return true
	}
}

// LossKinds returns every verdict that shows loss.
func LossKinds() []Verdict {
	return []Verdict{JumpsMissing, Emptied, ChainDeleted, TableDeleted, Replaced, Drifted}
}

// Wanted is what ought to be in force in one table.
type Wanted struct {
	CanaryChain string
	Mark        Mark
	Section     rules.Section
	// Claimed tells the chains that a declared source owns: whatever else
	// somebody makes of them is drift. Nil means none.
	Claimed func(chain string) bool
	// Piecewise tells the chains that many owners share, each of which takes its
	// own rules away before the chains that they lead to. Nil means none.
	Piecewise func(chain string) bool
}

// Seen is what a full read showed of one table.
type Seen struct {
	Table *rules.Table // nil: the table does not exist
	Err   error        // not nil: the table could not be read
	// Section is what rules.Protection.Extract learned from Table.
	Section rules.Section
	// Quiet says that nothing protected in this family changed for the jump
	// grace, so that a jump that was deleted by name will not be followed by
	// its chain.
	Quiet bool
	// Stood tells the chains that have stood empty for the jump grace, also where the
	// family has not been quiet; nil means none.
	Stood func(chain string) bool
	// Before is what the last read in the course of the same loss found; the
	// zero Finding if there was none.
	Before Finding
}

// A Finding is a verdict and what it rests on.
type Finding struct {
	Verdict Verdict
	// MarkLost: the canary is missing, emptied, deleted or another's. The
	// table's content is then judged by nothing older than this planting.
	MarkLost bool
	// Witnesses are the built-in chains whose witness is gone.
	Witnesses []string
	// Jumps are the jumps that are lost, those to put back.
	Jumps []rules.Jump
	// Waiting are jumps that are missing while their witness stands, and of an emptied
	// chain that many share a jump to a full one, while the grace runs: perhaps their
	// owner is at work.
	Waiting []rules.Jump
	// Emptied and Missing are protected chains that hold nothing or are gone
	// and ought not to be; in a table that lost its mark, all such chains.
	Emptied []string
	Missing []string
	// Released are protected chains that are gone although the flush left
	// chains standing: their owner removed them meanwhile.
	Released []string
	// Restored is the canary of the saved rules that stood in the table in the course
	// of this loss; empty if none did. Brought are protected chains that only they
	// had, as far as nobody fills them. Lacked are the chains that are missing and
	// were when the table was first seen without them or, of saved rules, with these.
	Restored string
	Brought  []string
	Lacked   []string
	// Drift is in which claimed chains and jumps are not as declared.
	Drift rules.Difference
	// Err is why the verdict is unknown.
	Err error
}

// Rules that their owners never leave empty (kube-proxy and kubelet): one that
// is empty was flushed.
func neverEmpty(table rules.TableName, chain string) bool {
	switch table {
	case rules.Nat:
		return chain == "KUBE-SERVICES" || chain == "KUBE-MARK-MASQ" || chain == "KUBE-POSTROUTING"
	case rules.Filter:
		return chain == "KUBE-FORWARD" || chain == "KUBE-FIREWALL"
	default:
		return false
	}
}

// Judge decides what became of one table, from state alone. It is a pure
// function. Its rules, in order:
//
//   - what could not be read, or never had a canary, is unknown; but a table that
//     does not exist and of which nothing is wanted is intact;
//   - a canary that is missing, empty or another planting's: the table was
//     deleted, flushed or replaced; where it is empty, chains were left
//     standing, and those few that are gone were removed by their owner since
//     (a pod's, by CNI DEL), who finds nothing else of them to take away; but
//     what the flush found missing already, see lacked;
//   - a witness gone from a built-in chain: that chain was flushed;
//   - an emptied chain is lost if its owner never empties it, or if chains that
//     only it referenced still hold rules; of a chain that many share, the last one to
//     leave takes away the jump first (portmap, netavark), so this has the grace;
//   - a jump missing beside a standing witness was deleted by name: lost only
//     if its target still has rules, no other jump took its place, and the
//     family has been quiet for the grace; one that leads nowhere (Docker's
//     MASQUERADE) never is, its owner takes just that away with the network;
//   - claimed chains and the jumps into them that are not exactly as declared
//     have drifted, but for chains too many that rules of others lead to;
//   - every other difference is a decision of the rules' owner.
func Judge(want Wanted, seen Seen) Finding {
	if seen.Err != nil {
		return Finding{Verdict: Unknown, Err: seen.Err}
	}
	if want.Mark.Nonce == "" {
		if seen.Table == nil && len(want.Section.Chains)+len(want.Section.Jumps) == 0 {
			return Finding{Verdict: Intact}
		}
		return Finding{Verdict: Unknown}
	}
	if v := judgeCanary(want, seen.Table); v != Intact {
		f := Finding{Verdict: v, MarkLost: true}
		f.Witnesses = missingWitnesses(want, seen.Table)
		for _, h := range missingJumps(want.Section, seen.Table) {
			// An owner that already re-jumped in other words has the last one.
			if v == Replaced || !superseded(want.Section, seen.Table, h) {
				f.Jumps = append(f.Jumps, h)
			}
		}
		emptied, missing := lostChains(want.Section, seen.Table)
		f.Emptied = names(emptied)
		f.Missing = missing
		f.remember(want, seen)
		return f
	}
	if want.Claimed == nil {
		return judgeContent(want, seen)
	}
	declared, others := want.Section.Split(want.Claimed)
	standing, rest := seen.Section.Split(want.Claimed)
	want.Section, seen.Section = others, rest
	standing.Chains = withoutHeld(declared, standing.Chains, seen.Table, want.Claimed)
	declared, standing = compared(declared, standing, seen.Table)
	f := judgeContent(want, seen)
	if !sameContent(declared, standing) {
		f.Drift = rules.Diff(declared, standing)
		if !f.Verdict.Loss() {
			f.Verdict = Drifted
		}
	}
	return f
}

// judgeCanary returns Intact or what became of the canary.
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
	case len(c.Rules) == 1 && isComment(c.Rules[0], want.Mark.Nonce.Comment()):
		return Intact
	default:
		return Replaced
	}
}

func judgeContent(want Wanted, seen Seen) Finding {
	f := Finding{Verdict: Intact, Witnesses: missingWitnesses(want, seen.Table)}
	for _, h := range missingJumps(want.Section, seen.Table) {
		switch {
		case slices.Contains(f.Witnesses, h.Chain):
			if !superseded(want.Section, seen.Table, h) {
				f.Jumps = append(f.Jumps, h)
			}
		case h.Named || !hasRules(seen.Table, h.Rule.Target) || reworded(seen.Table, h):
			// Its owner let go of it. A rule that leads nowhere leaves nothing
			// behind that could tell whether its owner meant it.
		case seen.Quiet:
			f.Jumps = append(f.Jumps, h)
		default:
			f.Waiting = append(f.Waiting, h)
		}
	}
	emptied, missing := lostChains(want.Section, seen.Table)
	for _, c := range emptied {
		shared := want.Piecewise != nil && want.Piecewise(c.Name)
		stood := seen.Quiet || seen.Stood != nil && seen.Stood(c.Name)
		if neverEmpty(seen.Table.Name, c.Name) {
			f.Emptied = append(f.Emptied, c.Name)
		} else if i := orphaned(want.Section, seen.Table, c); i >= 0 && shared && !stood {
			f.Waiting = append(f.Waiting, rules.Jump{Chain: c.Name, Rule: c.Rules[i]})
		} else if i >= 0 {
			f.Emptied = append(f.Emptied, c.Name)
		}
	}
	switch {
	case len(f.Emptied) > 0:
		f.Verdict = Emptied
		// What hung below an emptied chain and is gone was lost with it.
		f.Missing = missing
	case len(f.Jumps) > 0 || len(f.Witnesses) > 0:
		f.Verdict = JumpsMissing
	case !sameContent(want.Section, seen.Section):
		f.Verdict = Changed
	}
	return f
}

func isComment(r rules.Rule, comment string) bool {
	c, ok := markComment(r)
	return ok && c == comment
}

func hasWitness(t *rules.Table, chain string, n Nonce) bool {
	c := t.Chain(chain)
	return c != nil && slices.ContainsFunc(c.Rules, func(r rules.Rule) bool {
		return isComment(r, n.WitnessComment())
	})
}

func missingWitnesses(want Wanted, t *rules.Table) []string {
	var gone []string
	for _, chain := range want.Mark.Witnessed {
		if !t.Chain(chain).LeftOut() && !hasWitness(t, chain, want.Mark.Nonce) {
			gone = append(gone, chain)
		}
	}
	return gone
}

// missingJumps counts: a jump that is wanted twice and stands once is missing
// once.
func missingJumps(s rules.Section, t *rules.Table) []rules.Jump {
	var missing []rules.Jump
	for i, h := range s.Jumps {
		if t.Chain(h.Chain).LeftOut() {
			continue // which jumps it holds is not known
		}
		nth := 1
		for _, before := range s.Jumps[:i] {
			if before.Same(h) {
				nth++
			}
		}
		if countRule(t, h) < nth {
			missing = append(missing, h)
		}
	}
	return missing
}

func countRule(t *rules.Table, h rules.Jump) int {
	n := 0
	if c := t.Chain(h.Chain); c != nil {
		for _, r := range c.Rules {
			if r.Equal(h.Rule) {
				n++
			}
		}
	}
	return n
}

// reworded reports whether another rule of the built-in chain jumps to the
// jump's target: an owner that rewrites a jump inserts the new one first and
// deletes the old one by name, however long after.
func reworded(t *rules.Table, h rules.Jump) bool {
	c := t.Chain(h.Chain)
	return c != nil && slices.ContainsFunc(c.Rules, func(r rules.Rule) bool {
		return r.Target == h.Rule.Target && !r.Equal(h.Rule)
	})
}

// superseded reports whether the built-in chain now holds a jump to the same
// target that was not there before: its owner rewrote the jump, as kube-proxy
// does when an upgrade changes a match.
//
// Of a rule that leads nowhere there is no such thing: another MASQUERADE is
// another network's.
func superseded(s rules.Section, t *rules.Table, h rules.Jump) bool {
	c := t.Chain(h.Chain)
	return !h.Named && c != nil && slices.ContainsFunc(c.Rules, func(r rules.Rule) bool {
		return r.Target == h.Rule.Target && !slices.ContainsFunc(s.Jumps, func(k rules.Jump) bool {
			return k.Chain == h.Chain && k.Rule.Equal(r)
		})
	})
}

func hasRules(t *rules.Table, chain string) bool {
	c := t.Chain(chain)
	return c != nil && len(c.Rules) > 0
}

// lostChains returns the wanted chains that are there without the rules that
// they ought to have, and those that are not there.
func lostChains(s rules.Section, t *rules.Table) (emptied []rules.Chain, missing []string) {
	for _, wanted := range s.Chains {
		c := t.Chain(wanted.Name)
		switch {
		case c == nil:
			missing = append(missing, wanted.Name)
		case len(c.Rules) == 0 && len(wanted.Rules) > 0:
			emptied = append(emptied, wanted)
		}
	}
	return emptied, missing
}

func names(chains []rules.Chain) []string {
	var list []string
	for _, c := range chains {
		list = append(list, c.Name)
	}
	return list
}

// orphaned returns the first of the emptied chain's rules that led to a chain that only
// this one referenced and that still holds rules, or -1: an owner that empties a chain
// of its own on purpose removes what hung below it in the same transaction.
func orphaned(s rules.Section, t *rules.Table, emptied rules.Chain) int {
	return slices.IndexFunc(emptied.Rules, func(r rules.Rule) bool {
		return hasRules(t, r.Target) && !referenced(t, r.Target) && onlyReferrer(s, emptied.Name, r.Target)
	})
}

func referenced(t *rules.Table, chain string) bool {
	for i := range t.Chains {
		if slices.ContainsFunc(t.Chains[i].Rules, func(r rules.Rule) bool { return r.Target == chain }) {
			return true
		}
	}
	return false
}

func onlyReferrer(s rules.Section, from, chain string) bool {
	for i := range s.Chains {
		if s.Chains[i].Name != from &&
			slices.ContainsFunc(s.Chains[i].Rules, func(r rules.Rule) bool { return r.Target == chain }) {
			return false
		}
	}
	return !slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool { return h.Rule.Target == chain })
}

// sameContent reports whether two sections hold the same chains, rules and
// jumps. Where jumps stand does not matter: positions are never corrected.
func sameContent(want, seen rules.Section) bool {
	if len(want.Chains) != len(seen.Chains) || len(want.Jumps) != len(seen.Jumps) {
		return false
	}
	at := make(map[string][]rules.Rule, len(seen.Chains))
	for _, c := range seen.Chains {
		at[c.Name] = c.Rules
	}
	for _, c := range want.Chains {
		rs, ok := at[c.Name]
		if !ok || !rules.EqualRules(c.Rules, rs) {
			return false
		}
	}
	return slices.EqualFunc(sortedJumps(want), sortedJumps(seen), rules.Jump.Same)
}

func sortedJumps(s rules.Section) []rules.Jump {
	return slices.SortedFunc(slices.Values(s.Jumps), func(a, b rules.Jump) int {
		return strings.Compare(a.String(), b.String())
	})
}
