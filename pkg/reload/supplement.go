package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Supplement returns a read of one table as if its quarantined rules were in force, so that
// learning does not forget them. It also returns the quarantine without rules that are in force
// again, and without rules whose chain its owner has written since. want is the table's generation.
// piecewise is Protection.Piecewise; it may be nil.
//
// A chain that is empty or missing may be the beginning of a flush that proceeds chain by chain. So
// its quarantine ends only when Learn has accepted that, and want has no rule of it any more.
//
// The read must be an Examiner's, with this quarantine: it has the chains of other owners to which
// only quarantined rules lead.
//
// A rule that an owner put back ends only its own quarantine. The rules that wait for it are still
// lost. They stay in the generation behind it, and Readmit writes them.
func (q Quarantine) Supplement(f rules.Family, t rules.TableName, want, seen rules.Section, piecewise func(chain string) bool) (rules.Section, Quarantine) {
	list := q[f.Table(t)]
	if len(list) == 0 {
		return seen, q
	}
	s := newSupplement(want, list)
	seen.Chains = slices.Clone(seen.Chains)
	at := make(map[string]int, len(seen.Chains))
	for i, c := range seen.Chains {
		at[c.Name] = i
		if s.held[c.Name] != nil {
			seen.Chains[i].Rules = s.chain(c, piecewise != nil && piecewise(c.Name))
		}
	}
	s.keepMissing(at)
	for _, h := range list {
		if h.Rule.LeftOut() && !rules.Builtin(t, h.Chain) {
			i, stands := at[h.Chain]
			full, wanted := s.full[h.Chain]
			switch {
			case !wanted || stands && len(seen.Chains[i].Rules) > 0: // its owner wrote the chain
				continue
			case !stands:
				at[h.Chain] = len(seen.Chains)
				seen.Chains = append(seen.Chains, full)
			default:
				seen.Chains[i] = full
			}
			s.kept.add(h.Chain, h.Rule)
		}
	}
	if len(s.kept) > 0 {
		seen.DependsOn = seen.NotLedTo(union(want.DependsOn, seen.DependsOn))
	}
	missing := func(h rules.Jump) bool {
		if h.LeftOut() && slices.ContainsFunc(seen.Jumps, func(o rules.Jump) bool { return o.Chain == h.Chain }) {
			return false // its chain has jumps again
		}
		return !slices.ContainsFunc(seen.Jumps, h.Same) && s.held.has(h.Chain, h.Rule) && !s.superseded(seen.Jumps, h)
	}
	for _, h := range want.Jumps {
		if missing(h) {
			s.kept.add(h.Chain, h.Rule)
		}
	}
	seen.Jumps = keepJumps(want.Jumps, seen.Jumps, missing)
	var still []QuarantinedRule
	for _, h := range list {
		if s.kept.take(h.Chain, h.Rule) {
			still = append(still, h)
		}
	}
	s.keepTargets(&seen, still)
	return seen, q.With(f.Table(t), still)
}

// A supplement adds the quarantined rules of one table to a read of it.
type supplement struct {
	want  rules.Section
	full  map[string]rules.Chain // want's chains
	lists map[string][]QuarantinedRule
	held  heldIndex
	kept  heldIndex // the rules that stay quarantined
}

// newSupplement indexes the generation's section want, and list, the quarantined rules of the
// same table, for Supplement. No rule is kept yet.
func newSupplement(want rules.Section, list []QuarantinedRule) *supplement {
	s := &supplement{
		want: want, full: make(map[string]rules.Chain, len(want.Chains)),
		lists: map[string][]QuarantinedRule{}, held: heldRules(list), kept: heldIndex{},
	}
	for _, c := range want.Chains {
		s.full[c.Name] = c
	}
	for _, h := range list {
		s.lists[h.Chain] = append(s.lists[h.Chain], h)
	}
	return s
}

