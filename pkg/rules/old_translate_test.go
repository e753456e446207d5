package rules

import (
	"cmp"
	"net/netip"
	"slices"
)

// The protocols whose flows nat translates by port, by their numbers.
const (
	OldTCP  uint8 = 6
	OldUDP  uint8 = 17
	OldSCTP uint8 = 132
)

// A Flow is the first packet of a flow before any translation.
type OldFlow struct {
	Protocol            uint8 // its number in IP
	Source, Destination netip.AddrPort
}

// A Site knows a node's addresses and interfaces.
type OldSite interface {
	// Local reports whether the node has the address itself.
	Local(netip.Addr) bool
	// Beyond reports whether packets from an address may arrive through an interface.
	Beyond(iface string, a netip.Addr) bool
}

// Translations computes which flows a family's nat rules send to another destination, and which
// of these flows they masquerade.
//
// It knows less than the kernel, but its positive answers are certain. Each method takes the
// first packet of a flow through the rules. Some matches cannot be answered from addresses and
// ports: a probability, an interface, a mark that other rules may have set. A rule with such a
// match may match or not, and the walk follows both ways.
//
// It reads a rule when the first flow reaches it. Of the 40,000 rules of 5,000 services, it
// reads only the few for the services in question. It is not safe for concurrent use.
type OldTranslations struct {
	site   OldSite
	jumps  map[string]*oldNatChain // the jumps and other rules in built-in chains
	chains map[string]*oldNatChain
	steps  int // rules evaluated so far
}

// Bounds for unusual rules. The rules of real nodes stay far below.
const (
	oldMaxDepth = 16 // jumps in a row
	// maxSteps is the number of rules that are evaluated for all flows together. A flow to a
	// service takes about 20, any other flow 5.
	oldMaxSteps = 10000000
)

// Translations returns the translations by the family's nat rules on a node. A sweep after a
// replay of nat ends the flows that should have been translated and were not.
func (g Generation) OldTranslations(f Family, site OldSite) *OldTranslations {
	s := g[f.Table(Nat)]
	t := &OldTranslations{site: site, jumps: map[string]*oldNatChain{}, chains: make(map[string]*oldNatChain, len(s.Chains))}
	chains := make([]oldNatChain, len(s.Chains))
	for i, c := range s.Chains {
		chains[i].text = c.Rules
		t.chains[c.Name] = &chains[i]
	}
	for _, h := range s.Jumps {
		if t.jumps[h.Chain] == nil {
			t.jumps[h.Chain] = &oldNatChain{}
		}
		t.jumps[h.Chain].text = append(t.jumps[h.Chain].text, h.Rule)
	}
	return t
}

// Rewrites reports whether a nat rule of the family may change a packet's address or port.
// Without one, the kernel translates no connection, and canaryd needs no keeper and no copy
// of nat.
func (g Generation) OldRewrites(f Family) bool {
	s := g[f.Table(Nat)]
	return slices.ContainsFunc(s.Jumps, func(h Jump) bool { return oldIsTranslation(h.Rule) }) ||
		slices.ContainsFunc(s.Chains, func(c Chain) bool { return slices.ContainsFunc(c.Rules, oldIsTranslation) })
}

func oldIsTranslation(r Rule) bool {
	return slices.Contains([]string{"DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP"}, r.Target)
}

// Empty reports whether the rules translate no flow: no jump can lead to a DNAT.
func (t *OldTranslations) Empty() bool {
	return t.jumps["PREROUTING"] == nil && t.jumps["OUTPUT"] == nil
}

// Translates reports whether the rules certainly send flow to a destination other than its
// own. A sweep ends such a flow if the kernel did not translate it.
func (t *OldTranslations) Translates(flow OldFlow) bool {
	w := t.through(t.entry(flow), flow, oldNfmark{})
	elsewhere := func(s oldReachedDNAT) bool {
		// A flow that is sent to its own destination does not change.
		return s.to.Addr().IsValid() && (s.to.Addr() != flow.Destination.Addr() || s.to.Port() != 0 && s.to.Port() != flow.Destination.Port())
	}
	return !w.escapes && len(w.dnats) > 0 && !slices.ContainsFunc(w.dnats, func(s oldReachedDNAT) bool { return !elsewhere(s) })
}

