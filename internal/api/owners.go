package api

import (
	"slices"
	"strconv"
	"strings"
)

// A GuardedOwner is an owner of guarded rules. The evidence for it is the number of its chains
// and rules that ought to be in force, and its native tables.
type GuardedOwner struct {
	Owner string `json:"owner"` // its row in the table of owners, such as kube-proxy
	Word  string `json:"word"`  // of --protect that names it, such as kube; "" if only globs do
	// Chains counts chains of iptables' tables. Rules counts rules of built-in chains that lead
	// to no chain.
	Chains int      `json:"chains,omitempty"`
	Rules  int      `json:"rules,omitempty"`
	Tables []string `json:"tables,omitempty"` // native ones, with their families
}

// Unguarded counts the chains of iptables' tables, the single rules of built-in chains and the
// native tables that --protect does not name. A jump into such a chain counts with the chain.
// Chains that protected rules lead to are guarded, and a firewall manager's chains are not
// counted.
type Unguarded struct {
	Chains int `json:"chains,omitempty"`
	Rules  int `json:"rules,omitempty"`
	Tables int `json:"tables,omitempty"`
	// Names are some of the chains and tables, with their likely owner where it is known.
	Names []string `json:"names,omitempty"`
}

// UnguardedShown is how many names an Unguarded has.
const UnguardedShown = 3

// evidence names the chains, rules and tables by which an owner was found: "8 chains, 4 rules in
// built-in chains". OwnersText puts it into status, page and log. number formats a count.
func (g GuardedOwner) evidence(number func(int) string) string {
	var words []string
	if g.Chains > 0 {
		words = append(words, counted(g.Chains, "chain", number))
	}
	if g.Rules > 0 {
		words = append(words, counted(g.Rules, "rule", number)+" in built-in chains")
	}
	if len(g.Tables) > 0 {
		words = append(words, "table "+strings.Join(g.Tables, ", table "))
	}
	return strings.Join(words, ", ")
}

// OwnersText names the owners by their words of --protect, with the evidence: "kube
// (kube-proxy: 13 chains; kubelet: 2 chains), docker (8 chains)". number formats a count.
func OwnersText(list []GuardedOwner, number func(int) string) string {
	var words []string
	of := map[string][]string{}
	for _, g := range list {
		word, text := g.Word, g.evidence(number)
		if word == "" {
			word = g.Owner
		}
		if word != g.Owner {
			text = g.Owner + ": " + text
		}
		if !slices.Contains(words, word) {
			words = append(words, word)
		}
		of[word] = append(of[word], text)
	}
	for i, word := range words {
		words[i] = word + " (" + strings.Join(of[word], "; ") + ")"
	}
	return strings.Join(words, ", ")
}

// ProtectText names the owners that --protect has found, and the words that guard nothing, in one
// line; "" without --protect.
func (s Status) ProtectText(number func(int) string) string {
	if s.Protect == "" {
		return ""
	}
	text := "--protect=" + s.Protect + ": no owner was found yet"
	if len(s.Owners) > 0 {
		text = "--protect=" + s.Protect + " found: " + OwnersText(s.Owners, number)
	}
	if len(s.IdleWords) > 0 {
		text += "; nothing guarded has the name " + strings.Join(s.IdleWords, " or ")
	}
	return text
}

// Text counts the unguarded chains, rules and tables in one line, and points to the command that
// lists them; "" if there are none.
func (u *Unguarded) Text() string {
	if u == nil || u.Chains+u.Rules+u.Tables == 0 {
		return ""
	}
	var words []string
	for _, part := range []struct {
		n    int
		name string
	}{{u.Chains, "chain"}, {u.Rules, "single rule"}, {u.Tables, "native table"}} {
		if part.n > 0 {
			words = append(words, counted(part.n, part.name, strconv.Itoa))
		}
	}
	text := words[len(words)-1]
	if before := words[:len(words)-1]; len(before) > 0 {
		text = strings.Join(before, ", ") + " and " + text
	}
	if len(u.Names) > 0 {
		text += ", such as " + strings.Join(u.Names, ", ")
	}
	return text + "; canaryd detect lists them, and the words of --protect that would guard them"
}
