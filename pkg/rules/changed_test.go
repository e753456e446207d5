package rules_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

// An owner draws the next table of an owner: a table of the same rules is the same memory.
type owner struct {
	*rand.Rand
	sorted bool // the chains are in the order of their names, as on nft
}

// targets are protected chains, chains of others, and no chains.
func (o owner) target() string {
	return fmt.Sprintf([]string{"KUBE-%02d", "ufw-%02d", "DNAT%.0d", "TRICKLE-CANARY%.0d"}[o.IntN(4)], o.IntN(12))
}

func (o owner) rules(chain string) []rules.Rule {
	if o.IntN(15) == 0 {
		return rules.LeftOut(chain)
	}
	list := make([]rules.Rule, o.IntN(4))
	for i := range list {
		target := o.target()
		list[i] = rules.Rule{Spec: fmt.Sprintf("-s 10.0.0.%d/32 -j %s", o.IntN(250), target), Target: target}
	}
	return list
}

// first draws a table with its built-in chains.
func (o owner) first() *rules.Table {
	t := rules.NewTable(rules.Nat)
	for _, name := range rules.BuiltinChains(rules.Nat) {
		t.Add(rules.Chain{Name: name, Policy: "ACCEPT", Rules: o.rules(name)})
	}
	return t
}

// next draws a few changes of a table.
func (o owner) next(t *rules.Table) *rules.Table {
	chains := slices.Clone(t.Chains)
	for range o.IntN(4) {
		name := o.target()
		i := slices.IndexFunc(chains, func(c rules.Chain) bool { return c.Name == name })
		switch {
		case strings.HasPrefix(name, "DNAT"):
			i = o.IntN(4)
			chains[i].Rules = o.rules(chains[i].Name)
		case i < 0:
			chains = slices.Insert(chains, 4+o.IntN(len(chains)-3), rules.Chain{Name: name, Rules: o.rules(name)})
		case o.IntN(3) == 0:
			chains = slices.Delete(chains, i, i+1)
		default:
			chains[i].Rules = o.rules(name)
		}
	}
	if own := chains[4:]; !o.sorted && len(own) > 1 && o.IntN(4) == 0 {
		own[0], own[len(own)-1] = own[len(own)-1], own[0]
	}
	if o.sorted {
		slices.SortFunc(chains[4:], func(a, b rules.Chain) int { return strings.Compare(a.Name, b.Name) })
	}
	next := rules.NewTable(rules.Nat)
	for _, c := range chains {
		next.Add(c)
	}
	return next
}

// histories calls see with some histories of tables, in the order of names and in others.
func histories(t *testing.T, see func(t *testing.T, o owner, last, next *rules.Table)) {
	for seed := range uint64(60) {
		o := owner{rand.New(rand.NewPCG(seed, 1)), seed%2 == 0}
		last := o.first()
		for range 60 {
			next := o.next(last)
			if see(t, o, last, next); t.Failed() {
				t.Fatalf("seed %d", seed)
			}
			last = next
		}
	}
}

// fields is a Section without its methods. Else cmp calls Section.Equal, which compares neither
// the order of the chains nor LedTo, DependsOn, Alone and Policies.
type fields rules.Section

// TestExtractNextIsExtract: a capture extracts a table from the changes since the last one. The
// section must be that of the table alone.
func TestExtractNextIsExtract(t *testing.T) {
	s := selector(t, "KUBE-*")
	p := rules.Protection{Chain: s.Protects, Follow: s.Protection().Follow}
	lost := []rules.Rule{{Spec: "-j ufw-03", Target: "ufw-03"}, {Spec: "-j ufw-04", Target: "ufw-04"}}
	var x rules.Extraction
	var told rules.Section
	was := fmt.Sprint(told)
	histories(t, func(t *testing.T, o owner, last, next *rules.Table) {
		missing := lost[:o.IntN(3)]
		earlier, before := told, was
		x = p.ExtractNext(x, next, isMark, missing)
		want := p.ExtractNext(rules.Extraction{}, next, isMark, missing).Section
		if d := cmp.Diff(fields(want), fields(x.Section), cmpopts.EquateEmpty()); d != "" {
			t.Errorf("the section of the changes (-table, +changes):\n%s", d)
		}
		if now := fmt.Sprint(earlier); now != before {
			t.Errorf("the earlier section was %s, and became %s", before, now)
		}
		told, was = x.Section, fmt.Sprint(x.Section)
		if again := p.ExtractNext(x, next, isMark, missing).Section; !again.Same(x.Section) {
			t.Errorf("the same table gave %v, and then %v", x.Section, again)
		}
	})
}

