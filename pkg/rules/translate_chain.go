package rules

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/nat"
)

// A natChain is a chain of nat, and a [nat.Chain]. A rule is read when the first flow reaches
// it.
type natChain struct {
	text  []Rule
	named map[string]*natChain // the chains to which rules may jump
	read  []*natRule
	// The places of rules for a single destination address, of rules for a few destination
	// ports, and of all others. They are nil until the first flow.
	toAddress map[netip.Addr][]int32
	toPort    map[uint16][]int32
	others    []int32
}

// fewPorts is the greatest number of ports of a rule that is listed under each of them.
const fewPorts = 64

// Candidates returns the places of the rules that a packet to that destination may match. The
// first call indexes the chain.
func (c *natChain) Candidates(to netip.AddrPort) [3][]int32 {
	if c.read == nil {
		c.indexRules()
	}
	return [...][]int32{c.toAddress[to.Addr()], c.toPort[to.Port()], c.others}
}

// Ways appends the ways of a packet at the rule at a place.
func (c *natChain) Ways(place int32, p *nat.Packet, ways []nat.Way) []nat.Way {
	return c.rule(place).ways(p, ways)
}

// rule returns the rule at a place. It reads the text on first use, because a walk needs few
// rules.
func (c *natChain) rule(place int32) *natRule {
	if c.read[place] == nil {
		c.read[place] = readNatRule(c.text[place], c.named)
	}
	return c.read[place]
}

// indexRules lists the rules by the destination that they test, so that a walk skips rules
// for other destinations. Candidates calls it once.
func (c *natChain) indexRules() {
	c.read = make([]*natRule, len(c.text))
	for i := range c.text {
		place := int32(i)
		addr, ports := plainDestination(c.text[i].Spec)
		if !addr.IsValid() && ports == nil {
			addr, ports = c.rule(place).destination()
		}
		switch {
		case addr.IsValid():
			if c.toAddress == nil {
				c.toAddress = make(map[netip.Addr][]int32, len(c.text))
			}
			c.toAddress[addr] = append(c.toAddress[addr], place)
		case ports != nil:
			if c.toPort == nil {
				c.toPort = make(map[uint16][]int32, len(c.text))
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

// plainDestination is destination for the text of a rule as iptables-save prints it; else it
// returns neither. It does not read the rest of the rule. On most nodes, most rules are in
// KUBE-SERVICES and KUBE-NODEPORTS, for services that no flow uses.
func plainDestination(spec string) (netip.Addr, []portSpan) {
	if rest, ok := strings.CutPrefix(spec, "-d "); ok {
		text, _, _ := strings.Cut(rest, " ")
		if p, err := netip.ParsePrefix(text); err == nil && p.IsSingleIP() {
			return p.Addr(), nil
		}
	}
	before, rest, ok := strings.Cut(spec, " --dport ")
	if !ok || strings.HasSuffix(before, "!") || strings.ContainsAny(rest, `"'`) { // perhaps in a comment
		return netip.Addr{}, nil
	}
	text, _, _ := strings.Cut(rest, " ")
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return netip.Addr{}, nil
	}
	return netip.Addr{}, []portSpan{{uint16(port), uint16(port)}}
}

// destination returns the single address that the rule tests, or else the few ports, for
// indexRules. An invalid address and nil: every walk must meet the rule.
func (n *natRule) destination() (netip.Addr, []portSpan) {
	if n.address.IsValid() || count(n.ports) > fewPorts {
		return n.address, nil
	}
	return netip.Addr{}, n.ports
}

// count returns the number of ports in the spans. destination lists a rule by ports only if
// they are few.
func count(ports []portSpan) int {
	n := 0
	for _, s := range ports {
		n += int(s.last) - int(s.first) + 1
	}
	return n
}
