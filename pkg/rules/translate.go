package rules

import (
	"net/netip"
	"slices"
)

// The protocols whose flows nat translates by port, by their numbers.
const (
	TCP  uint8 = 6
	UDP  uint8 = 17
	SCTP uint8 = 132
)

// A Flow is the first packet of a flow as it came: before any translation.
type Flow struct {
	Protocol            uint8 // IP's number of it
	Source, Destination netip.AddrPort
}

// A Site tells of a node what rules ask about addresses.
type Site interface {
	// Local reports whether an address is one of the node's own.
	Local(netip.Addr) bool
	// Beyond reports whether an address may be of the network that an
	// interface leads to.
	Beyond(iface string, a netip.Addr) bool
}

// Translations says what a family's nat rules do to flows: which they send
// somewhere else, and which of those they masquerade.
//
// It knows less than the kernel, and errs on one side only: what it says
// happens for sure. Each question takes a flow through the rules as its first
// packet would go. A rule with a match that cannot be answered from addresses
// and ports (a probability, an interface, a mark that other rules may have set)
// may match or not, and both ways are followed.
//
// It reads a rule when a flow first comes to it: of the 40,000 rules of 5,000
// services that are the few of the services that were asked for. It is not safe
// for concurrent use.
type Translations struct {
	site   Site
	jumps  map[string]*natChain // the jumps and other rules in built-in chains
	chains map[string]*natChain
	steps  int // rules looked at
}

// These bound what strange rules may cost; real ones come nowhere near.
const (
	maxDepth = 16 // jumps in a row
	// maxSteps is how many rules are looked at for all flows together. A flow
	// to a service takes about 20, one to anywhere else 5.
	maxSteps = 10000000
)

// Translations takes up the family's nat rules on a node.
func (g Generation) Translations(f Family, site Site) *Translations {
	s := g[f.Table(Nat)]
	t := &Translations{site: site, jumps: map[string]*natChain{}, chains: make(map[string]*natChain, len(s.Chains))}
	chains := make([]natChain, len(s.Chains))
	for i, c := range s.Chains {
		chains[i].text = c.Rules
		t.chains[c.Name] = &chains[i]
	}
	for _, h := range s.Jumps {
		if t.jumps[h.Chain] == nil {
			t.jumps[h.Chain] = &natChain{}
		}
		t.jumps[h.Chain].text = append(t.jumps[h.Chain].text, h.Rule)
	}
	return t
}

// Empty reports whether no flow can be translated: nothing leads to a DNAT.
func (t *Translations) Empty() bool { return t.jumps["PREROUTING"] == nil && t.jumps["OUTPUT"] == nil }

// Translates reports whether the rules surely send flow somewhere else than it
// asked for.
func (t *Translations) Translates(flow Flow) bool {
	w := t.through(t.entry(flow), flow, nfmark{})
	elsewhere := func(s reachedDNAT) bool {
		// A flow that is sent to where it goes anyway shows no translation.
		return s.to.addr.IsValid() && (s.to.addr != flow.Destination.Addr() || s.to.port != 0 && s.to.port != flow.Destination.Port())
	}
	return !w.escapes && len(w.dnats) > 0 && !slices.ContainsFunc(w.dnats, func(s reachedDNAT) bool { return !elsewhere(s) })
}

// Masquerades reports whether the rules surely masquerade flow, which they have
// sent to backend: whichever way through them leads there.
//
// A flow of the node's own is never sure: the address that it would be given
// may be the one that it has. Only that of a loopback address never is.
func (t *Translations) Masquerades(flow Flow, backend netip.AddrPort) bool {
	if from := flow.Source.Addr(); t.site.Local(from) && !from.IsLoopback() {
		return false
	}
	w := t.through(t.entry(flow), flow, nfmark{})
	leads := false
	for _, s := range w.dnats {
		if !s.mayLeadTo(backend, flow) {
			continue
		}
		leaving := flow
		leaving.Destination = backend
		if out := t.through("POSTROUTING", leaving, s.mark); out.escapes || !out.masquerades {
			return false
		}
		leads = true
	}
	return leads && !w.unclear
}