// TestExtractNextInAnotherOrder: the kernel's order of legacy chains is their owner's, and a
// table may lose its last built-in chain. No protected chain gets lost with that.
func TestExtractNextInAnotherOrder(t *testing.T) {
	p := rules.Protection{Chain: selector(t, "KUBE-*").Protects}
	builtin := rules.Chain{Name: "POSTROUTING", Policy: "ACCEPT"}
	empty, leftOut := rules.Chain{Name: "KUBE-A"}, rules.Chain{Name: "KUBE-L", Rules: rules.LeftOut("KUBE-L")}
	full := rules.Chain{Name: "KUBE-M", Rules: []rules.Rule{{Spec: "-j ufw-1", Target: "ufw-1"}}}
	for name, tables := range map[string][][]rules.Chain{
		"the order changes, then a chain": {{full, empty}, {empty, full}, {empty, {Name: full.Name}}},
		"a chain left out changes places": {{full, leftOut}, {leftOut, full}},
		"the built-in chain is gone":      {{builtin, leftOut, full}, {leftOut, full}},
	} {
		var x rules.Extraction
		for i, chains := range tables {
			table := rules.NewTable(rules.Nat)
			for _, c := range chains {
				table.Add(c)
			}
			x = p.ExtractNext(x, table, isMark, nil)
			if d := cmp.Diff(fields(p.Extract(table, isMark)), fields(x.Section), cmpopts.EquateEmpty()); d != "" {
				t.Errorf("%s: table %d (-table, +changes):\n%s", name, i, d)
			}
		}
	}
}

// TestChangedChains compares it with a search of each chain.
func TestChangedChains(t *testing.T) {
	histories(t, func(t *testing.T, o owner, last, next *rules.Table) {
		if o.IntN(5) == 0 {
			last = rules.NewTable(rules.Nat)
		}
		var want []rules.ChangedChain
		for i, c := range last.Chains {
			j := slices.IndexFunc(next.Chains, func(n rules.Chain) bool { return n.Name == c.Name })
			if j < 0 || len(c.Rules) != len(next.Chains[j].Rules) || len(c.Rules) > 0 && &c.Rules[0] != &next.Chains[j].Rules[0] {
				want = append(want, rules.ChangedChain{Was: i, Is: j})
			}
		}
		for j, c := range next.Chains {
			if last.Chain(c.Name) == nil {
				want = append(want, rules.ChangedChain{Was: -1, Is: j})
			}
		}
		got := rules.ChangedChains(last.Chains, next.Chains)
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("from %v to %v (-want, +got):\n%s", last.Chains, next.Chains, d)
		}
	})
}

// TestOpaqueOfChanges: the status lists opaque rules by the changes of the generation.
func TestOpaqueOfChanges(t *testing.T) {
	var found []rules.TextlessRule
	var before rules.Section
	opaque := func(o owner, t *rules.Table) rules.Section {
		s := rules.Section{Chains: slices.Clone(t.Chains[4:]), Jumps: []rules.Jump{{Chain: "INPUT", Rule: rules.OpaqueRule([]byte{1}, "", "why")}}}
		if i := o.IntN(len(s.Chains) + 1); i < len(s.Chains) {
			s.Chains[i].Rules = append(slices.Clone(s.Chains[i].Rules), rules.OpaqueRule([]byte{2, byte(i)}, "", "why"))
		}
		return s
	}
	byPlace := cmpopts.SortSlices(func(a, b rules.TextlessRule) bool { return fmt.Sprint(a) < fmt.Sprint(b) })
	histories(t, func(t *testing.T, o owner, _, next *rules.Table) {
		s := opaque(o, next)
		found = s.Opaque(before, found)
		before = s
		if d := cmp.Diff(s.Opaque(rules.Section{}, nil), found, byPlace); d != "" {
			t.Errorf("(-all, +changes):\n%s", d)
		}
	})
}
