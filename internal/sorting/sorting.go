// Package sorting sorts slices of structs by a sort that is compiled once.
//
// The compiler makes a copy of slices.SortFunc for each type of struct, some 15 KB of the program.
// All slices of pointers share one copy, so Stable sorts pointers. Package slices sorts strings,
// numbers and pointers, and the few slices of structs that a heal sorts for each set or chain.
package sorting

import "slices"

// Stable sorts list by compare, which is negative if a comes before b. Equal elements keep their
// order. It takes twice the memory of list.
func Stable[T any](list []T, compare func(a, b T) int) {
	all := slices.Clone(list)
	order := make([]*T, len(all))
	for i := range all {
		order[i] = &all[i]
	}
	slices.SortStableFunc(order, func(a, b *T) int { return compare(*a, *b) })
	for i, e := range order {
		list[i] = *e
	}
}
