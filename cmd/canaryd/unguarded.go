package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unguardedFound has the unguarded chains and rules of iptables' tables, for the output of
// detect.
type unguardedFound struct {
	Chains []foundChain `json:"unguarded,omitempty"`
	// Rules are single rules of built-in chains. More counts the rules that are not in the
	// first ruleLines lines.
	Rules []foundRule `json:"unguardedRules,omitempty"`
	More  int         `json:"unguardedRulesMore,omitempty"`
	// NotGuarded has the counts in the status: without firewall managers' chains, rules and
	// tables.
	NotGuarded api.Unguarded `json:"notGuarded"`
	// Unknown names the tables that could not be read, with the reasons.
	Unknown []string `json:"unguardedUnknown,omitempty"`
}

// A foundChain is an unguarded chain of iptables' tables.
type foundChain struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	Rules  int             `json:"rules"`
	// NotRead means that the chain has too many rules.
	NotRead bool `json:"notRead,omitempty"`
	foundOwner
}

// A foundRule is an unguarded rule of a built-in chain, or several that share one remark.
type foundRule struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	Rule   string          `json:"rule"` // the first one's text, at most ruleBytes
	Rules  int             `json:"rules"`
	foundOwner
	// Alike means that the rules differ in numbers and addresses only. Each has a word, and no
	// single word names just these.
	Alike bool `json:"alike,omitempty"`
}

// A foundOwner is the owner, or the firewall manager, by a chain's name or a rule's form; "" if
// none is known.
type foundOwner struct {
	Owner   string `json:"owner,omitempty"`
	Manager string `json:"manager,omitempty"`
	Word    string `json:"word,omitempty"` // of --protect to guard it; "" if none can
}

const (
	// unguardedShown is how many lines of chains, and of rules, the table has.
	unguardedShown = 40
	ruleLines      = 200 // of rules in JSON
	ruleBytes      = 256
	ruleCell       = 80 // characters of a rule in the table
)

// takeDaemonsProtect makes detect judge by the words of a running daemon. It returns true if it
// did: detect then also counts the daemon's declared chains as guarded. Given --protect, or
// without a daemon, it is false.
func (o *options) takeDaemonsProtect(ctx context.Context) (bool, error) {
	if o.protectGiven {
		return false, nil
	}
	status, err := o.client().Status(ctx)
	if err != nil || status.Protect == "" {
		return false, nil // no daemon is needed
	}
	words, err := protect.Split(status.Protect)
	var selector protect.Selector
	if err == nil {
		selector, err = protect.NewSelector(words)
	}
	if err != nil {
		return false, fmt.Errorf("--protect of the running daemon: %w", err)
	}
	o.protect, o.selector = words, selector
	return true, nil
}

// findUnguarded returns the unguarded chains and rules of a backend. daemons means that the
// words are a running daemon's. An error is part of the answer, because the rest of detect's
// output is valid without it.
func (o *options) findUnguarded(ctx context.Context, b iptables.Backend, daemons bool) unguardedFound {
	var want rules.Generation
	var errs [2]error
	if daemons {
		want, errs[0] = o.daemonsChains(ctx)
	}
	seen, err := o.readTables(ctx, b)
	errs[1] = err
	found := o.unguarded(seen, want)
	for _, err := range errs {
		if err != nil {
			found.Unknown = append(found.Unknown, err.Error())
		}
	}
	return found
}

// daemonsChains returns the chains of the running daemon's generation, without their rules. Files
// may declare chains that no word names.
func (o *options) daemonsChains(ctx context.Context) (rules.Generation, error) {
	g := rules.Generation{}
	for _, f := range o.families {
		text, err := o.client().Render(ctx, api.RenderRequest{Family: f})
		if err != nil {
			return nil, fmt.Errorf("asking the running daemon for its generation: %w", err)
		}
		var table rules.TableID
		for line := range strings.Lines(text) {
			switch name, _, _ := strings.Cut(strings.TrimSpace(line[1:]), " "); line[0] {
			case '*':
				table = f.Table(name)
			case ':':
				section := g[table]
				section.Chains = append(section.Chains, rules.Chain{Name: name})
				g[table] = section
			}
		}
	}
	return g, nil
}

// readTables reads iptables' tables of a backend, with the text of rules. It executes iptables for
// rules that canaryd cannot spell, and writes nothing.
func (o *options) readTables(ctx context.Context, b iptables.Backend) (seen []iptables.Snapshot, err error) {
	cfg := o.kernelConfig()
	cfg.Backend, cfg.Protects = b, o.selector.Protects
	kernel, err := iptables.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = cmp.Or(err, kernel.Close()) }()
	for _, f := range kernel.Families() {
		snapshot, err := kernel.Read(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		seen = append(seen, snapshot)
	}
	return seen, nil
}

// unguarded returns the unguarded chains and rules of the tables, with likely owners and words.
// The chains in want are guarded by a running daemon; nil if none runs. Unreadable tables
// appear in Unknown.
func (o *options) unguarded(seen []iptables.Snapshot, want rules.Generation) (found unguardedFound) {
	p := o.selector.Protection()
	for _, s := range seen {
		for _, t := range protect.Tables() {
			if err := s.Unreadable[t]; err != nil {
				found.Unknown = append(found.Unknown, fmt.Sprintf("%s %s: %v", s.Family, t, err))
				continue
			}
			table := s.Tables[t]
			if table == nil {
				continue
			}
			list := protect.UnguardedIn(p.OthersIn(table, want[s.Family.Table(t)], canary.IsMark), table)
			chains, single := protect.CountUnguarded(list)
			found.NotGuarded.Chains += chains
			found.NotGuarded.Rules += single
			found.add(s.Family, t, list, tablesOf(seen, t))
		}
	}
	sorting.Stable(found.Chains, func(a, b foundChain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Chain, b.Chain))
	})
	return found
}