// entry returns the built-in chain that the flow's first packet comes to.
func (t *Translations) entry(flow Flow) string {
	if t.site.Local(flow.Source.Addr()) {
		return "OUTPUT"
	}
	return "PREROUTING"
}

// A service is an address and a port that flows are sent to. Port 0 keeps the
// flow's; without an address it is not known.
type service struct {
	addr netip.Addr
	port uint16
}

// A reachedDNAT is a DNAT that a flow may come to, and the mark that it has then.
type reachedDNAT struct {
	to   service
	mark nfmark
}

func (s reachedDNAT) mayLeadTo(backend netip.AddrPort, flow Flow) bool {
	port := s.to.port
	if port == 0 {
		port = flow.Destination.Port()
	}
	return !s.to.addr.IsValid() || s.to.addr == backend.Addr() && port == backend.Port()
}

// A walk takes one flow through one hook of nat.
type walk struct {
	*Translations
	hook string
	flow Flow
	// dnats are the DNATs that it may come to.
	dnats []reachedDNAT
	// masquerades says that it may come to a MASQUERADE.
	masquerades bool
	// escapes says that it may leave the hook in another way than those.
	escapes bool
	// unclear says that there are ways that were not followed to their ends.
	unclear bool
}

func (t *Translations) through(hook string, flow Flow, m nfmark) *walk {
	w := &walk{Translations: t, hook: hook, flow: flow}
	end := course{m, true}
	if c := t.jumps[hook]; c != nil {
		end = w.chain(c, end, 0)
	}
	w.escapes = w.escapes || w.unclear || end.reached
	return w
}

// A course is what is known of the flow at one place: whether it may come
// there, and with which mark.
type course struct {
	nfmark
	reached bool
}

// or joins two courses that lead to one place.
func (c course) join(other course) course {
	switch {
	case !other.reached:
		return c
	case !c.reached:
		return other
	}
	return course{c.either(other.nfmark), true}
}

// chain goes through one chain and returns how the flow comes back from it.
func (w *walk) chain(c *natChain, at course, depth int) (back course) {
	if depth > maxDepth {
		w.unclear = true
		return course{reached: true}
	}
	c.open = true
	defer func() { c.open = false }()
	rules := c.candidates(w.flow.Destination)
	for rule := rules.next(); rule != nil; rule = rules.next() {
		if w.steps++; w.steps > maxSteps {
			w.unclear = true
			return course{reached: true}
		}
		verdict := rule.matches(w, at.nfmark)
		if verdict == no {
			continue
		}
		after, returns := w.target(rule, at, depth)
		if rule.isGoto || rule.unread || returns {
			back = back.join(after)
		}
		if rule.isGoto || returns {
			after = course{}
		}
		if verdict == maybe {
			after = after.join(at)
		}
		if at = after; !at.reached {
			return back
		}
	}
	return back.join(at)
}

// target does what a rule does to packets that match, and returns how they come
// to the next rule of the chain or, where the rule says so, return from it.
func (w *walk) target(rule *natRule, at course, depth int) (after course, returns bool) {
	switch rule.target {
	case "", "LOG", "NFLOG", "ULOG", "AUDIT", "SET":
		return at, false
	case "MARK":
		return course{at.set(rule.set), true}, false
	case "CONNMARK":
		return course{reached: true}, false // it may restore any mark
	case "RETURN":
		return at, true
	case "DNAT":
		w.dnats = append(w.dnats, reachedDNAT{rule.to, at.nfmark})
		return course{}, false
	case "MASQUERADE":
		w.masquerades = true
		return course{}, false
	case "ACCEPT", "DROP", "REDIRECT", "NETMAP", "SNAT", "QUEUE", "NFQUEUE":
		w.escapes = true
		return course{}, false
	}
	next, known := w.chains[rule.target]
	switch {
	case !known: // what it does is not of the generation
		w.escapes = true
		return course{reached: true}, false
	case next.open: // the kernel takes no loop
		return course{reached: true}, false
	}
	return w.chain(next, at, depth+1), false
}
