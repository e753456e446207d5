package canary

import (
	"maps"
	"slices"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// judgeRobbed adds to the finding the rules and chains of robbed containers that a table with
// its canary lacks. It reports whether there are any: then the table has a loss.
func (f *Finding) judgeRobbed(want Wanted, seen Seen) bool {
	if len(want.Robbed) == 0 {
		return false
	}
	found := false
	for a, lack := range protect.Lacking(want.Section, seen.Section, maps.Keys(want.Robbed)) {
		if !want.Robbed[a] {
			continue
		}
		found = true
		for _, name := range lack.Chains {
			switch {
			case seen.Table.Chain(name) == nil:
				f.Missing = append(f.Missing, name)
			case !slices.Contains(f.Emptied, name):
				f.Emptied = append(f.Emptied, name)
			}
		}
		for _, h := range lack.Rules {
			switch {
			case slices.Contains(lack.Chains, h.Chain): // restored with its chain
			case !rules.Builtin(seen.Table.Name, h.Chain):
				f.Taken = append(f.Taken, h)
			case !slices.ContainsFunc(f.Jumps, h.Same):
				f.Jumps = append(f.Jumps, h)
			}
		}
	}
	return found
}
