package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStampUrgent: the stamp selects the tables for a probeOnly; the middle one
// is nat.
func TestStampUrgent(t *testing.T) {
	const large = 8 << 20
	nat := func(value uint64, size uint32) Stamp {
		return Stamp{Value: value, Shapes: [protect.TableCount]Shape{1: {7, 1000}, 2: {value, size}, 3: {9, large}}}
	}
	for _, test := range []struct {
		name          string
		before, after Stamp
		want          []rules.TableName
	}{
		{"nothing moved", nat(1, 1000), nat(1, 1000), nil},
		{"a small one", nat(1, 1000), nat(2, 1000), []rules.TableName{rules.Nat}},
		{"as large as a small one may be", nat(1, 1000), nat(2, smallTable), []rules.TableName{rules.Nat}},
		{"one that became small", nat(1, smallTable+400), nat(2, smallTable), []rules.TableName{rules.Nat}},
		{"a large one", nat(1, large), nat(2, large), nil},
		{"a large one with half of it", nat(1, large), nat(2, large/2), nil},
		{"a large one with less than half of it", nat(1, large), nat(2, large/2-1), []rules.TableName{rules.Nat}},
		{"one that grew large", nat(1, 1000), nat(2, large), nil},
		{"one that is gone", nat(1, large), nat(0, 0), []rules.TableName{rules.Nat}},
		{"the first stamp", Stamp{}, nat(1, 1000), []rules.TableName{rules.Mangle, rules.Nat}},
		{"nft", Stamp{Value: 1, Exact: true}, Stamp{Value: 2, Exact: true}, nil},
	} {
		if diff := cmp.Diff(test.want, test.after.Urgent(test.before)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}
