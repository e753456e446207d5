package rules

import (
	"net/netip"
	"slices"
	"strings"
)

// A test is one question that a rule asks about a flow.
type test struct {
	kind     testKind
	not      bool
	prefix   netip.Prefix
	protocol uint8
	ports    []portSpan
	iface    string
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
	fromInterface // only ever with not: an address tells where a flow did not come from
)

type portSpan struct{ first, last uint16 }

func (t test) holds(flow Flow, site Site) bool {
	var is bool
	switch t.kind {
	case ofProtocol:
		is = flow.Protocol == t.protocol
	case fromAddress:
		is = t.prefix.Contains(flow.Source.Addr())
	case toAddress:
		is = t.prefix.Contains(flow.Destination.Addr())
	case fromPorts:
		is = within(t.ports, flow.Source.Port())
	case toPorts:
		is = within(t.ports, flow.Destination.Port())
	case fromLocal:
		is = site.Local(flow.Source.Addr())
	case toLocal:
		is = site.Local(flow.Destination.Addr())
	case fromInterface:
		is = site.Beyond(t.iface, flow.Source.Addr())
	}
	return is != t.not
}

func within(spans []portSpan, port uint16) bool {
	return slices.ContainsFunc(spans, func(s portSpan) bool { return s.first <= port && port <= s.last })
}

// A natRule is what a rule asks of an address and a port, and what becomes of
// flows for which it all holds.
type natRule struct {
	target string
	goes   bool // -g: what it leads to does not come back
	tests  []test
	// sure says that tests are all that the rule asks.
	sure bool
	// arrives says that it asks for an interface that packets come in by,
	// which those of the node itself have none of.
	arrives bool
	to      service // of a DNAT to one place; port 0 keeps the flow's
}

// never reports whether no packet of that hook can match.
func (n natRule) never(hook string) bool { return n.arrives && hook == "OUTPUT" }

// readNatRule reads a rule of nat.
func readNatRule(rule Rule) natRule {
	n := natRule{target: rule.Target, sure: true}
	words, err := Split(rule.Spec)
	if err != nil {
		n.sure = false
		return n
	}
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if !f.read(words) {
		n.sure = false
		return n
	}
	n.goes = f.jump == "-g"
	for i := range f.base {
		if f.base[i].given {
			n.base(&f.base[i])
		}
	}
	for i := range f.exts {
		if i != f.target && !slices.Contains([]string{"comment", "udp", "tcp", "sctp", "multiport", "addrtype", "recent"}, f.exts[i].name) {
			n.sure = false
		}
	}
	for i := range f.opts {
		o := &f.opts[i]
		if o.owner == f.target {
			if o.name == "--to-destination" {
				n.to = readDestination(o.words[0])
			}
			continue
		}
		n.option(f.exts[o.owner].name, o)
	}
	return n
}

// add takes a test that could be read; one that could not leaves the rule
// unsure.
func (n *natRule) add(t test, ok bool) {
	if ok {
		n.tests = append(n.tests, t)
	} else {
		n.sure = false
	}
}

func (n *natRule) base(s *setting) {
	switch s.name {
	case "-s", "-d":
		t := test{kind: fromAddress, not: s.not}
		if s.name == "-d" {
			t.kind = toAddress
		}
		text, ok := address(s.words[0])
		if ok {
			var err error
			t.prefix, err = netip.ParsePrefix(text)
			ok = err == nil // a mask need not be a prefix
		}
		n.add(t, ok)
	case "-p":
		text, ok := protocol(s.words[0])
		number, okToo := number(text, 8)
		if ok && okToo && number == 0 && !s.not {
			return // any
		}
		n.add(test{kind: ofProtocol, not: s.not, protocol: uint8(number)}, ok && okToo)
	case "-i":
		if !s.not {
			n.arrives = true
		}
		n.add(test{kind: fromInterface, not: true, iface: s.words[0]}, s.not && !strings.HasSuffix(s.words[0], "+"))
	default: // -o is not known before routing, -f is no question to a flow
		n.sure = false
	}
}

func (n *natRule) option(match string, o *setting) {
	switch match {
	case "comment":
	case "recent":
		// kube-proxy's affinity: what only notes the source always matches.
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
	default:
		n.sure = false
	}
}

// readPorts reads a list of ports and of ranges.
func readPorts(text string) ([]portSpan, bool) {
	list, ok := portList(text)
	if !ok {
		return nil, false
	}
	var spans []portSpan
	for part := range strings.SplitSeq(list, ",") {
		first, last, ranged := strings.Cut(part, ":")
		if !ranged {
			last = first
		}
		a, okA := number(first, 16)
		b, okB := number(last, 16)
		if !okA || !okB || a > b {
			return nil, false
		}
		spans = append(spans, portSpan{uint16(a), uint16(b)})
	}
	return spans, true
}

// readDestination reads where a DNAT sends flows, if that is one address.
func readDestination(text string) service {
	text, ok := natAddress(text)
	if !ok {
		return service{}
	}
	if at, err := netip.ParseAddrPort(text); err == nil {
		return service{addr: at.Addr(), port: at.Port()}
	}
	if a, err := netip.ParseAddr(text); err == nil {
		return service{addr: a}
	}
	return service{}
}
