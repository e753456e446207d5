package nft

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestRuleStore: a store returns each rule as it was, and has one number for equal rules only.
// Their elements are about as long as a beginning, mostly zeros, and alike.
func TestRuleStore(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	sizes := []int{4, 5, 7, 8, 36, 37, 39, headSize, headSize + 1, 43, 44, 45, 80, 300}
	element := func() []byte {
		size := sizes[rng.IntN(len(sizes))]
		e := make([]byte, (size+3)&^3)
		for i := unix.SizeofNlAttr; i < size; i++ {
			e[i] = byte(max(0, rng.IntN(12)-10))
		}
		if size > headSize+unix.SizeofNlAttr && rng.IntN(2) == 0 { // the rest looks like an element
			copy(e[headSize:], []byte{8, 0, unix.NFTA_LIST_ELEM, 0})
		}
		binary.NativeEndian.PutUint16(e, uint16(size))
		binary.NativeEndian.PutUint16(e[2:], unix.NFTA_LIST_ELEM|uint16(rng.IntN(2))*unix.NLA_F_NESTED)
		return e
	}
	store, ids, rules := NewRuleStore(), map[string]RuleID{}, map[RuleID]Rule{}
	var room []byte
	for range 50_000 {
		r := Rule{Userdata: [][]byte{nil, {}, {0}, {1, 0}}[rng.IntN(4)]}
		for range rng.IntN(4) {
			r.Expressions = append(r.Expressions, element()...)
		}
		id, err := store.Intern(r)
		if err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("%x %#v", r.Expressions, r.Userdata)
		if was := ids[text]; was != 0 && was != id {
			t.Fatalf("the same rule is %d and %d", was, id)
		}
		ids[text], rules[id] = id, r
	}
	if len(ids) != len(rules) {
		t.Errorf("%d rules have %d numbers", len(ids), len(rules))
	}
	for id, want := range rules {
		got := store.Rule(id, room)
		room = got.Expressions
		if diff := cmp.Diff(fmt.Sprintf("%x %#v", want.Expressions, want.Userdata), fmt.Sprintf("%x %#v", got.Expressions, got.Userdata)); diff != "" {
			t.Fatalf("rule %d (-want +got)\n%s", id, diff)
		}
	}
}
