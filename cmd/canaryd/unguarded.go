package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// chainsFound has the number of rules in each chain, by backend.
type chainsFound map[iptables.Backend][]foundChain

// A foundChain is a chain of iptables' tables that nothing guards.
type foundChain struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	Rules  int             `json:"rules"`
	// Owner is the owner that the name shows, or Manager the firewall manager; "" if none is known.
	Owner   string `json:"owner,omitempty"`
	Manager string `json:"manager,omitempty"`
	Word    string `json:"word,omitempty"` // of --protect that guards it; "" if none does
}

func (c *chainsFound) add(b iptables.Backend, f rules.Family, t rules.TableName, chains map[string]int) {
	if *c == nil {
		*c = chainsFound{}
	}
	for chain, n := range chains {
		if !rules.Builtin(t, chain) {
			(*c)[b] = append((*c)[b], foundChain{Family: f, Table: t, Chain: chain, Rules: n})
		}
	}
}

// takeDaemonsProtect has detect judge by the words of a running daemon, unless it got words of its
// own.
func (o *options) takeDaemonsProtect(ctx context.Context) error {
	if o.protectGiven {
		return nil
	}
	status, err := o.client().Status(ctx)
	if err != nil || status.Protect == "" {
		return nil // no daemon is needed
	}
	words, err := protect.Split(status.Protect)
	var selector protect.Selector
	if err == nil {
		selector, err = protect.NewSelector(words)
	}
	if err != nil {
		return fmt.Errorf("--protect of the running daemon: %w", err)
	}
	o.protect, o.selector = words, selector
	return nil
}

// unguarded returns the chains that nothing guards, in the order of families, tables and names,
// with their likely owners.
func (o *options) unguarded(all []foundChain) []foundChain {
	var found []foundChain
	for _, c := range all {
		if o.selector.Protects(c.Chain) || strings.HasSuffix(c.Chain, "-CANARY") {
			continue
		}
		owner, _ := owners.OfChain(c.Chain)
		if c.Owner = owner.Title; c.Owner == "" {
			c.Manager = owners.ManagerOf(c.Chain)
		}
		c.Word = protect.WordForChain(c.Chain)
		found = append(found, c)
	}
	slices.SortFunc(found, func(a, b foundChain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Chain, b.Chain))
	})
	return found
}

// unguardedShown is how many lines of chains the table has.
const unguardedShown = 40

// writeUnguarded lists unguarded chains. Chains of one table and word share a line.
func writeUnguarded(w io.Writer, e detected) {
	type group struct {
		first  foundChain
		chains int
	}
	var groups []group
	at := map[foundChain]int{}
	for _, c := range e.Unguarded {
		key := foundChain{Family: c.Family, Table: c.Table, Owner: c.Owner, Manager: c.Manager, Word: c.Word}
		if c.Manager != "" || c.Word == "" {
			key.Word = "" // each has a word of its own, which is rarely wanted
		}
		i, known := at[key]
		if !known {
			i, at[key] = len(groups), len(groups)
			groups = append(groups, group{first: c})
			groups[i].first.Rules = 0
		}
		groups[i].chains++
		groups[i].first.Rules += c.Rules
	}
	if len(groups) == 0 {
		return
	}
	rows := [][]string{{"FAMILY", "TABLE", "CHAIN", "RULES", "NOT GUARDED"}}
	for _, g := range groups[:min(len(groups), unguardedShown)] {
		name := plain(g.first.Chain)
		if g.chains > 1 {
			name += fmt.Sprintf(" and %d more", g.chains-1)
		}
		rows = append(rows, []string{g.first.Family.String(), g.first.Table, name, strconv.Itoa(g.first.Rules), g.first.note()})
	}
	fmt.Fprintln(w)
	writeTable(w, rows)
	if more := len(groups) - unguardedShown; more > 0 {
		fmt.Fprintf(w, "%d lines more: --output=json has all\n", more)
	}
}

// note says whose the chain is, and which word guards it.
func (c foundChain) note() string {
	word := "no word can name it"
	if c.Word != "" {
		word = wordWould(c.Word)
	}
	switch {
	case c.Manager != "":
		return aboutManager(c.Manager)
	case c.Owner != "":
		return word + "; " + likely(c.Owner)
	}
	return word
}

// wordWould says that one more word would guard something.
func wordWould(word string) string { return "the word " + plain(word) + " of --protect would" }

func likely(owner string) string { return "likely of " + owner }

func aboutManager(manager string) string {
	return "likely of " + manager + ", which writes its rules again itself"
}
