package native

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Flow is how the first packet of a flow was addressed.
type Flow struct {
	Protocol            uint8 // its number in IP
	Source, Destination netip.AddrPort
}

// Translations says which flows the chains of type nat in some tables send to another destination.
//
// It knows less than the kernel, but what it reports is certain. Each question takes the first
// packet of a flow through the rules. What cannot be answered from addresses and ports, such as a
// mark, an interface or a set that rules fill, may match or not, and both ways are followed. It is
// not safe for concurrent use.
type Translations struct {
	family tableid.Family
	local  func(netip.Addr) bool
	hooks  map[uint32][]natEntry
}

// A natEntry is a base chain of type nat.
type natEntry struct {
	table *natTable
	chain *Chain
}

// A natTable is a table with what is asked for by name.
type natTable struct {
	chains map[string]*Chain
	sets   map[string]*Set
	index  map[string]*setIndex // of the sets that a flow came to
}

// The hooks at which destinations are translated (enum nf_inet_hooks).
const (
	hookPrerouting = 0
	hookOutput     = 3
)

// TranslationsOf returns what tables do to flows of IPv4 or of IPv6 on a node; local says of an
// address whether it is one of the node's own. Tables that are dormant or of other families do
// nothing.
func TranslationsOf(tables []*Table, f tableid.Family, local func(netip.Addr) bool) *Translations {
	t := &Translations{family: f, local: local, hooks: map[uint32][]natEntry{}}
	for _, table := range tables {
		if table.Dormant() || table.ID.Family != f && table.ID.Family != tableid.Inet {
			continue
		}
		nat := &natTable{table.chainsByName(), table.setsByName(), map[string]*setIndex{}}
		for i := range table.Chains {
			c := &table.Chains[i]
			if c.Base && nft.String(attrOf(c.Attrs, unix.NFTA_CHAIN_TYPE)) == "nat" {
				hook := number(attrOf(c.Attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM)
				t.hooks[hook] = append(t.hooks[hook], natEntry{nat, c})
			}
		}
	}
	return t
}

// Empty reports whether the tables translate no flow.
func (t *Translations) Empty() bool {
	return len(t.hooks[hookPrerouting])+len(t.hooks[hookOutput]) == 0
}

// Translates reports whether the tables certainly send the flow to another destination than it
// asked for.
func (t *Translations) Translates(flow Flow) bool {
	hook := uint32(hookPrerouting)
	if t.local(flow.Source.Addr()) {
		hook = hookOutput
	}
	return slices.ContainsFunc(t.hooks[hook], func(e natEntry) bool {
		w := natWalk{t: t, table: e.table, flow: flow}
		falls := w.through(e.chain, 0)
		return !falls && !w.escapes && w.dnats > 0
	})
}

const (
	// mostJumps is how deep the kernel follows jumps (NFT_JUMP_STACK_SIZE).
	mostJumps = 16
	// mostRules bounds one flow's walk. A flow that needs more is not certain.
	mostRules = 20000
)

// A natWalk takes one flow through a base chain.
type natWalk struct {
	t       *Translations
	table   *natTable
	flow    Flow
	passed  int  // rules and elements that it came to
	dnats   int  // ways that end in another destination
	escapes bool // a way may end without one
}

// through takes the flow through a chain, and reports whether it may come to the chain's end.
func (w *natWalk) through(c *Chain, depth int) (falls bool) {
	if c == nil || depth > mostJumps {
		w.escapes = true
		return false
	}
	for _, r := range c.Rules {
		if w.passed++; w.passed > mostRules {
			w.escapes = true
			return false
		}
		step := w.rule(r, depth)
		falls = falls || step.falls
		if !step.next {
			return falls
		}
	}
	return true
}

// A natStep says where a flow may go on behind a rule.
type natStep struct {
	next  bool // with the next rule
	falls bool // behind the chain
}

// follow takes the flow where a verdict leads: not to the next rule, unless the verdict says so.
func (w *natWalk) follow(v natVerdict, depth int) natStep {
	switch v.code {
	case unix.NFT_CONTINUE:
		return natStep{next: true}
	case unix.NFT_RETURN:
		return natStep{falls: true}
	case unix.NFT_JUMP:
		return natStep{next: w.through(w.table.chains[v.chain], depth+1)}
	case unix.NFT_GOTO:
		return natStep{falls: w.through(w.table.chains[v.chain], depth+1)}
	}
	w.escapes = true // accepted, dropped, queued, or not known
	return natStep{}
}

// elsewhere notes a way that ends in a DNAT to what the registers hold.
func (w *natWalk) elsewhere(regs *registers, data []byte) {
	w.dnats++
	length := 4
	if w.t.family == tableid.IPv6 {
		length = 16
	}
	addresses := regs.values(number(data, unix.NFTA_NAT_REG_ADDR_MIN), length)
	stays := number(data, unix.NFTA_NAT_TYPE) != unix.NFT_NAT_DNAT || len(addresses) == 0
	for _, address := range addresses {
		to, ok := netip.AddrFromSlice(address)
		stays = stays || !ok || to == w.flow.Destination.Addr()
	}
	w.escapes = w.escapes || stays // a source is translated, or perhaps to where it goes anyway
}
