package iptables

import (
	"cmp"
	"slices"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// DefaultMaxRules is the number of rules that canaryd keeps of one family, unless
// Config.MaxRules sets another. 5,000 services have 46,578 rules. docs/measured.md has the
// memory that both families take then.
const DefaultMaxRules = 100_000

// A LeftOut is a chain whose rules are not kept, because there are too many.
type LeftOut struct {
	Family rules.Family
	Table  rules.TableName
	Chain  string
	Rules  int // at the last count
}

// A budget chooses the chains of a family whose rules are kept, when the rules of all chains are
// too many. It leaves out unguarded chains first, then guarded ones, and of each kind the largest
// first.
type budget struct {
	*nft.Budget[Place]
	guards func(Place) bool
}

// newBudget returns the budget of a family, for open. most is the limit in units, 0 for none.
// canary is the name of canaryd's own chain, which counts as guarded. protects reports whether
// a chain is protected; nil means all.
func newBudget(most int, canary string, protects func(chain string) bool) *budget {
	guards := func(p Place) bool {
		return slices.Contains(protect.Tables(), p.Table) &&
			(protects == nil || p.Chain == canary || rules.Builtin(p.Table, p.Chain) || protects(p.Chain))
	}
	return &budget{nft.NewBudget(most, func(p, q nft.Weighed[Place]) int {
		if g, h := guards(p.Part), guards(q.Part); g != h {
			if g {
				return 1
			}
			return -1
		}
		return cmp.Or(cmp.Compare(q.Units(), p.Units()), cmp.Compare(p.Part.Table, q.Part.Table), cmp.Compare(p.Part.Chain, q.Part.Chain))
	}), guards}
}

// LeftOut returns the guarded chains whose rules are not kept, by family and table, the largest
// first. The daemon warns about them after a read: nothing guards their rules. It may be called
// concurrently.
func (k *Kernel) LeftOut() []LeftOut {
	var list []LeftOut
	for _, f := range k.Families() {
		b := k.budgets[f]
		for p, w := range b.Left() {
			if b.guards(p) {
				list = append(list, LeftOut{f, p.Table, p.Chain, w.Rules})
			}
		}
	}
	sorting.Stable(list, func(x, y LeftOut) int {
		return cmp.Or(cmp.Compare(x.Family, y.Family), cmp.Compare(x.Table, y.Table), cmp.Compare(y.Rules, x.Rules), cmp.Compare(x.Chain, y.Chain))
	})
	return list
}