// tablesOf returns the tables with that name in all families; nil for a table that does not
// exist. add needs them, because one word names rules of all families.
func tablesOf(seen []iptables.Snapshot, t rules.TableName) (tables []*rules.Table) {
	for _, s := range seen {
		tables = append(tables, s.Tables[t])
	}
	return tables
}

// add adds the unguarded chains and rules of one table. in are the tables with that name in all
// families.
func (found *unguardedFound) add(f rules.Family, t rules.TableName, list []protect.Unguarded, in []*rules.Table) {
	single := map[string][]protect.Unguarded{}
	var chains []string
	for _, u := range list {
		if !u.Single {
			owner := foundOwner{u.Owner, u.Manager, protect.WordForChain(u.Chain)}
			found.Chains = append(found.Chains, foundChain{f, t, u.Chain, u.Rules, u.LeftOut, owner})
			continue
		}
		if len(single[u.Chain]) == 0 {
			chains = append(chains, u.Chain)
		}
		single[u.Chain] = append(single[u.Chain], u)
	}
	for _, chain := range chains {
		proposals, more := protect.Propose(single[chain], t, in, ruleLines-len(found.Rules))
		found.More += more
		for _, p := range proposals {
			owner := foundOwner{p.Owner, p.Manager, p.Word}
			found.Rules = append(found.Rules, foundRule{f, t, chain, ruleText(p.Rule), p.Count, owner, p.Alike})
		}
	}
}

// ruleText returns a rule's text, or why it has none, with at most ruleBytes.
func ruleText(r rules.Rule) string {
	text, readable := r.Readable()
	if !readable {
		reason, _ := r.Opaque()
		text = "(a rule without a text: " + reason + ")"
	} else if text == "" {
		text = "(any packet, without a target)"
	}
	return shorter(text, ruleBytes)
}

// shorter returns the beginning of a text if it is longer than n bytes.
func shorter(text string, n int) string {
	if len(text) <= n {
		return text
	}
	return strings.ToValidUTF8(text[:n-len("...")], "?") + "..."
}

// writeUnguarded lists unguarded chains and rules. Chains of one table and word share a line.
func writeUnguarded(w io.Writer, found unguardedFound) {
	rows := chainRows(found.Chains)
	writeFirst(w, []string{"FAMILY", "TABLE", "CHAIN", "RULES", "NOT GUARDED"}, rows)
	rows = nil
	for _, r := range found.Rules {
		rows = append(rows, []string{r.Family.String(), r.Table, r.Chain, strconv.Itoa(r.Rules), plain(shorter(r.Rule, ruleCell)), r.note()})
	}
	writeFirst(w, []string{"FAMILY", "TABLE", "CHAIN", "RULES", "THE FIRST RULE", "NOT GUARDED"}, rows)
	if found.More > 0 {
		fmt.Fprintf(w, "%s more: these lists are bounded\n", count(found.More, "single rule"))
	}
	for _, why := range found.Unknown {
		fmt.Fprintf(w, "\n%s: which chains and rules are not guarded is not known: %s\n", paint(w, yellow, "warning"), plain(oneLine(why)))
	}
}

// writeFirst writes the first unguardedShown lines of a list with its heading, and counts the
// others. Without lines it writes nothing.
func writeFirst(w io.Writer, heading []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	fmt.Fprintln(w)
	writeTable(w, append([][]string{heading}, rows[:min(len(rows), unguardedShown)]...))
	if more := len(rows) - unguardedShown; more > 0 {
		fmt.Fprintf(w, "%d lines more: --output=json has them\n", more)
	}
}

// chainRows returns the lines for chains, at most one for each table, owner and word. A line
// names the first chain, counts the others, and adds up their rules.
func chainRows(list []foundChain) (rows [][]string) {
	type group struct {
		first  foundChain
		chains int
	}
	var groups []group
	at := map[foundChain]int{}
	for _, c := range list {
		key := foundChain{Family: c.Family, Table: c.Table, NotRead: c.NotRead, foundOwner: c.foundOwner}
		if c.Manager != "" || c.Word == "" {
			key.Word = "" // each has a word of its own, which users rarely want
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
	for _, g := range groups {
		name, n := plain(g.first.Chain), strconv.Itoa(g.first.Rules)
		if g.chains > 1 {
			name += fmt.Sprintf(" and %d more", g.chains-1)
		}
		if g.first.NotRead {
			n = "too many"
		}
		rows = append(rows, []string{g.first.Family.String(), g.first.Table, name, n, g.first.note()})
	}
	return rows
}

// note names the word that guards a rule or several, for detect's column NOT GUARDED. Alike
// means that no one word names just these.
func (r foundRule) note() string {
	if r.Alike {
		return "each has a word of its own, and no one word names just these"
	}
	return r.foundOwner.note()
}

// note names the likely owner of the chain or rule, and the word of --protect that would guard
// it. Rules of a manager need no guard: aboutManager says so.
func (o foundOwner) note() string {
	word := "no word can name it"
	if o.Word != "" {
		word = wordWould(o.Word)
	}
	switch {
	case o.Manager != "":
		return aboutManager(o.Manager)
	case o.Owner != "":
		return word + "; " + likely(o.Owner)
	}
	return word
}

// wordWould is the remark that one more word would guard something. The quotes are for the
// shell.
func wordWould(word string) string {
	if strings.Contains(word, " ") || strings.HasPrefix(word, "rule:") {
		word = "'" + word + "'"
	}
	return "the word " + plain(word) + " of --protect would"
}

func likely(owner string) string { return "likely of " + owner }

func aboutManager(manager string) string {
	return "likely of " + manager + ", which writes its rules again itself"
}
