package rules

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/nat"
)

// A test answers whether a packet meets a condition of a rule.
type test func(p *nat.Packet) nat.Answer

type portSpan struct{ first, last uint16 }

// toLocal answers for a test of --dst-type LOCAL: yes or maybe, because a route can make any
// address local.
func toLocal(p *nat.Packet) nat.Answer {
	if p.Site.Local(p.Destination.Addr()) {
		return nat.Yes
	}
	return nat.Maybe
}

// cameFrom answers for a test of -i whether the packet came in by an interface: no or maybe.
// An address can only exclude an interface. The node's own packets came in by no interface.
func cameFrom(p *nat.Packet, iface string) nat.Answer {
	if p.Hook == nat.Output || p.Hook == nat.Prerouting && !strings.HasSuffix(iface, "+") && !p.Site.Beyond(iface, p.Source.Addr()) {
		return nat.No
	}
	return nat.Maybe
}

func within(spans []portSpan, port uint16) bool {
	return slices.ContainsFunc(spans, func(s portSpan) bool { return s.first <= port && port <= s.last })
}

// A marking is the effect of the target MARK, or a mark to compare with. The target clears the
// bits of mask and flips the bits of value (struct xt_mark_tginfo2; mark_tg in
// net/netfilter/xt_mark.c). The zero marking keeps the mark.
type marking struct {
	value, mask uint32
	// unread says that the option could not be read: the mark is unknown afterwards.
	unread bool
}

// on returns the mark behind a MARK with this effect. Bits that it sets are known from then on.
func (to marking) on(m nat.Mark) nat.Mark {
	if to.unread {
		return nat.Mark{}
	}
	known := m.Known | to.mask
	return nat.Mark{Known: known, Value: (m.Value&^to.mask ^ to.value) & known}
}

// matches is the test of -m mark: it answers whether the mark's bits of mask equal value. A value
// with bits outside of mask equals no mark (mark_mt in net/netfilter/xt_mark.c).
func (to marking) matches(p *nat.Packet) nat.Answer {
	switch {
	case to.value&^to.mask != 0 || (p.Mark.Value^to.value)&to.mask&p.Mark.Known != 0:
		return nat.No
	case to.mask&^p.Mark.Known != 0:
		return nat.Maybe
	}
	return nat.Yes
}

// A natRule is a rule of nat: its conditions on a packet, and its effect on a matching packet.
type natRule struct {
	tests []test
	// sure says that tests holds all conditions of the rule.
	sure bool
	// unread says that the text could not be read: it may use -g instead of -j.
	unread bool
	way    nat.Way // without the mark
	set    marking // the effect on the mark
	// The destination that the rule tests: an address, and ports. Either may be unknown.
	address netip.Addr
	ports   []portSpan
}

// ways appends the way of a packet that matches, and of a packet that does not if it may do
// either.
func (n *natRule) ways(p *nat.Packet, ways []nat.Way) []nat.Way {
	matches := nat.Yes
	if !n.sure {
		matches = nat.Maybe
	}
	for _, t := range n.tests {
		if matches = min(matches, t(p)); matches == nat.No {
			return ways
		}
	}
	if matches == nat.Maybe {
		ways = append(ways, nat.Way{Mark: p.Mark})
	}
	way := n.way
	way.Mark = n.set.on(p.Mark)
	if ways = append(ways, way); n.unread && way.Verdict == nat.Jump {
		way.Verdict = nat.Goto
		ways = append(ways, way)
	}
	return ways
}

// plainMatches are the matches that are understood, at least in some of their options.
var plainMatches = []string{"comment", "udp", "tcp", "sctp", "multiport", "addrtype", "recent", "mark"}

// readNatRule reads a nat rule's conditions and effect, for the walks of flows. named has the
// chains to which it may jump. It never fails: a rule that cannot be read is unread, and its
// match is never certain.
func readNatRule(rule Rule, named map[string]*natChain) *natRule {
	n := &natRule{sure: true}
	n.effect(rule, named)
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if words, err := rule.Words(); err != nil || !f.read(words) {
		n.sure, n.unread = false, true
		return n
	}
	if f.jump == "-g" && n.way.Verdict == nat.Jump {
		n.way.Verdict = nat.Goto
	}
	for i := range f.base {
		if f.base[i].given {
			n.base(&f.base[i])
		}
	}
	for i := range f.exts {
		if i != f.target && !slices.Contains(plainMatches, f.exts[i].name) {
			n.sure = false
		}
	}
	for i := range f.opts {
		o := &f.opts[i]
		switch {
		case o.owner != f.target:
			n.option(f.exts[o.owner].name, o)
		case rule.Target == "DNAT" || rule.Target == "SNAT":
			if o.name == "--to-destination" || o.name == "--to-source" {
				n.way.To = readPlace(o.words[0])
			}
		case rule.Target == "MARK":
			n.set = readMarking(f.exts[o.owner].known, o)
		}
	}
	return n
}

// effect notes the effect of the rule's target, without its options. A target that is neither
// known nor a chain of named is another owner's chain, with unknown rules.
func (n *natRule) effect(rule Rule, named map[string]*natChain) {
	switch rule.Target {
	case "":
		if !rule.Matches() { // opaque, with an effect that has no name
			n.way.Verdict = nat.Unclear
		}
	case "LOG", "NFLOG", "ULOG", "AUDIT", "SET":
	case "MARK", "CONNMARK": // the second may restore any mark
		n.set = marking{unread: true}
	case "RETURN":
		n.way.Verdict = nat.Return
	case "DNAT", "REDIRECT", "NETMAP":
		n.way.Verdict = nat.DNAT
	case "SNAT":
		n.way.Verdict = nat.SNAT
	case "MASQUERADE":
		n.way.Verdict = nat.Masquerade
	case "ACCEPT", "DROP", "QUEUE", "NFQUEUE":
		n.way.Verdict = nat.Leave
	default:
		n.way.Verdict = nat.Jump
		if chain := named[rule.Target]; chain != nil {
			n.way.Chain = chain
		}
	}
}

