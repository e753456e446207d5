package rules

import (
	"net/netip"
	"slices"
	"strings"
)

// A test is a condition of a rule on a flow.
type oldTest struct {
	kind     oldTestKind
	not      bool
	prefix   netip.Prefix
	protocol uint8
	ports    []oldPortSpan
	iface    string
	mark     oldMarking // the value and mask to compare with
}

type oldTestKind uint8

const (
	oldOfProtocol oldTestKind = iota
	oldFromAddress
	oldToAddress
	oldFromPorts
	oldToPorts
	oldFromLocal // the source is an address of the node
	oldToLocal
	oldFromInterface
	oldOfMark
)

// An answer says whether a packet matches.
type oldAnswer uint8

const (
	oldNo oldAnswer = iota
	oldMaybe
	oldYes
)

// sure returns yes or no for a condition that is known.
func oldSure(is bool) oldAnswer {
	if is {
		return oldYes
	}
	return oldNo
}

type oldPortSpan struct{ first, last uint16 }

// matches answers whether a packet of walk w with mark m meets the condition.
// natRule.matches calls it for each condition of a rule.
func (t *oldTest) matches(w *oldWalk, m oldNfmark) oldAnswer {
	var is oldAnswer
	switch t.kind {
	case oldOfProtocol:
		is = oldSure(w.flow.Protocol == t.protocol)
	case oldFromAddress:
		is = oldSure(t.prefix.Contains(w.flow.Source.Addr()))
	case oldToAddress:
		is = oldSure(t.prefix.Contains(w.flow.Destination.Addr()))
	case oldFromPorts:
		is = oldSure(oldWithin(t.ports, w.flow.Source.Port()))
	case oldToPorts:
		is = oldSure(oldWithin(t.ports, w.flow.Destination.Port()))
	case oldFromLocal:
		is = oldSure(w.site.Local(w.flow.Source.Addr()))
	case oldToLocal:
		is = oldSure(w.site.Local(w.flow.Destination.Addr()))
	case oldFromInterface:
		is = w.cameFrom(t.iface)
	case oldOfMark:
		is = m.compare(t.mark.value, t.mark.mask)
	}
	if t.not {
		return oldYes - is
	}
	return is
}

// cameFrom answers for a test of -i whether the flow's packets came in by an interface: no
// or maybe. An address can only exclude an interface. The node's own packets came in by no
// interface.
func (w *oldWalk) cameFrom(iface string) oldAnswer {
	if w.hook == "OUTPUT" || w.hook == "PREROUTING" && !strings.HasSuffix(iface, "+") && !w.site.Beyond(iface, w.flow.Source.Addr()) {
		return oldNo
	}
	return oldMaybe
}

func oldWithin(spans []oldPortSpan, port uint16) bool {
	return slices.ContainsFunc(spans, func(s oldPortSpan) bool { return s.first <= port && port <= s.last })
}

// A natRule is a rule of nat: its conditions on a packet, and its effect on a matching packet.
type oldNatRule struct {
	target string
	isGoto bool // it uses -g: packets do not return behind it
	tests  []oldTest
	// sure says that tests holds all conditions of the rule.
	oldSure bool
	// unread says that the text could not be read: it may use -j or -g.
	unread bool
	to     netip.AddrPort // see reachedDNAT
	set    oldMarking     // the effect of a MARK
}

// matches answers whether the rule matches a packet of walk w with mark m. walk.chain skips
// the rule at no, and at maybe also follows the packet past it.
func (n *oldNatRule) matches(w *oldWalk, m oldNfmark) oldAnswer {
	all := oldYes
	if !n.oldSure {
		all = oldMaybe
	}
	for i := range n.tests {
		if all = min(all, n.tests[i].matches(w, m)); all == oldNo {
			return oldNo
		}
	}
	return all
}

// plainMatches are the matches that are understood, at least in some of their options.
var oldPlainMatches = []string{"comment", "udp", "tcp", "sctp", "multiport", "addrtype", "recent", "mark"}

// readNatRule reads a nat rule's conditions and effect, for the walks of flows. It never
// fails: a rule that cannot be read is unread, and its match is never certain.
func oldReadNatRule(rule Rule) *oldNatRule {
	n := &oldNatRule{target: rule.Target, oldSure: true, set: oldMarking{unread: true}}
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if words, err := rule.Words(); err != nil || !f.read(words) {
		n.oldSure, n.unread = false, true
		return n
	}
	n.isGoto = f.jump == "-g"
	for i := range f.base {
		if f.base[i].given {
			n.base(&f.base[i])
		}
	}
	for i := range f.exts {
		if i != f.target && !slices.Contains(oldPlainMatches, f.exts[i].name) {
			n.oldSure = false
		}
	}
	for i := range f.opts {
		o := &f.opts[i]
		switch {
		case o.owner != f.target:
			n.option(f.exts[o.owner].name, o)
		case o.name == "--to-destination":
			n.to = oldReadDestination(o.words[0])
		case n.target == "MARK":
			n.set = oldReadMarking(f.exts[o.owner].known, o)
		}
	}
	return n
}

