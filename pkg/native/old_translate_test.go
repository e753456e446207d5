package native

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Flow has the protocol and the addresses of a flow's first packet.
type OldFlow struct {
	Protocol            uint8 // its number in IP
	Source, Destination netip.AddrPort
}

// Translations reports which flows the nat chains of some tables send to another destination.
//
// It knows less than the kernel, but each report is certain. It takes the first packet of a flow
// through the rules, with its addresses, its ports, and the marks that these rules set. Other
// conditions, such as an interface or a set that rules fill, may match or not. Then it follows both
// ways. It is not safe for concurrent use.
type OldTranslations struct {
	family tableid.Family
	local  func(netip.Addr) bool
	hooks  map[uint32][]oldNatEntry
}

// A natEntry is a base chain of type nat.
type oldNatEntry struct {
	table *oldNatTable
	chain *Chain
}

// A natTable is a table with its chains and sets by name.
type oldNatTable struct {
	chains map[string]*Chain
	sets   map[string]*Set
	index  map[string]*oldSetIndex // of the sets that a flow has reached
}

// The hooks at which destinations and sources are translated (enum nf_inet_hooks).
const (
	oldHookPrerouting  = 0
	oldHookOutput      = 3
	oldHookPostrouting = 4
)

// TranslationsOf returns the translations of IPv4 or IPv6 flows by tables on a node, for the
// sweep of stuck flows after a replay. local reports whether an address is one of the node's
// own. Tables that are dormant or of other families do nothing.
func OldTranslationsOf(tables []*Table, f tableid.Family, local func(netip.Addr) bool) *OldTranslations {
	t := &OldTranslations{family: f, local: local, hooks: map[uint32][]oldNatEntry{}}
	for _, table := range tables {
		if table.Dormant() || table.ID.Family != f && table.ID.Family != tableid.Inet {
			continue
		}
		nat := &oldNatTable{table.chainsByName(), table.setsByName(), map[string]*oldSetIndex{}}
		for i := range table.Chains {
			c := &table.Chains[i]
			if c.Base && nft.String(attrOf(c.Attrs, unix.NFTA_CHAIN_TYPE)) == "nat" {
				hook := number(attrOf(c.Attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM)
				t.hooks[hook] = append(t.hooks[hook], oldNatEntry{nat, c})
			}
		}
	}
	return t
}

// Empty reports whether the tables translate no flow.
func (t *OldTranslations) Empty() bool {
	return len(t.hooks[oldHookPrerouting])+len(t.hooks[oldHookOutput]) == 0
}

// Translates reports whether the tables certainly send the flow to another destination. The
// sweep then ends an untranslated flow, so that its next packet meets the rules that are back.
func (t *OldTranslations) Translates(flow OldFlow) bool {
	hook := uint32(oldHookPrerouting)
	if t.local(flow.Source.Addr()) {
		hook = oldHookOutput
	}
	return slices.ContainsFunc(t.hooks[hook], func(e oldNatEntry) bool {
		w := oldNatWalk{t: t, table: e.table, flow: flow}
		falls := w.through(e.chain, 0)
		return !falls && !w.escapes && w.dnats > 0
	})
}

// Masquerades reports whether the tables, which have sent a flow to backend, certainly change
// its source too. The sweep then ends a flow that kept its source. For the node's own flows
// that is never certain: the new address may be the old one.
func (t *OldTranslations) Masquerades(flow OldFlow, backend netip.AddrPort) bool {
	if t.local(flow.Source.Addr()) {
		return false
	}
	for _, e := range t.hooks[oldHookPrerouting] {
		w := oldNatWalk{t: t, table: e.table, flow: flow, backend: backend.Addr()}
		if w.through(e.chain, 0); !w.there.any || w.blind || w.passed > oldMostRules {
			continue
		}
		sent := OldFlow{flow.Protocol, flow.Source, backend}
		if slices.ContainsFunc(t.hooks[oldHookPostrouting], func(e oldNatEntry) bool {
			last := oldNatWalk{t: t, table: e.table, flow: sent, mark: w.there.mark, leaves: true}
			falls := last.through(e.chain, 0)
			return !falls && !last.escapes && last.sources > 0
		}) {
			return true
		}
	}
	return false
}

const (
	// mostJumps is how deep the kernel follows jumps (NFT_JUMP_STACK_SIZE).
	oldMostJumps = 16
	// mostRules bounds one flow's walk. A flow that needs more is not certain.
	oldMostRules = 20000
)

// A natWalk takes one flow through a base chain.
type oldNatWalk struct {
	t       *OldTranslations
	table   *oldNatTable
	flow    OldFlow
	passed  int  // rules and elements that it reached
	dnats   int  // ways that end in another destination
	escapes bool // a way may end without another destination
	mark    oldPacketMark
	// backend is the packet's destination, if it is known. there has the marks of all ways to it.
	backend netip.Addr
	there   oldMarkWays
	blind   bool // some ways were not followed
	leaves  bool // it is at postrouting, where its source is translated
	sources int  // ways that end in another source
}

// through takes the flow through a chain, and reports whether it may reach the chain's end.
// depth counts the jumps. w has the ways that end in the chain, and w.mark the mark behind it.
// A nil chain or too long a walk makes all uncertain (escapes).
func (w *oldNatWalk) through(c *Chain, depth int) (falls bool) {
	if c == nil || depth > oldMostJumps {
		w.escapes = true
		return false
	}
	var behind oldMarkWays
	defer func() { w.mark = behind.mark }()
	for _, r := range c.Rules {
		if w.passed++; w.passed > oldMostRules {
			w.escapes = true
			return false
		}
		step := w.rule(r, depth)
		if step.falls {
			falls = true
			behind.add(w.mark)
		}
		if !step.next {
			return falls
		}
	}
	behind.add(w.mark)
	return true
}

// A natStep says where a flow may continue after a rule.
type oldNatStep struct {
	next  bool // with the next rule
	falls bool // behind the chain
}

// follow takes the flow to the target of a verdict. The next rule follows only if the verdict
// says so, or if the chain that it jumps to returns. An accept is a way without another
// destination.
func (w *oldNatWalk) follow(v oldNatVerdict, depth int) oldNatStep {
	switch v.code {
	case unix.NFT_CONTINUE:
		return oldNatStep{next: true}
	case unix.NFT_RETURN:
		return oldNatStep{falls: true}
	case unix.NFT_JUMP:
		return oldNatStep{next: w.through(w.table.chains[v.chain], depth+1)}
	case unix.NFT_GOTO:
		return oldNatStep{falls: w.through(w.table.chains[v.chain], depth+1)}
	}
	w.escapes = true // accepted, dropped, queued, or not known
	return oldNatStep{}
}

// elsewhere notes a way that ends in a nat expression, whose attributes are data. If it
// translates no destination, or perhaps to the flow's own, the way is uncertain (escapes). A
// way to backend adds its mark to there.
func (w *oldNatWalk) elsewhere(regs *oldRegisters, data []byte) {
	if w.leaves {
		w.otherSource()
		return
	}
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
	w.escapes = w.escapes || stays // it translates a source, or perhaps to the same destination
	if w.backend.IsValid() && (len(addresses) == 0 || slices.ContainsFunc(addresses, func(a []byte) bool { return slices.Equal(a, w.backend.AsSlice()) })) {
		w.there.add(w.mark)
	}
}
