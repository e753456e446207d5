package rules

import (
	"net/netip"
	"slices"
	"strings"
)

// A test is a condition of a rule on a flow.
type test struct {
	kind     testKind
	not      bool
	prefix   netip.Prefix
	protocol uint8
	ports    []portSpan
	iface    string
	mark     marking // the value and mask to compare with
}

type testKind uint8

const (
	ofProtocol testKind = iota
	fromAddress
	toAddress
	fromPorts
	toPorts
	fromLocal // the source is an address of the node
	toLocal
	fromInterface
	ofMark
)

// An answer says whether a packet matches.
type answer uint8

const (
	no answer = iota
	maybe
	yes
)

// sure returns yes or no for a condition that is known.
func sure(is bool) answer {
	if is {
		return yes
	}
	return no
}

type portSpan struct{ first, last uint16 }

// matches answers whether a packet of walk w with mark m meets the condition.
// natRule.matches calls it for each condition of a rule.
func (t *test) matches(w *walk, m nfmark) answer {
	var is answer
	switch t.kind {
	case ofProtocol:
		is = sure(w.flow.Protocol == t.protocol)
	case fromAddress:
		is = sure(t.prefix.Contains(w.flow.Source.Addr()))
	case toAddress:
		is = sure(t.prefix.Contains(w.flow.Destination.Addr()))
	case fromPorts:
		is = sure(within(t.ports, w.flow.Source.Port()))
	case toPorts:
		is = sure(within(t.ports, w.flow.Destination.Port()))
	case fromLocal:
		is = sure(w.site.Local(w.flow.Source.Addr()))
	case toLocal:
		is = sure(w.site.Local(w.flow.Destination.Addr()))
	case fromInterface:
		is = w.cameFrom(t.iface)
	case ofMark:
		is = m.compare(t.mark.value, t.mark.mask)
	}
	if t.not {
		return yes - is
	}
	return is
}

// cameFrom answers for a test of -i whether the flow's packets came in by an interface: no
// or maybe. An address can only exclude an interface. The node's own packets came in by no
// interface.
func (w *walk) cameFrom(iface string) answer {
	if w.hook == "OUTPUT" || w.hook == "PREROUTING" && !strings.HasSuffix(iface, "+") && !w.site.Beyond(iface, w.flow.Source.Addr()) {
		return no
	}
	return maybe
}

func within(spans []portSpan, port uint16) bool {
	return slices.ContainsFunc(spans, func(s portSpan) bool { return s.first <= port && port <= s.last })
}

// A natRule is a rule of nat: its conditions on a packet, and its effect on a matching packet.
type natRule struct {
	target string
	isGoto bool // it uses -g: packets do not return behind it
	tests  []test
	// sure says that tests holds all conditions of the rule.
	sure bool
	// unread says that the text could not be read: it may use -j or -g.
	unread bool
	to     netip.AddrPort // see reachedDNAT
	set    marking        // the effect of a MARK
}

// matches answers whether the rule matches a packet of walk w with mark m. walk.chain skips
// the rule at no, and at maybe also follows the packet past it.
func (n *natRule) matches(w *walk, m nfmark) answer {
	all := yes
	if !n.sure {
		all = maybe
	}
	for i := range n.tests {
		if all = min(all, n.tests[i].matches(w, m)); all == no {
			return no
		}
	}
	return all
}

// plainMatches are the matches that are understood, at least in some of their options.
var plainMatches = []string{"comment", "udp", "tcp", "sctp", "multiport", "addrtype", "recent", "mark"}

// readNatRule reads a nat rule's conditions and effect, for the walks of flows. It never
// fails: a rule that cannot be read is unread, and its match is never certain.
func readNatRule(rule Rule) *natRule {
	n := &natRule{target: rule.Target, sure: true, set: marking{unread: true}}
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if words, err := rule.Words(); err != nil || !f.read(words) {
		n.sure, n.unread = false, true
		return n
	}
	n.isGoto = f.jump == "-g"
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
		case o.name == "--to-destination":
			n.to = readDestination(o.words[0])
		case n.target == "MARK":
			n.set = readMarking(f.exts[o.owner].known, o)
		}
	}
	return n
}

// readMarking reads how an option of MARK or CONNMARK sets a mark. known is the target's
// vocabulary; nil, or an unknown option, gives an unread marking: the mark may then be any.
func readMarking(known *vocabulary, o *setting) marking {
	if known == nil || len(o.words) != 1 || o.not || len(known.options[o.name].values) != 1 {
		return marking{unread: true}
	}
	// The canonical value of each option is a value of --set-xmark.
	text, ok := known.options[o.name].values[0](o.words[0])
	value, mask, okToo := markMask(text)
	return marking{value, mask, !ok || !okToo}
}

// add adds a test, or makes the rule unsure if ok says that the test could not be read. Such
// a rule matches at most maybe.
func (n *natRule) add(t test, ok bool) {
	if ok {
		n.tests = append(n.tests, t)
	} else {
		n.sure = false
	}
}

// base adds the test of an option that belongs to no extension. readNatRule calls it. An
// option that it cannot test makes the rule unsure.
func (n *natRule) base(s *setting) {
	switch s.name {
	case "-s", "-d":
		kind := fromAddress
		if s.name == "-d" {
			kind = toAddress
		}
		text, _ := address(s.words[0])
		prefix, err := netip.ParsePrefix(text) // a mask need not be a prefix
		n.add(test{kind: kind, not: s.not, prefix: prefix}, err == nil)
	case "-p":
		text, _ := protocol(s.words[0])
		number, ok := number(text, 8)
		if ok && number == 0 && !s.not {
			return // any
		}
		n.add(test{kind: ofProtocol, not: s.not, protocol: uint8(number)}, ok)
	case "-i":
		n.add(test{kind: fromInterface, not: s.not, iface: s.words[0]}, true)
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
		t := test{not: o.not}
		switch o.name {
		case "--dport", "--destination-port", "--dports":
			t.kind = toPorts
		case "--sport", "--source-port", "--sports":
			t.kind = fromPorts
		default:
			n.sure = false
			return
		}
		var ok bool
		t.ports, ok = readPorts(o.words[0])
		n.add(t, ok)
	case "addrtype":
		t := test{kind: toLocal, not: o.not}
		if o.name == "--src-type" {
			t.kind = fromLocal
		}
		local := len(o.words) == 1 && strings.EqualFold(o.words[0], "LOCAL")
		n.add(t, local && (o.name == "--dst-type" || o.name == "--src-type"))
	case "mark":
		t := test{kind: ofMark, not: o.not}
		var ok bool
		t.mark.value, t.mark.mask, ok = markMask(o.words[0])
		n.add(t, ok && o.name == "--mark")
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

// readDestination reads the destination of a DNAT, if it is a single address. The port is 0
// if it is not given. Any other destination gives an invalid address: it may be anywhere.
func readDestination(text string) netip.AddrPort {
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