// readMarking reads how an option of MARK or CONNMARK sets a mark. known is the target's
// vocabulary; nil, or an unknown option, gives an unread marking: the mark may then be any.
func oldReadMarking(known *vocabulary, o *setting) oldMarking {
	if known == nil || len(o.words) != 1 || o.not || len(known.options[o.name].values) != 1 {
		return oldMarking{unread: true}
	}
	// The canonical value of each option is a value of --set-xmark.
	text, ok := known.options[o.name].values[0](o.words[0])
	value, mask, okToo := markMask(text)
	return oldMarking{value, mask, !ok || !okToo}
}

// add adds a test, or makes the rule unsure if ok says that the test could not be read. Such
// a rule matches at most maybe.
func (n *oldNatRule) add(t oldTest, ok bool) {
	if ok {
		n.tests = append(n.tests, t)
	} else {
		n.oldSure = false
	}
}

// base adds the test of an option that belongs to no extension. readNatRule calls it. An
// option that it cannot test makes the rule unsure.
func (n *oldNatRule) base(s *setting) {
	switch s.name {
	case "-s", "-d":
		kind := oldFromAddress
		if s.name == "-d" {
			kind = oldToAddress
		}
		text, _ := address(s.words[0])
		prefix, err := netip.ParsePrefix(text) // a mask need not be a prefix
		n.add(oldTest{kind: kind, not: s.not, prefix: prefix}, err == nil)
	case "-p":
		text, _ := protocol(s.words[0])
		number, ok := number(text, 8)
		if ok && number == 0 && !s.not {
			return // any
		}
		n.add(oldTest{kind: oldOfProtocol, not: s.not, protocol: uint8(number)}, ok)
	case "-i":
		n.add(oldTest{kind: oldFromInterface, not: s.not, iface: s.words[0]}, true)
	default: // -o is unknown before routing, -f tests fragments
		n.oldSure = false
	}
}

// option adds the test of an option of that match. readNatRule calls it. An option that it
// cannot test makes the rule unsure.
func (n *oldNatRule) option(match string, o *setting) {
	switch match {
	case "comment":
	case "recent":
		// kube-proxy's affinity: an option that only records the source always matches.
		if !slices.Contains([]string{"--set", "--name", "--rsource", "--mask"}, o.name) || o.not {
			n.oldSure = false
		}
	case "udp", "tcp", "sctp", "multiport":
		t := oldTest{not: o.not}
		switch o.name {
		case "--dport", "--destination-port", "--dports":
			t.kind = oldToPorts
		case "--sport", "--source-port", "--sports":
			t.kind = oldFromPorts
		default:
			n.oldSure = false
			return
		}
		var ok bool
		t.ports, ok = oldReadPorts(o.words[0])
		n.add(t, ok)
	case "addrtype":
		t := oldTest{kind: oldToLocal, not: o.not}
		if o.name == "--src-type" {
			t.kind = oldFromLocal
		}
		local := len(o.words) == 1 && strings.EqualFold(o.words[0], "LOCAL")
		n.add(t, local && (o.name == "--dst-type" || o.name == "--src-type"))
	case "mark":
		t := oldTest{kind: oldOfMark, not: o.not}
		var ok bool
		t.mark.value, t.mark.mask, ok = markMask(o.words[0])
		n.add(t, ok && o.name == "--mark")
	default:
		n.oldSure = false
	}
}

// readPorts parses the ports of -m tcp, udp, sctp or multiport, such as 80,443:445, when a
// walk first needs a nat rule; natRule.option calls it. A service name or a reversed range
// returns false. The rule then never counts as a certain match.
func oldReadPorts(text string) ([]oldPortSpan, bool) {
	list, ok := portList(text)
	if !ok {
		return nil, false
	}
	var spans []oldPortSpan
	for part := range strings.SplitSeq(list, ",") {
		first, last, ok := portBounds(part)
		if !ok || first > last {
			return nil, false
		}
		spans = append(spans, oldPortSpan{uint16(first), uint16(last)})
	}
	return spans, true
}

// readDestination reads the destination of a DNAT, if it is a single address. The port is 0
// if it is not given. Any other destination gives an invalid address: it may be anywhere.
func oldReadDestination(text string) netip.AddrPort {
	text, ok := natAddress(text)
	if !ok {
		return netip.AddrPort{}
	}
	if at, err := netip.ParseAddrPort(text); err == nil {
		return at
	}
	a, _ := netip.ParseAddr(text)
	return netip.AddrPortFrom(a, 0)
}
