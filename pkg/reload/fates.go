package reload

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A fate says how a packet may end at a rule, instead of continuing with the next rule. It is a
// set: a rule that leads to a chain may have both fates.
type fate uint8

const (
	grants fate = 1 << iota // the packet is let in, or in nat translated
	keeps                   // it is kept out, or in nat kept from translation
)

// lets reports whether a rule with this fate may let in a packet that lost rules kept out.
func (f fate) lets(lost fate) bool { return f&grants != 0 && lost&keeps != 0 }

// passing are the targets after which a packet continues with the next rule, at most with another
// mark; see detour for the mark. A target that is not listed decides.
var passing = []string{
	"LOG", "NFLOG", "ULOG", "AUDIT", "TRACE", "RATEEST", "IDLETIMER", "LED", "TEE", "SET",
	"MARK", "CONNMARK", "SECMARK", "CONNSECMARK", "HMARK", "CLASSIFY", "CT", "NOTRACK",
	"TCPMSS", "TCPOPTSTRIP", "TTL", "HL", "DSCP", "TOS", "ECN", "CHECKSUM",
}

// fates knows the fates of one table's rules.
type fates struct {
	nat    bool
	wanted map[string][]rules.Rule // the protected chains as the generation has them
	seen   *rules.Table
	known  map[string]fate // of chains
	marked map[string]rules.MarkLoss
	// jumps are the generation's jumps. before has the chains that packets reach from built-in
	// chains other than POSTROUTING, behind the chains that they reach from POSTROUTING. Both are
	// nil until atTheEnd needs them.
	jumps          []rules.Jump
	before, behind map[string]bool
	connections    bool // a rule behind POSTROUTING may set the mark of a connection
}

// fates returns the table's fates with nothing known yet, for findGaps and missingMarks.
func (t *tableTask) fates() *fates {
	f := &fates{nat: t.table == rules.Nat, wanted: make(map[string][]rules.Rule, len(t.want.Section.Chains)), seen: t.seen.Table, known: map[string]fate{}, marked: map[string]rules.MarkLoss{},
		jumps: t.want.Section.Jumps}
	for _, c := range t.want.Section.Chains {
		f.wanted[c.Name] = c.Rules
	}
	return f
}

// of returns the fates of a rule. An unknown target may be a chain that does not exist, so it
// has any fate. The search for gaps compares these with the fates that are lost before a rule.
func (f *fates) of(r rules.Rule) fate {
	if f.leads(r) {
		return f.chain(r.Target)
	}
	switch {
	case r.Target == "ACCEPT" && f.nat, r.Target == "DROP", r.Target == "REJECT":
		return keeps
	case r.Target == "ACCEPT", slices.Contains([]string{"DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP"}, r.Target):
		return grants
	case r.Target == "RETURN", r.Matches(), slices.Contains(passing, r.Target):
		return 0
	case r.LeftOut() && f.nat:
		return grants // only services make a chain of nat so large
	default:
		return grants | keeps
	}
}

// chain returns the fates of all rules in a chain, both in the kernel and in the generation.
// They are the fates of a rule that leads there.
func (f *fates) chain(name string) fate {
	if all, known := f.known[name]; known {
		return all
	}
	f.known[name] = 0 // in a loop each rule counts once
	all := fate(0)
	for _, list := range [][]rules.Rule{f.wanted[name], f.seen.Rules(name)} {
		for _, r := range list {
			all |= f.of(r)
		}
	}
	f.known[name] = all
	return all
}

// lastHook is the last built-in chain that packets reach.
const lastHook = "POSTROUTING"

// atTheEnd reports whether packets reach a chain from nat's POSTROUTING only, where no rule sets
// the mark of a connection. No rule of another table looks at a packet's mark behind that:
// kube-proxy clears the masquerade's there. A connection's mark is on its next packet, too.
func (f *fates) atTheEnd(chain string) bool {
	if !f.nat {
		return false
	}
	if f.before == nil {
		f.before, f.behind = map[string]bool{}, map[string]bool{lastHook: true}
		for _, h := range f.jumps {
			f.follow(h.Rule, f.from(h.Chain == lastHook))
		}
		if f.seen != nil {
			for _, c := range f.seen.Chains {
				if rules.Builtin(f.seen.Name, c.Name) {
					for _, r := range c.Rules {
						f.follow(r, f.from(c.Name == lastHook))
					}
				}
			}
		}
	}
	return f.behind[chain] && !f.before[chain] && !f.connections
}

// from returns the chains that packets reach from nat's last hook, or from the others, for
// follow to extend.
func (f *fates) from(last bool) map[string]bool {
	if last {
		return f.behind
	}
	return f.before
}

// follow notes in reached the chains that packets reach by a rule, for atTheEnd. reached is
// before or behind.
func (f *fates) follow(r rules.Rule, reached map[string]bool) {
	if reached[lastHook] && (r.Target == "CONNMARK" || r.Target == "" && !r.Matches()) {
		f.connections = true
	}
	if r.Target == "" || reached[r.Target] {
		return
	}
	reached[r.Target] = true
	for _, list := range [][]rules.Rule{f.wanted[r.Target], f.seen.Rules(r.Target)} {
		for _, next := range list {
			f.follow(next, reached)
		}
	}
}

// leads reports whether a rule leads to a chain with known rules.
func (f *fates) leads(r rules.Rule) bool {
	_, wanted := f.wanted[r.Target]
	return wanted || f.seen.Chain(r.Target) != nil
}

// marks returns how the marks of packets may differ if a rule is lost. Rules that look for
// these marks may then wait. An unknown target may be a chain that marks packets, but does not
// count as one that clears marks. Otherwise nothing would be masqueraded while a chain of
// another owner is missing.
func (f *fates) marks(r rules.Rule) rules.MarkLoss {
	loss := r.MarkLoss()
	switch {
	case f.leads(r):
		return loss.And(f.marksOf(r.Target))
	case f.of(r) == grants|keeps:
		return loss.And(rules.MarkLoss{Unset: rules.AnyMark.Unset})
	}
	return loss
}

// marksOf returns how marks may differ if a chain is lost. marks adds it to the loss of a rule
// that leads there.
func (f *fates) marksOf(chain string) rules.MarkLoss {
	if all, known := f.marked[chain]; known {
		return all
	}
	f.marked[chain] = rules.MarkLoss{} // in a loop each rule counts once
	var all rules.MarkLoss
	for _, list := range [][]rules.Rule{f.wanted[chain], f.seen.Rules(chain)} {
		for _, r := range list {
			all = all.And(f.marks(r))
		}
	}
	f.marked[chain] = all
	return all
}

// decides reports whether a rule decides about a packet, or which rules it meets next.
func (f *fates) decides(r rules.Rule) bool {
	return r.Target == "RETURN" || f.of(r) != 0 || f.leaves(r)
}

// leaves reports whether a packet may not return from the chain that a rule leads to, because the
// rule uses -g.
func (f *fates) leaves(r rules.Rule) bool { return f.leads(r) && r.Goto() }
