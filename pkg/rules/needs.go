package rules

import (
	"slices"
	"strings"
)

// Needs are the objects outside of the tables that a rule depends on. Without them the kernel
// refuses the rule.
type Needs struct {
	Sets     []string // ipsets, of the match "set" and the target SET
	Accounts []string // counters of the match "nfacct"
}

// setOptions are the options that name an ipset, as iptables-save prints them (libxt_set.c and
// libxt_SET.c of iptables 1.8.9). "--set" is an option of the match recent.
var setOptions = []string{"--match-set", "--add-set", "--del-set", "--map-set"}

const accountOption = "--nfacct-name"

// Needs returns the objects that the rule depends on. A replay that was refused looks by it
// for missing or replaced sets. It splits a text only if the text may name an object. An
// opaque rule has the names of its ipsets next to its bytes.
func (r Rule) Needs() Needs {
	var n Needs
	if strings.HasPrefix(r.Spec, opaqueStart) {
		n.Sets = r.setNames()
		return n
	}
	if !r.Mentions("set ") && !r.Mentions(accountOption) {
		return n
	}
	words, err := r.Words()
	if err != nil {
		return n
	}
	for i := 0; i+1 < len(words); i++ {
		switch {
		case slices.Contains(freeText, words[i]):
			i++ // free text may look like an option
		case slices.Contains(setOptions, words[i]):
			i++
			n.Sets = append(n.Sets, words[i])
		case words[i] == accountOption:
			i++
			n.Accounts = append(n.Accounts, words[i])
		}
	}
	return n
}

// freeText are the options whose value is free text.
var freeText = []string{"--comment", "--log-prefix", "--nflog-prefix", "--string", "--hex-string"}

// WithoutAccount returns the rule without its matches "nfacct" of that name, for a replay
// where the kernel lacks the counter. They only count, so the rule matches the same packets
// without them.
func (r Rule) WithoutAccount(name string) Rule {
	words, err := r.Words()
	if _, opaque := r.Opaque(); opaque || err != nil {
		return r
	}
	const length = 4 // -m nfacct --nfacct-name NAME
	for i := 0; i+length <= len(words); {
		switch {
		case slices.Contains(freeText, words[i]):
			i += 2
		case slices.Equal(words[i:i+length], []string{"-m", "nfacct", accountOption, name}):
			words = slices.Delete(words, i, i+length)
		default:
			i++
		}
	}
	return Rule{Spec: quoteAll(words), Target: r.Target}
}

// jumpOptions are the options that name a rule's target.
var jumpOptions = []string{"-j", "-g", "--jump", "--goto"}

// WithTarget returns the rule with its target replaced by chain. It matches the same
// packets. A trial writes a rule so if its own target is a chain that does not exist yet. An
// opaque rule stays as it is.
func (r Rule) WithTarget(chain string) Rule {
	words, err := r.Words()
	if _, opaque := r.Opaque(); opaque || err != nil {
		return r
	}
	for i := 0; i+1 < len(words); i++ {
		switch {
		case slices.Contains(freeText, words[i]):
			i++
		case slices.Contains(jumpOptions, words[i]) && words[i+1] == r.Target:
			i++
			words[i] = chain
		}
	}
	return Rule{Spec: quoteAll(words), Target: chain}
}

// Needs returns the objects that the section's rules depend on, each once, sorted by name.
// The daemon stores the ipsets of these names.
func (s Section) Needs() Needs {
	var all Needs
	add := func(r Rule) {
		n := r.Needs()
		all.Sets, all.Accounts = append(all.Sets, n.Sets...), append(all.Accounts, n.Accounts...)
	}
	for i := range s.Chains {
		for _, r := range s.Chains[i].Rules {
			add(r)
		}
	}
	for _, h := range s.Jumps {
		add(h.Rule)
	}
	for _, list := range []*[]string{&all.Sets, &all.Accounts} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return all
}