// chain returns the rules of a chain, with its quarantined rules that are still lost.
//
// Many owners write rules of their own to a piecewise chain. An owner of any other chain writes it
// as a whole. Such a chain is as its owner meant it if it holds a new rule, or lacks a rule that
// the replay left. The same holds if it has another order, or has a rule that waits. If it has
// gained only quarantined rules that do not wait, the others are still lost.
func (s *supplement) chain(c rules.Chain, piecewise bool) []rules.Rule {
	full, wanted := s.full[c.Name]
	if !wanted || full.LeftOut() || c.LeftOut() {
		return c.Rules
	}
	l := newLayout(c.Rules, full.Rules)
	held, waits := heldIndex{}, heldIndex{}
	for _, h := range s.lists[c.Name] {
		held.add(h.Chain, h.Rule)
		if h.Waits {
			waits.add(h.Chain, h.Rule)
		}
	}
	lost := make([]bool, len(full.Rules)) // quarantined, and still missing
	wrote := false                        // its owner wrote the chain as a whole
	known, next := 0, len(c.Rules)
	for i, r := range slices.Backward(full.Rules) {
		switch quarantined := held.take(c.Name, r); {
		case l.at[i] < 0 && quarantined:
			lost[i] = true
			waits.take(c.Name, r)
		case l.at[i] < 0:
			wrote = true
		case quarantined:
			known++
			wrote = wrote || waits.take(c.Name, r)
		default:
			known++
			wrote, next = wrote || l.at[i] > next, l.at[i]
		}
	}
	emptied := wrote && len(c.Rules) == 0 && !piecewise
	if !slices.Contains(lost, true) || !piecewise && !emptied && (wrote || known < len(c.Rules)) {
		return c.Rules
	}
	for i, r := range full.Rules {
		if lost[i] {
			s.kept.add(c.Name, r)
		}
	}
	if emptied { // and Learn must see that
		return c.Rules
	}
	l.merge(full.Rules, func(i int) (rules.Rule, bool) { return full.Rules[i], lost[i] })
	return l.rules()
}

// superseded reports whether the owner of a quarantined jump has written it in other words.
// Then its quarantine ends. A jump that a replay wrote without its nfacct match does not count.
func (s *supplement) superseded(seen []rules.Jump, h rules.Jump) bool {
	standing := slices.DeleteFunc(jumpRulesIn(seen, h.Chain), func(r rules.Rule) bool {
		return slices.ContainsFunc(s.want.Jumps, func(k rules.Jump) bool { return k.Chain == h.Chain && withoutAccounts(k.Rule).Equal(r) })
	})
	return canary.Superseded(s.want, standing, h)
}

// withoutAccounts returns a rule without its nfacct matches, as a replay writes it if their
// objects are missing.
func withoutAccounts(r rules.Rule) rules.Rule {
	for _, name := range r.Needs().Accounts {
		r = r.WithoutAccount(name)
	}
	return r
}

// keepMissing keeps the quarantine of chains that the generation has and the read lacks. Their
// owner may not have removed them: a flush may have begun. at has the chains of the read.
func (s *supplement) keepMissing(at map[string]int) {
	for _, c := range s.want.Chains {
		if _, there := at[c.Name]; there || s.held[c.Name] == nil {
			continue
		}
		for _, r := range c.Rules {
			if !r.LeftOut() && s.held.has(c.Name, r) {
				s.kept.add(c.Name, r)
			}
		}
	}
}

// keepTargets makes the section depend on missing chains of other owners to which quarantined rules
// led. Learn keeps such a chain for as long as it may come back with the rest of a flush.
func (s *supplement) keepTargets(seen *rules.Section, quarantined []QuarantinedRule) {
	var gone []string
	for _, h := range quarantined {
		if s.want.IsLedTo(h.Rule.Target) && !seen.IsLedTo(h.Rule.Target) {
			gone = append(gone, h.Rule.Target)
		}
	}
	if len(gone) > 0 {
		seen.DependsOn = union(seen.DependsOn, gone)
	}
}
