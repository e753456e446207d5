package native

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// NatHooks returns the nat chains of tables for [nat.New], which computes the IPv4 or IPv6 flows
// that they translate. Tables that are dormant or of other families do nothing.
func NatHooks(tables []*Table, f tableid.Family) nat.Hooks {
	hooks := nat.Hooks{}
	for _, t := range tables {
		if t.Dormant() || t.ID.Family != f && t.ID.Family != tableid.Inet {
			continue
		}
		table := &natTable{chains: t.chainsByName(), sets: t.setsByName(), index: map[string]*setIndex{}}
		for i := range t.Chains {
			c := &t.Chains[i]
			if c.Base && nft.String(attrOf(c.Attrs, unix.NFTA_CHAIN_TYPE)) == "nat" {
				hook := nat.Hook(number(attrOf(c.Attrs, unix.NFTA_CHAIN_HOOK), unix.NFTA_HOOK_HOOKNUM))
				hooks[hook] = append(hooks[hook], natChain{table, c})
			}
		}
	}
	return hooks
}

// A natTable is a table with its chains and sets by name.
type natTable struct {
	chains map[string]*Chain
	sets   map[string]*Set
	index  map[string]*setIndex // of the sets that a flow has reached
	places []int32              // 0, 1 and so on, for chains
}

// A natChain is a chain of such a table, and a [nat.Chain].
type natChain struct {
	table *natTable
	*Chain
}

// Candidates returns the places of all rules: large chains of native tables are verdict maps.
func (c natChain) Candidates(netip.AddrPort) [3][]int32 {
	for i := len(c.table.places); i < len(c.Rules); i++ {
		c.table.places = append(c.table.places, int32(i))
	}
	return [...][]int32{c.table.places[:len(c.Rules)], nil, nil}
}

// Ways takes the packet through a rule's expressions. Where an expression may match or not, the
// packet may also continue with the next rule.
func (c natChain) Ways(place int32, p *nat.Packet, ways []nat.Way) []nat.Way {
	e, ended := evaluation{Packet: p, table: c.table, mark: p.Mark, ways: ways}, false
	for a, err := range attributes(c.Rules[place].expressions()) {
		if err != nil || ended && e.continues {
			return e.takes(nat.Way{Verdict: nat.Unclear})
		}
		if ended {
			break
		}
		name := nft.String(nft.AttrPath(a.value, unix.NFTA_EXPR_NAME))
		data := attrOf(a.value, unix.NFTA_EXPR_DATA)
		if ended = e.ends(name, data); ended {
			continue
		}
		switch e.expression(name, data) {
		case nat.No:
			return e.takes(nat.Way{})
		case nat.Maybe:
			e.takes(nat.Way{})
		}
	}
	if ended {
		return e.ways
	}
	return e.takes(nat.Way{})
}

// An evaluation takes a packet through one rule.
type evaluation struct {
	*nat.Packet
	table *natTable
	mark  nat.Mark // the mark that the rule has set
	regs  registers
	ways  []nat.Way
	// continues says that a verdict was NFT_CONTINUE: the next expression of the rule is next.
	continues bool
}

// takes notes a way that the packet may take, with its present mark, and returns all.
func (e *evaluation) takes(way nat.Way) []nat.Way {
	way.Mark = e.mark
	e.ways = append(e.ways, way)
	return e.ways
}

// follow notes the way of a verdict.
func (e *evaluation) follow(v natVerdict) {
	way := nat.Way{Verdict: nat.Leave} // accepted, dropped, queued, or not known
	switch v.code {
	case unix.NFT_CONTINUE:
		way.Verdict, e.continues = nat.Next, true
	case unix.NFT_RETURN:
		way.Verdict = nat.Return
	case unix.NFT_JUMP:
		way.Verdict = nat.Jump
	case unix.NFT_GOTO:
		way.Verdict = nat.Goto
	}
	if chain := e.table.chains[v.chain]; chain != nil {
		way.Chain = natChain{e.table, chain}
	}
	e.takes(way)
}

// translate notes the ways of a nat expression, whose attributes are data. The place is unknown
// without an address and for a range of addresses.
func (e *evaluation) translate(data []byte) {
	way := nat.Way{Verdict: nat.SNAT}
	if number(data, unix.NFTA_NAT_TYPE) == unix.NFT_NAT_DNAT {
		way.Verdict = nat.DNAT
	}
	from, to := number(data, unix.NFTA_NAT_REG_ADDR_MIN), number(data, unix.NFTA_NAT_REG_ADDR_MAX)
	port, last := number(data, unix.NFTA_NAT_REG_PROTO_MIN), number(data, unix.NFTA_NAT_REG_PROTO_MAX)
	length := e.Source.Addr().BitLen() / 8
	values := e.regs.values(from, length)
	if len(values) == 0 || to != 0 && to != from {
		e.takes(way)
		return
	}
	own, known := e.regs.load(port, 2)
	behind := place(port) - place(from) // the place of the port in a value of a map
	for _, value := range values {
		way.To = nat.Place{Port: nat.AnyPort}
		if len(value) >= length {
			way.To.Addr, _ = netip.AddrFromSlice(value[:length])
		}
		switch {
		case port == 0 && last == 0:
			way.To.Port = 0
		case last != 0 && last != port:
		case known:
			way.To.Port = int32(binary.BigEndian.Uint16(own))
		case behind >= length && behind+2 <= len(value):
			way.To.Port = int32(binary.BigEndian.Uint16(value[behind:]))
		}
		e.takes(way)
	}
}
