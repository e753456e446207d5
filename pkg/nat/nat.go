// Package nat takes a flow's first packet through nat rules of any kind. It computes which flows
// the rules certainly translate, and which of these they masquerade.
//
// A kind of rules, such as iptables' text or the expressions of nf_tables, implements [Chain]: it
// returns each [Way] that a packet may take at a rule. Its base chains are [Hooks]. [New] joins the
// Hooks of all kinds to the [Translations] of a node, a [Site].
//
// The package knows less than the kernel, but its positive answers are certain by the rules that it
// has. Some conditions do not follow from addresses, ports and marks: a probability, or a set that
// rules fill. A rule with such a condition returns several ways, and the walk follows all of them.
// Rules that no Hooks have are not known: other owners' rules before the jumps, and rules of
// mangle that change a mark between two hooks.
//
// Translations count their steps, and chains read their rules late: both are for one goroutine.
package nat

import (
	"cmp"
	"net/netip"
)

// The protocols whose flows nat translates by port, by their numbers.
const (
	TCP  uint8 = 6
	UDP  uint8 = 17
	SCTP uint8 = 132
)

// A Flow is the first packet of a flow before any translation.
type Flow struct {
	Protocol            uint8 // its number in IP
	Source, Destination netip.AddrPort
}

// A Site knows a node's addresses and interfaces.
type Site interface {
	// Local reports whether the node has the address itself. A route can make others local, too.
	Local(netip.Addr) bool
	// Beyond reports whether packets from an address may arrive through an interface.
	Beyond(iface string, a netip.Addr) bool
}

// A Hook is a point of a packet's path at which rules translate it (enum nf_inet_hooks).
type Hook uint8

// The hooks that translate destinations, and the hook that translates the sources of forwarded
// and sent packets.
const (
	Prerouting  Hook = 0
	Output      Hook = 3
	Postrouting Hook = 4
)

// Hooks are the base chains of some nat rules.
type Hooks map[Hook][]Chain

// A Chain is a list of rules.
type Chain interface {
	// Candidates returns the places of the rules that a packet to that destination may match, in
	// up to three sorted lists. So a walk through a large chain is short.
	Candidates(to netip.AddrPort) [3][]int32
	// Ways appends each way that the packet may take at the rule at a place; the packet takes
	// one of them. It may append none if the rule certainly does not match, and leaves the mark
	// as it is.
	Ways(place int32, p *Packet, ways []Way) []Way
}

// A Packet is the first packet of a flow at a place in the rules.
type Packet struct {
	Flow // the destination at Postrouting is the translated one
	Hook Hook
	Site Site
	Mark Mark
}

// A Mark is the known part of a packet's mark: the known bits, and their values. The value of
// an unknown bit is 0.
type Mark struct{ Known, Value uint32 }

// either returns the bits that are known if a packet has either of two marks.
func (m Mark) either(other Mark) Mark {
	known := m.Known & other.Known &^ (m.Value ^ other.Value)
	return Mark{known, m.Value & known}
}

// An Answer says whether a packet meets a condition, for implementations of Chain.
type Answer uint8

// The answers.
const (
	No Answer = iota
	Maybe
	Yes
)

// Sure returns the answer for a condition that is known.
func Sure(is bool) Answer {
	if is {
		return Yes
	}
	return No
}

// A Way is the effect of a rule on a packet.
type Way struct {
	Verdict Verdict
	Mark    Mark  // behind the rule
	Chain   Chain // of Jump and Goto; nil: its rules are not known
	To      Place // of DNAT the new destination, of SNAT the new source
}

// A Verdict says where a packet continues, or how its path through the hook ends.
type Verdict uint8

// The verdicts.
const (
	Next       Verdict = iota // the next rule of the chain; also if the rule does not match
	Return                    // behind the rule that called the chain
	Jump                      // the first rule of Way.Chain, and then the next rule
	Goto                      // the same, but then as Return
	DNAT                      // another destination
	SNAT                      // another source
	Masquerade                // a source that is an address of the node
	Leave                     // no translation, or no packet any more
	Unclear                   // not known: of the flow nothing is certain
)

// A Place is the known part of a translation. The zero Place may be anywhere.
type Place struct {
	Addr netip.Addr
	Port int32 // 0: the packet keeps its own
}