// Masquerades reports whether the rules certainly masquerade flow after they have sent it to
// backend, on each way through the rules that leads there. A sweep ends such a flow without
// it.
//
// A flow of the node's own is uncertain, because it may already have the address that a
// masquerade would give it. A loopback address is the exception: no masquerade gives a
// loopback address.
func (t *OldTranslations) Masquerades(flow OldFlow, backend netip.AddrPort) bool {
	if from := flow.Source.Addr(); t.site.Local(from) && !from.IsLoopback() {
		return false
	}
	w := t.through(t.entry(flow), flow, oldNfmark{})
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

// entry returns the built-in chain that the flow's first packet enters: OUTPUT if the node
// sends it, else PREROUTING. Walks begin there.
func (t *OldTranslations) entry(flow OldFlow) string {
	if t.site.Local(flow.Source.Addr()) {
		return "OUTPUT"
	}
	return "PREROUTING"
}

// A reachedDNAT is a DNAT that a flow may reach, and the flow's mark there. Port 0 keeps the
// flow's port; without an address the destination is unknown.
type oldReachedDNAT struct {
	to   netip.AddrPort
	mark oldNfmark
}

func (s oldReachedDNAT) mayLeadTo(backend netip.AddrPort, flow OldFlow) bool {
	port := cmp.Or(s.to.Port(), flow.Destination.Port())
	return !s.to.Addr().IsValid() || s.to.Addr() == backend.Addr() && port == backend.Port()
}

// A walk takes one flow through the chains of a netfilter hook in nat.
type oldWalk struct {
	*OldTranslations
	hook string
	flow OldFlow
	// dnats are the DNATs that the flow may reach.
	dnats []oldReachedDNAT
	// masquerades says that the flow may reach a MASQUERADE.
	masquerades bool
	// escapes says that the flow may leave the hook without any of these.
	escapes bool
	// unclear says that some ways were not followed to their ends.
	unclear bool
}

// through walks a flow with mark m through the built-in chain hook, for Translates and
// Masquerades.
func (t *OldTranslations) through(hook string, flow OldFlow, m oldNfmark) *oldWalk {
	w := &oldWalk{OldTranslations: t, hook: hook, flow: flow}
	end := oldCourse{m, true}
	if c := t.jumps[hook]; c != nil {
		end = w.chain(c, end, 0)
	}
	w.escapes = w.escapes || w.unclear || end.reached
	return w
}

// A course describes the flow at a place: whether it may reach the place, and its mark there.
type oldCourse struct {
	oldNfmark
	reached bool
}

// join returns the course of a flow that may arrive by either of two courses. Bits in which
// their marks differ are unknown.
func (c oldCourse) join(other oldCourse) oldCourse {
	switch {
	case !other.reached:
		return c
	case !c.reached:
		return other
	}
	return oldCourse{c.either(other.oldNfmark), true}
}

// chain takes the flow through one chain, and returns its course when it leaves the chain.
// at is its course at the first rule, depth the number of jumps before. target calls it for
// each jump.
func (w *oldWalk) chain(c *oldNatChain, at oldCourse, depth int) (back oldCourse) {
	if depth > oldMaxDepth {
		w.unclear = true
		return oldCourse{reached: true}
	}
	c.open = true
	defer func() { c.open = false }()
	rules := c.candidates(w.flow.Destination)
	for rule := rules.next(); rule != nil; rule = rules.next() {
		if w.steps++; w.steps > oldMaxSteps {
			w.unclear = true
			return oldCourse{reached: true}
		}
		verdict := rule.matches(w, at.oldNfmark)
		if verdict == oldNo {
			continue
		}
		after, returns := w.target(rule, at, depth)
		if rule.isGoto || rule.unread || returns {
			back = back.join(after)
		}
		if rule.isGoto || returns {
			after = oldCourse{}
		}
		if verdict == oldMaybe {
			after = after.join(at)
		}
		if at = after; !at.reached {
			return back
		}
	}
	return back.join(at)
}

// target applies a rule to a packet that matches. after is the packet's course at the next
// rule of the chain, or, if returns is true, when it leaves the chain. depth is the number
// of jumps so far. walk.chain calls it.
func (w *oldWalk) target(rule *oldNatRule, at oldCourse, depth int) (after oldCourse, returns bool) {
	switch rule.target {
	case "", "LOG", "NFLOG", "ULOG", "AUDIT", "SET":
		return at, false
	case "MARK":
		return oldCourse{at.set(rule.set), true}, false
	case "CONNMARK":
		return oldCourse{reached: true}, false // it may restore any mark
	case "RETURN":
		return at, true
	case "DNAT":
		w.dnats = append(w.dnats, oldReachedDNAT{rule.to, at.oldNfmark})
		return oldCourse{}, false
	case "MASQUERADE":
		w.masquerades = true
		return oldCourse{}, false
	case "ACCEPT", "DROP", "REDIRECT", "NETMAP", "SNAT", "QUEUE", "NFQUEUE":
		w.escapes = true
		return oldCourse{}, false
	}
	next, known := w.chains[rule.target]
	switch {
	case !known: // another owner's chain, with unknown rules
		w.escapes = true
		return oldCourse{reached: true}, false
	case next.open: // a loop, which the kernel refuses
		return oldCourse{reached: true}, false
	}
	return w.chain(next, at, depth+1), false
}
