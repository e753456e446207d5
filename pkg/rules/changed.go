package rules

import (
	"cmp"
	"slices"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A ChangedChain is a chain that differs between two lists, by its indexes. An index is -1 if
// the list lacks the chain.
type ChangedChain struct{ Was, Is int }

// ChangedChains returns the chains that differ between two lists: first those of was, in their
// order, then the chains of is alone. It compares memory, so their rules may still be equal. A
// read keeps unchanged chains in the same memory, so the result of a few changes is short.
func ChangedChains(was, is []Chain) []ChangedChain {
	if len(was) == len(is) && (len(was) == 0 || &was[0] == &is[0]) {
		return nil
	}
	var changed, gone, added []ChangedChain
	i, j := 0, 0
	for i < len(was) && j < len(is) {
		switch {
		case was[i].Name == is[j].Name:
			if !sameMemory(was[i].Rules, is[j].Rules) {
				changed = append(changed, ChangedChain{i, j})
			}
			i, j = i+1, j+1
		case was[i].Name < is[j].Name: // most lists are in the order of the names
			gone = append(gone, ChangedChain{i, -1})
			i++
		default:
			added = append(added, ChangedChain{-1, j})
			j++
		}
	}
	for ; i < len(was); i++ {
		gone = append(gone, ChangedChain{i, -1})
	}
	for ; j < len(is); j++ {
		added = append(added, ChangedChain{-1, j})
	}
	if len(gone) > 0 && len(added) > 0 {
		gone, added = matchChains(was, is, gone, added)
	}
	changed = append(changed, gone...)
	sorting.Stable(changed, func(a, b ChangedChain) int { return cmp.Compare(a.Was, b.Was) })
	return append(changed, added...)
}

// matchChains pairs chains of gone and added that have the same name: the lists have another
// order. It returns these pairs in gone, except for unchanged chains.
func matchChains(was, is []Chain, gone, added []ChangedChain) (pairs, rest []ChangedChain) {
	at := make(map[string]int, len(added))
	for _, c := range added {
		at[is[c.Is].Name] = c.Is
	}
	matched := map[int]bool{}
	for _, c := range gone {
		j, stands := at[was[c.Was].Name]
		if stands {
			matched[j], c.Is = true, j
		}
		if !stands || !sameMemory(was[c.Was].Rules, is[j].Rules) {
			pairs = append(pairs, c)
		}
	}
	return pairs, slices.DeleteFunc(added, func(c ChangedChain) bool { return matched[c.Is] })
}
