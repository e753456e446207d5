package protect

import (
	"iter"
	"slices"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A Lack lists the missing parts of one attachment in a section.
type Lack struct {
	Rules  []rules.Jump // rules that name it, with their chain, and jumps into chains of CNI plugins
	Chains []string     // its own chains that are missing or empty
	// Ahead means that a missing rule leads to a filled chain of the attachment. No plugin
	// leaves that state: portmap flushes the chain first.
	Ahead bool
}

// Lacking returns the parts of want that seen lacks, by attachment. For known attachments it
// also checks their own chains. The verdict and a replay decide by it which containers a
// flush robbed of rules.
func Lacking(want, seen rules.Section, known iter.Seq[Attachment]) map[Attachment]Lack {
	lacks := map[Attachment]Lack{}
	held := chainsOf(seen)
	note := func(h rules.Jump) {
		if a, ok := AttachmentOf(h.Rule); ok {
			l := lacks[a]
			l.Rules = append(l.Rules, h)
			l.Ahead = l.Ahead || len(held[h.Rule.Target]) > 0 && portmaps(h.Rule.Target)
			lacks[a] = l
		}
	}
	for _, c := range want.Chains {
		if !IsCNIChain(c.Name) || rules.EqualRules(c.Rules, held[c.Name]) {
			continue
		}
		for _, r := range c.Rules {
			if !slices.ContainsFunc(held[c.Name], r.Equal) {
				note(rules.Jump{Chain: c.Name, Rule: r})
			}
		}
	}
	for _, h := range want.Jumps {
		if IsCNIChain(h.Into()) && !slices.ContainsFunc(seen.Jumps, h.Same) {
			note(h)
		}
	}
	wanted := chainsOf(want)
	for a := range known {
		for _, name := range a.chains() {
			if len(wanted[name]) > 0 && len(held[name]) == 0 {
				l := lacks[a]
				l.Chains = append(l.Chains, name)
				lacks[a] = l
			}
		}
	}
	return lacks
}

// LeadIn returns the missing rules that lead into a chain of portmap for the attachment.
func (l Lack) LeadIn() []rules.Jump {
	return slices.DeleteFunc(slices.Clone(l.Rules), func(h rules.Jump) bool { return !portmaps(h.Rule.Target) })
}

// portmaps reports whether portmap makes the chain for a container.
func portmaps(chain string) bool {
	return anyMatches(portmapHashed, chain)
}

// chainsOf returns the section's chains of CNI plugins with their rules, for Lacking.
func chainsOf(s rules.Section) map[string][]rules.Rule {
	held := map[string][]rules.Rule{}
	for _, c := range s.Chains {
		if IsCNIChain(c.Name) {
			held[c.Name] = c.Rules
		}
	}
	return held
}
