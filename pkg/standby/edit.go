package standby

import (
	"sort"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// largeChain is the number of rules from which on a chain is changed rule by rule, by their
// handles. A smaller chain is written as a whole. At 5,000 services the kernel takes 82 to 118 ms
// to write the whole KUBE-SERVICES, while other writers wait.
const largeChain = 64

// edit turns a large chain into next, rule by rule; writer.chain calls it. digests and handles
// are those of the rules that the kernel has, in order. Without known handles the chain is
// written as a whole.
func (w *writer) edit(name string, next *chain, digests, handles []uint64) {
	stays, from := match(digests, next.digests)
	for i, kept := range stays {
		if !kept {
			w.b.Begin(unix.NFT_MSG_DELRULE, netlink.HeaderFlags(0), w.t.id.Family)
			w.b.Text(unix.NFTA_RULE_TABLE, w.t.name)
			w.b.Text(unix.NFTA_RULE_CHAIN, name)
			w.b.Number64(unix.NFTA_RULE_HANDLE, handles[i])
			w.b.End()
		}
	}
	// Each new rule is inserted before the next rule that stays.
	before := make([]uint64, len(from))
	following := uint64(0)
	for i := len(from) - 1; i >= 0; i-- {
		if from[i] >= 0 {
			following = handles[from[i]]
		}
		before[i] = following
	}
	for i, was := range from {
		if was < 0 {
			w.rule(name, w.next.rules[name][i], before[i])
		}
	}
}

// match chooses for edit the rules of a chain that stay while it becomes another: as many as
// possible without changing their order. Rules are the same if their digests are. stays has an
// entry for each old rule. from has the old place of each new rule, or -1.
func match(old, next []uint64) (stays []bool, from []int) {
	stays, from = make([]bool, len(old)), make([]int, len(next))
	places := make(map[uint64][]int, len(old))
	for i, d := range old {
		places[d] = append(places[d], i)
	}
	// Find the longest increasing sequence of old places. tails has the last new rule of a sequence
	// of each length. previous has the new rule before each in its sequence.
	var tails []int
	previous := make([]int, len(next))
	for i, d := range next {
		from[i], previous[i] = -1, -1
		if len(places[d]) == 0 {
			continue
		}
		from[i] = places[d][0]
		places[d] = places[d][1:]
		n := sort.Search(len(tails), func(k int) bool { return from[tails[k]] >= from[i] })
		if n > 0 {
			previous[i] = tails[n-1]
		}
		if n == len(tails) {
			tails = append(tails, i)
		} else {
			tails[n] = i
		}
	}
	kept := make([]bool, len(next))
	if len(tails) > 0 {
		for i := tails[len(tails)-1]; i >= 0; i = previous[i] {
			kept[i], stays[from[i]] = true, true
		}
	}
	for i := range from {
		if !kept[i] {
			from[i] = -1
		}
	}
	return stays, from
}

// readHandles reads the handles of large chains after a build or a change, for edit. A chain
// whose handles are not known is written as a whole the next time, so an error does not matter.
func (s *Standby) readHandles(t *table) {
	for name, c := range t.held.chains {
		if len(c.digests) < largeChain || t.handles[name] != nil {
			continue
		}
		for range handleReads {
			handles := make([]uint64, 0, len(c.digests))
			err := s.conn.EachRule(t.id.Family, t.name, name, func(m nft.RuleMessage) error {
				handles = append(handles, m.Handle)
				return nil
			})
			if err == nil && len(handles) == len(c.digests) {
				t.handles[name] = handles
				break
			}
		}
	}
}

// handleReads bounds the attempts to read a chain's handles: any commit interrupts a dump.
const handleReads = 3