// readMarking reads how an option of MARK or CONNMARK sets a mark. known is the target's
// vocabulary; nil, or an unknown option, gives an unread marking: the mark may then be any.
func readMarking(known *vocabulary, o *setting) marking {
	if known == nil || len(o.words) != 1 || o.not || known.options[o.name] == nil || len(known.options[o.name].values) != 1 {
		return marking{unread: true}
	}
	// The canonical value of each option is a value of --set-xmark.
	text, ok := known.options[o.name].values[0](o.words[0])
	value, mask, okToo := markMask(text)
	return marking{value, mask, !ok || !okToo}
}

// add adds a test or, with not, its opposite. It makes the rule unsure if ok says that the test
// could not be read. Such a rule matches at most maybe.
func (n *natRule) add(not, ok bool, t test) {
	switch {
	case !ok:
		n.sure = false
	case not:
		n.tests = append(n.tests, func(p *nat.Packet) nat.Answer { return nat.Yes - t(p) })
	default:
		n.tests = append(n.tests, t)
	}
}

// base adds the test of an option that belongs to no extension. readNatRule calls it. An
// option that it cannot test makes the rule unsure.
func (n *natRule) base(s *setting) {
	switch s.name {
	case "-s", "-d":
		text, _ := address(s.words[0])
		prefix, err := netip.ParsePrefix(text) // a mask need not be a prefix
		if s.name == "-s" {
			n.add(s.not, err == nil, func(p *nat.Packet) nat.Answer { return nat.Sure(prefix.Contains(p.Source.Addr())) })
			return
		}
		n.add(s.not, err == nil, func(p *nat.Packet) nat.Answer { return nat.Sure(prefix.Contains(p.Destination.Addr())) })
		if !s.not && prefix.IsSingleIP() {
			n.address = prefix.Addr()
		}
	case "-p":
		text, _ := protocol(s.words[0])
		number, ok := number(text, 8)
		if ok && number == 0 && !s.not {
			return // any
		}
		n.add(s.not, ok, func(p *nat.Packet) nat.Answer { return nat.Sure(uint64(p.Protocol) == number) })
	case "-i":
		iface := s.words[0]
		n.add(s.not, true, func(p *nat.Packet) nat.Answer { return cameFrom(p, iface) })
	default: // -o is unknown before routing, -f tests fragments
		n.sure = false
	}
}

// option adds the test of an option of that match. readNatRule calls it. An option that it
// cannot test makes the rule unsure.
func (n *natRule) option(match string, o *setting) {
	switch match {
	case "comment":
	case "recent":
		// kube-proxy's affinity: an option that only records the source always matches.
		if !slices.Contains([]string{"--set", "--name", "--rsource", "--mask"}, o.name) || o.not {
			n.sure = false
		}
	case "udp", "tcp", "sctp", "multiport":
		switch o.name {
		case "--dport", "--destination-port", "--dports":
			ports, ok := readPorts(o.words[0])
			n.add(o.not, ok, func(p *nat.Packet) nat.Answer { return nat.Sure(within(ports, p.Destination.Port())) })
			if !o.not {
				n.ports = ports
			}
		case "--sport", "--source-port", "--sports":
			ports, ok := readPorts(o.words[0])
			n.add(o.not, ok, func(p *nat.Packet) nat.Answer { return nat.Sure(within(ports, p.Source.Port())) })
		default:
			n.sure = false
		}
	case "addrtype":
		local := len(o.words) == 1 && strings.EqualFold(o.words[0], "LOCAL")
		switch o.name {
		case "--dst-type":
			n.add(o.not, local, toLocal)
		case "--src-type": // by which the walk chooses its hook, too
			n.add(o.not, local, func(p *nat.Packet) nat.Answer { return nat.Sure(p.Site.Local(p.Source.Addr())) })
		default:
			n.sure = false
		}
	case "mark":
		value, mask, ok := markMask(o.words[0])
		n.add(o.not, ok && o.name == "--mark", marking{value: value, mask: mask}.matches)
	default:
		n.sure = false
	}
}

// readPorts parses the ports of -m tcp, udp, sctp or multiport, such as 80,443:445, when a
// walk first needs a nat rule; natRule.option calls it. A service name or a reversed range
// returns false. The rule then never counts as a certain match.
func readPorts(text string) ([]portSpan, bool) {
	list, ok := portList(text)
	if !ok {
		return nil, false
	}
	var spans []portSpan
	for part := range strings.SplitSeq(list, ",") {
		first, last, ok := portBounds(part)
		if !ok || first > last {
			return nil, false
		}
		spans = append(spans, portSpan{uint16(first), uint16(last)})
	}
	return spans, true
}

// readPlace reads the value of DNAT or SNAT, if it is a single address. The port is 0 if it is
// not given. Any other value gives the zero Place: it may be anywhere.
func readPlace(text string) nat.Place {
	text, ok := natAddress(text)
	if !ok {
		return nat.Place{}
	}
	if at, err := netip.ParseAddrPort(text); err == nil {
		return nat.Place{Addr: at.Addr(), Port: int32(at.Port())}
	}
	a, _ := netip.ParseAddr(text)
	return nat.Place{Addr: a}
}
