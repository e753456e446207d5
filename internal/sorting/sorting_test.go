package sorting

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
)

// TestStable: random lists come out as from slices.SortStableFunc, equal elements in their order.
func TestStable(t *testing.T) {
	type pair struct{ Key, Place int }
	byKey := func(a, b pair) int { return cmp.Compare(a.Key, b.Key) }
	random := rand.New(rand.NewPCG(1, 2))
	for length := range 100 {
		list := make([]pair, length)
		for i := range list {
			list[i] = pair{Key: random.IntN(1 + length/2), Place: i}
		}
		want := slices.Clone(list)
		slices.SortStableFunc(want, byKey)
		Stable(list, byKey)
		if diff := gocmp.Diff(want, list); diff != "" {
			t.Fatalf("%d elements (-want +got):\n%s", length, diff)
		}
	}
}
