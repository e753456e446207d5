package rules

import (
	"math"
	"net/netip"
	"strings"
)

// A natChain is a chain of nat. A rule is read when the first flow reaches it.
type oldNatChain struct {
	text []Rule
	read []*oldNatRule
	open bool // the walk is inside it
	// The places of rules for a single destination address, of rules for a few destination
	// ports, and of all others. They are nil until the first flow.
	oldToAddress map[netip.Addr][]int32
	toPort       map[uint16][]int32
	others       []int32
}

// fewPorts is the greatest number of ports of a rule that is listed under each of them.
const oldFewPorts = 64

// A cursor iterates in order over the rules of a chain that a flow may match.
type oldCursor struct {
	chain *oldNatChain
	lists [3][]int32
}

// candidates returns a cursor over the rules that a flow to that destination may match.
// walk.chain calls it, and the first call indexes the chain.
func (c *oldNatChain) candidates(to netip.AddrPort) oldCursor {
	if c.read == nil {
		c.indexRules()
	}
	return oldCursor{c, [...][]int32{c.oldToAddress[to.Addr()], c.toPort[to.Port()], c.others}}
}

// next returns the next rule that the flow may match, in the order of the chain; nil at the
// end. The walk of a flow calls it. lists has indexes of rules, sorted; the smallest first
// index is next.
func (c *oldCursor) next() *oldNatRule {
	first, at := int32(math.MaxInt32), -1
	for i, list := range c.lists {
		if len(list) > 0 && list[0] < first {
			first, at = list[0], i
		}
	}
	if at < 0 {
		return nil
	}
	c.lists[at] = c.lists[at][1:]
	return c.chain.rule(first)
}

// rule returns rule i of the chain. It reads the text on first use, because a walk needs few
// rules.
func (c *oldNatChain) rule(i int32) *oldNatRule {
	if c.read[i] == nil {
		c.read[i] = oldReadNatRule(c.text[i])
	}
	return c.read[i]
}

// indexRules lists the rules by the destination that they test, so that a walk skips rules
// for other destinations. candidates calls it once.
func (c *oldNatChain) indexRules() {
	c.read = make([]*oldNatRule, len(c.text))
	for i := range c.text {
		place := int32(i)
		addr, ok := oldFirstDestination(c.text[i].Spec)
		var ports []oldPortSpan
		if !ok {
			addr, ports = c.rule(place).destination()
		}
		switch {
		case addr.IsValid():
			if c.oldToAddress == nil {
				c.oldToAddress = make(map[netip.Addr][]int32, len(c.text))
			}
			c.oldToAddress[addr] = append(c.oldToAddress[addr], place)
		case ports != nil:
			if c.toPort == nil {
				c.toPort = map[uint16][]int32{}
			}
			for _, s := range ports {
				for p := int(s.first); p <= int(s.last); p++ {
					c.toPort[uint16(p)] = append(c.toPort[uint16(p)], place)
				}
			}
		default:
			c.others = append(c.others, place)
		}
	}
}

// firstDestination returns the single address that a rule tests, if its text begins with it,
// as in the output of iptables-save; else false. It does not read the rest of the rule. On
// most nodes, most rules are in KUBE-SERVICES, for services that no flow uses.
func oldFirstDestination(spec string) (netip.Addr, bool) {
	rest, ok := strings.CutPrefix(spec, "-d ")
	if !ok {
		return netip.Addr{}, false
	}
	text, _, _ := strings.Cut(rest, " ")
	p, err := netip.ParsePrefix(text)
	return p.Addr(), err == nil && p.IsSingleIP()
}

// destination returns the single address that the rule tests, or else the few ports, for
// indexRules. An invalid address and nil: every walk must meet the rule.
func (n *oldNatRule) destination() (netip.Addr, []oldPortSpan) {
	var ports []oldPortSpan
	for _, t := range n.tests {
		switch {
		case t.not:
		case t.kind == oldToAddress && t.prefix.IsSingleIP():
			return t.prefix.Addr(), nil
		case t.kind == oldToPorts && oldCount(t.ports) <= oldFewPorts:
			ports = t.ports
		}
	}
	return netip.Addr{}, ports
}

// count returns the number of ports in the spans. destination lists a rule by ports only if
// they are few.
func oldCount(ports []oldPortSpan) int {
	n := 0
	for _, s := range ports {
		n += int(s.last) - int(s.first) + 1
	}
	return n
}
