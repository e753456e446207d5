package standby

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestWhatBecameOfABaseChain: a base chain is a line of rules, and capitals are ours.
func TestWhatBecameOfABaseChain(t *testing.T) {
	for _, test := range []struct {
		was, is string
		want    Loss
	}{
		{"aKb", "aKb", Intact},
		{"aKb", "", Gone},
		{"aKb", "ab", Below},
		{"aKb", "a", Below},
		{"Kb", "b", Below},
		{"aKbLc", "aKbc", Below},
		{"aKbLc", "abLc", Below},
		{"aKbLc", "ab", Below},
		{"aKb", "K", Unclear},     // another owner's exemption before ours is gone
		{"aKbLc", "aKL", Unclear}, // or an exemption between ours
		{"aKb", "aKbx", Intact},   // rules behind ours do not matter
		{"aKb", "aKxb", Intact},
		{"aKb", "xaKb", Unclear}, // a new rule before ours
		{"aKb", "axKb", Unclear},
		{"aKb", "abx", Unclear}, // a new rule, whose place among the missing rules is not known
		{"aKb", "x", Unclear},
		{"K", "x", Unclear},
		{"KL", "LK", Unclear},
	} {
		h := &hook{}
		for _, r := range test.was {
			h.real, h.ours = append(h.real, uint64(r)), append(h.ours, r < 'a')
		}
		var now []uint64
		for _, r := range test.is {
			now = append(now, uint64(r))
		}
		if got := h.compare(now); got != test.want {
			t.Errorf("%q was %q: %v, want %v", test.is, test.was, got, test.want)
		}
	}
}

func TestWhichHooksMayBeOpened(t *testing.T) {
	all := func(l Loss) map[Hook]Loss {
		return map[Hook]Loss{Prerouting: l, Output: l, Postrouting: l}
	}
	for _, test := range []struct {
		name    string
		losses  map[Hook]Loss
		blocked []Hook
		open    []Hook
		shut    []Hook
	}{
		{"nothing is lost", all(Intact), nil, nil, nil},
		{"all is gone", all(Gone), nil, []Hook{Prerouting, Output, Postrouting}, nil},
		{"all is gone, and rules stood before ours", all(Gone), []Hook{Prerouting, Postrouting}, []Hook{Prerouting, Output, Postrouting}, nil},
		{"chains below are lost", map[Hook]Loss{Prerouting: Below, Output: Below}, nil, []Hook{Prerouting, Output}, nil},
		{"chains below are lost, and rules stand before ours", map[Hook]Loss{Prerouting: Below, Output: Below}, []Hook{Prerouting}, []Hook{Output}, []Hook{Prerouting}},
		{"other owners changed a chain", map[Hook]Loss{Prerouting: Unclear, Output: Below}, nil, []Hook{Output}, []Hook{Prerouting}},
		{"what would masquerade must stay shut", map[Hook]Loss{Prerouting: Gone, Output: Gone, Postrouting: Below}, []Hook{Postrouting}, nil, []Hook{Prerouting, Output, Postrouting}},
		{"what would masquerade has changed", map[Hook]Loss{Output: Gone, Postrouting: Unclear}, nil, nil, []Hook{Output, Postrouting}},
		{"a hook that the copy has not", map[Hook]Loss{Input: Gone}, nil, nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := &Copy{hooks: map[Hook]*hook{}}
			for _, h := range []Hook{Prerouting, Output, Postrouting} {
				c.hooks[h] = &hook{name: h.String()}
			}
			for _, h := range test.blocked {
				c.hooks[h].blocked = "another owner's rule"
			}
			open, shut := c.Openable(test.losses)
			if diff := cmp.Diff(test.open, open); diff != "" {
				t.Errorf("open (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.shut, slices.Sorted(maps.Keys(shut))); diff != "" {
				t.Errorf("shut (-want +got):\n%s", diff)
			}
			for h, why := range shut {
				if why == "" {
					t.Errorf("%s stays shut for no reason", h)
				}
			}
		})
	}
}

// TestWhatStays: as many rules as possible must stay without changing their order.
func TestWhatStays(t *testing.T) {
	for _, test := range []struct {
		was, is string
		stay    int
	}{
		{"abcdef", "abcdef", 6}, {"abcdef", "", 0}, {"", "abc", 0}, {"abcdef", "bcdefa", 5}, {"abcdef", "fabcde", 5},
		{"abcdef", "abxcdyef", 6}, {"abcdef", "acf", 3}, {"aabb", "abab", 3}, {"abc", "cba", 1}, {"aaa", "aa", 2},
	} {
		var was, is []uint64
		for _, r := range test.was {
			was = append(was, uint64(r))
		}
		for _, r := range test.is {
			is = append(is, uint64(r))
		}
		stays, from := match(was, is)
		kept, last := 0, -1
		for i, at := range from {
			if at < 0 {
				continue
			}
			if kept++; at <= last || was[at] != is[i] || !stays[at] {
				t.Errorf("%q to %q: rule %d comes from %d", test.was, test.is, i, at)
			}
			last = at
		}
		for _, s := range stays {
			if s {
				kept--
			}
		}
		if count := len(slices.DeleteFunc(from, func(at int) bool { return at < 0 })); kept != 0 || count != test.stay {
			t.Errorf("%q to %q: %d rules stay, want %d", test.was, test.is, count, test.stay)
		}
	}
}