// AnyPort is the port of a Place with a known address and an unknown port.
const AnyPort = -1

// isNot reports whether the place is certainly another than at. A translation to at itself
// changes nothing.
func (p Place) isNot(at netip.AddrPort) bool {
	return p.Addr.IsValid() && (p.Addr != at.Addr() || p.Port > 0 && p.Port != int32(at.Port()))
}

// mayBe reports whether the place may be at. keeps is the port of the packet.
func (p Place) mayBe(at netip.AddrPort, keeps uint16) bool {
	return !p.Addr.IsValid() || p.Addr == at.Addr() && (p.Port == AnyPort || cmp.Or(p.Port, int32(keeps)) == int32(at.Port()))
}

// Translations computes which flows the nat rules of a node send to another destination, and
// which of these flows they masquerade.
type Translations struct {
	site  Site
	hooks Hooks
	steps int // ways followed so far
	// packet is at the present place of a walk, and ways are those of the rules that it is at.
	packet Packet
	ways   []Way
}

// New returns the translations by the base chains of several kinds of rules. A sweep after a
// replay of nat ends the flows that should have been translated and were not.
func New(site Site, kinds ...Hooks) *Translations {
	t := &Translations{site: site, hooks: Hooks{}}
	for _, kind := range kinds {
		for hook, chains := range kind {
			t.hooks[hook] = append(t.hooks[hook], chains...)
		}
	}
	return t
}

// Empty reports whether the rules translate no flow.
func (t *Translations) Empty() bool { return len(t.hooks[Prerouting])+len(t.hooks[Output]) == 0 }

// Translates reports whether the rules certainly send flow to a destination other than its
// own. A sweep ends such a flow if the kernel did not translate it.
func (t *Translations) Translates(flow Flow) bool { return t.changes(t.entry(flow)) }

// Masquerades reports whether the rules certainly masquerade flow after they have sent it to
// backend, on each way through the rules that leads there. A sweep ends such a flow without
// it.
//
// A flow of the node's own is uncertain, because it may already have the address that a
// masquerade would give it. A loopback address is the exception: no masquerade gives a
// loopback address. A flow to a backend on the node itself passes no Postrouting.
func (t *Translations) Masquerades(flow Flow, backend netip.AddrPort) bool {
	if from := flow.Source.Addr(); t.site.Local(from) && !from.IsLoopback() {
		return false
	}
	leads, p := false, t.entry(flow)
	if p.Hook == Prerouting && t.site.Local(backend.Addr()) {
		return false
	}
	for _, c := range t.hooks[p.Hook] {
		w := t.walk(p, c, backend)
		if w.unclear {
			return false
		}
		for _, mark := range w.leads {
			if !t.changes(Packet{Flow{flow.Protocol, flow.Source, backend}, Postrouting, t.site, mark}) {
				return false
			}
			leads = true
		}
	}
	return leads
}

// entry returns the flow's first packet at its first hook: Output if the node sends it, else
// Prerouting. Its mark is not known, because other rules may have set it.
func (t *Translations) entry(flow Flow) Packet {
	hook := Prerouting
	if t.site.Local(flow.Source.Addr()) {
		hook = Output
	}
	return Packet{Flow: flow, Hook: hook, Site: t.site}
}

// changes reports whether a base chain of the packet's hook certainly changes the packet's
// destination, or its source at Postrouting. The kernel takes the first translation of all base
// chains, in an order that is not known here, even one to the same place.
func (t *Translations) changes(p Packet) bool {
	for chains := t.hooks[p.Hook]; ; {
		changed, mark := false, p.Mark
		for _, c := range chains {
			w := t.walk(p, c, netip.AddrPort{})
			if w.unclear || w.keeps {
				return false
			}
			changed = changed || w.changes && !w.left.reached
			mark = w.left.join(course{mark, true}).Mark
		}
		if mark == p.Mark || len(chains) == 1 {
			return changed
		}
		p.Mark = mark // a chain may set the mark for the next
	}
}

// changedBy reports whether a way certainly changes the packet as its hook does.
func (p *Packet) changedBy(way Way) bool {
	if p.Hook == Postrouting {
		return way.Verdict == Masquerade || way.Verdict == SNAT && way.To.isNot(p.Source)
	}
	return way.Verdict == DNAT && way.To.isNot(p.Destination)
}
