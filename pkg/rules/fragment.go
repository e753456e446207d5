package rules

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/sorting"
)

// A Fragment holds the declarations of an operator's file for one family: chains with their
// rules, and the jumps into them.
type Fragment struct {
	Sections map[TableName]Section
	// Lines are the numbers of the lines that declare the chains.
	Lines map[TableName]map[string]int
	// RuleLines are the numbers of the lines of the rules, jumps included. For equal rules of
	// one chain it has the first line.
	RuleLines map[TableName]map[ChainRule]int
}

// A ChainRule is a rule of a chain.
type ChainRule struct {
	Chain string
	Rule  Key
}

// ParseFragment reads a fragment, which is input of iptables-restore reduced to these parts:
//
//	*filter
//	:SITE-DROP - [0:0]              a chain of the fragment; each must be declared
//	-A SITE-DROP -s 192.0.2.0/24 -j DROP
//	-A FORWARD -j SITE-DROP         a jump, behind all other rules of FORWARD
//	-I INPUT -j SITE-DROP           a jump, before all other rules of INPUT;
//	                                of several, the last one comes first, as in iptables
//	COMMIT
//
// Built-in chains need no declaration. Each rule in them must jump to a chain of the same table
// of this fragment, because any other rule would change a foreign chain. ParseFragment also
// refuses values that cannot be compared with the kernel's output: host names, and lists of
// addresses, which iptables splits into several rules.
//
// The error is a *ParseError, or that of the reader.
func ParseFragment(r io.Reader, family Family, tables ...TableName) (Fragment, error) {
	p := fragmentParser{family: family, tables: tables, all: Fragment{
		Sections: map[TableName]Section{}, Lines: map[TableName]map[string]int{}, RuleLines: map[TableName]map[ChainRule]int{},
	}}
	scan := bufio.NewScanner(r)
	scan.Buffer(make([]byte, 0, 4096), 64<<10)
	for scan.Scan() {
		p.number++
		if err := p.line(strings.TrimRight(scan.Text(), " \t\r")); err != nil {
			if err.Line == 0 {
				err.Line = p.number
			}
			return Fragment{}, err
		}
	}
	if err := scan.Err(); err != nil {
		return Fragment{}, fmt.Errorf("reading line %d: %w", p.number+1, err)
	}
	if p.table != nil {
		return Fragment{}, &ParseError{Line: p.opened, Text: "*" + string(p.table.Name), Reason: "is not closed by COMMIT: is the file cut off?"}
	}
	return p.all, nil
}

type fragmentParser struct {
	family Family
	tables []TableName // the tables that a fragment may have
	all    Fragment
	number int

	table  *Table // the open table
	opened int    // its line
	lines  map[string]int
	rules  map[ChainRule]int
	jumps  []numberedJump
}

type numberedJump struct {
	Jump
	line int
	text string
}

// line reads one line of a fragment for ParseFragment; nil if the line is allowed.
// ParseFragment adds the number to an error whose Line is 0.
func (p *fragmentParser) line(text string) *ParseError {
	reason := ""
	switch {
	case text == "" || text[0] == '#':
		return nil
	case p.table == nil && len(p.all.Sections) == 0 && !opensTable(text):
		// The text is not quoted: the file may be a link to a file of secrets.
		return &ParseError{Reason: "is outside a table: a fragment begins, after comments, with a line such as *filter"}
	case text[0] == '*':
		reason = p.open(text)
	case p.table == nil:
		reason = "is outside a table: begin one with a line such as *filter"
	case text == "COMMIT":
		return p.close()
	case text[0] == ':':
		reason = p.declaration(text)
	default:
		reason = p.rule(text)
	}
	if reason == "" {
		return nil
	}
	return &ParseError{Text: text, Reason: reason}
}

// opensTable reports whether a line begins a table of iptables.
func opensTable(text string) bool {
	return text[0] == '*' && slices.Contains(AllTables(), TableName(strings.TrimSpace(text[1:])))
}

// open begins a table for line. Like declaration and rule it returns why the line is not
// allowed, or "".
func (p *fragmentParser) open(text string) (reason string) {
	name := TableName(strings.TrimSpace(text[1:]))
	switch _, again := p.all.Sections[name]; {
	case p.table != nil:
		return "opens a table inside another one: end that with COMMIT"
	case !slices.Contains(p.tables, name):
		return "is none of the tables that canaryd guards: " + strings.Join(p.tables, ", ")
	case again:
		return "opens a table that was closed above: write all of its rules into one section"
	}
	p.table, p.opened, p.lines, p.rules, p.jumps = NewTable(name), p.number, map[string]int{}, map[ChainRule]int{}, nil
	return ""
}

// declaration reads ":CHAIN - [packets:bytes]" for line, and adds the chain. It returns why
// the line is not allowed, or "".
func (p *fragmentParser) declaration(text string) (reason string) {
	fields := strings.Fields(text[1:])
	if len(fields) == 0 {
		return "declares no chain"
	}
	name, policy := fields[0], "-"
	if len(fields) > 1 {
		policy = fields[1]
	}
	if Builtin(p.table.Name, name) {
		if policy != "-" {
			return "sets a policy, which canaryd never does: leave the line out"
		}
		return ""
	}
	if err := CheckChainName(name); err != nil {
		return "cannot be: " + err.Error()
	}
	switch {
	case strings.HasSuffix(name, "-CANARY"):
		return "is a canary's name, by which its owner notices a flush: choose another"
	case slices.Contains([]string{"ACCEPT", "DROP", "RETURN", "QUEUE"}, name):
		return "has a verdict's name: choose another"
	case policy != "-":
		return "gives a policy to a chain that has none: write - in its place"
	case p.lines[name] != 0:
		return fmt.Sprintf("is declared on line %d already", p.lines[name])
	}
	p.table.Add(Chain{Name: name})
	p.lines[name] = p.number
	return ""
}

// rule reads -A or -I and adds the rule to its chain. In a built-in chain it must be a jump,
// which close checks. It returns why the line is not allowed, or "".
func (p *fragmentParser) rule(text string) (reason string) {
	command := text
	if strings.HasPrefix(text, "[") { // counters
		found := false
		if _, command, found = strings.Cut(text, "] "); !found {
			return "has counters without a closing bracket"
		}
	}
	verb, rest, _ := strings.Cut(command, " ")
	if verb != "-A" && verb != "-I" {
		return "is no rule: a fragment holds *TABLE, :CHAIN -, -A, -I and COMMIT"
	}
	name, spec, _ := strings.Cut(strings.TrimLeft(rest, " "), " ")
	spec = strings.TrimLeft(spec, " ")
	rule, err := ParseRule(spec)
	if wrong, bad := errors.AsType[*ParseError](err); bad {
		return wrong.Reason
	}
	if err := rule.validate(); err != nil {
		return "holds a control character"
	}
	if reason := p.checkWords(spec); reason != "" {
		return reason
	}
	if reason, opaque := rule.Opaque(); opaque {
		return "is not allowed in a fragment: " + reason
	}
	if key := (ChainRule{name, rule.Key()}); p.rules[key] == 0 {
		p.rules[key] = p.number
	}
	if Builtin(p.table.Name, name) {
		position := Bottom
		if verb == "-I" {
			position = Top
		}
		// close checks at the end of the table whether it is a jump.
		p.jumps = append(p.jumps, numberedJump{Jump{Chain: name, Rule: rule, Anchor: Anchor{Position: position}}, p.number, text})
		return ""
	}
	chain := p.table.Chain(name)
	switch {
	case chain == nil && isBuiltinName(name):
		return "adds to a chain that table " + string(p.table.Name) + " does not have"
	case chain == nil:
		return "adds to a chain that is not declared above: write :" + name + " - [0:0] if it is yours; chains of others stay theirs"
	case verb == "-I":
		return "inserts into a chain of the fragment: write its rules with -A in their order"
	}
	chain.Rules = append(chain.Rules, rule)
	return ""
}

// checkWords returns why a fragment may not have a rule, or "". The parser calls it for each -A
// and -I with the words behind the chain. iptables would refuse such words, or take them for a
// rule's number, another table, or a host's name to look up. readOptions also refuses options
// that canaryd would misread; its reasons then begin with the option in quotes.
func (p *fragmentParser) checkWords(spec string) string {
	words, _ := Split(spec) // ParseRule split it without an error
	if len(words) > 0 && words[0] != "!" && !strings.HasPrefix(words[0], "-") {
		return "begins with a number or a word that is no option: write -I without a rule's number"
	}
	if len(words) > 0 && (words[0] == "-t" || words[0] == "--table") {
		return "names a table: leave that to the line *TABLE above"
	}
	for i, word := range words {
		if i+1 == len(words) && baseOptions[word] != "" && word != "-f" && !strings.HasPrefix(word, "--frag") {
			return "has no value behind " + word
		}
	}
	reason := readOptions(words, func(option, value string) string {
		switch {
		case slices.Contains([]string{"-s", "-d"}, baseOptions[option]), slices.Contains(hostOptions, option):
			return checkAddress(value, p.family)
		case option == "--to" && strings.ContainsFunc(value, func(c rune) bool { return c > 'f' || c >= 'G' && c <= 'Z' }):
			return fmt.Sprintf("has %q where an address is due: names are not looked up", value) // NETMAP's
		}
		return ""
	})
	if strings.HasPrefix(reason, `"`) { // reasons of misread begin with the word
		return "is not allowed in a fragment: " + reason
	}
	return reason
}

// hostOptions are the options of extensions whose value may be a name that iptables looks up
// (XTTYPE_HOST and XTTYPE_HOSTMASK, 1.8.9).
var hostOptions = []string{
	"--ctorigsrc", "--ctorigdst", "--ctreplsrc", "--ctrepldst", "--on-ip", "--gateway", "--tunnel-src", "--tunnel-dst",
	"--vaddr", "--src-pfx", "--dst-pfx", "--ahres", "--rt-0-addrs",
}

// checkAddress returns why a rule of that family may not have text, an address with or
// without a mask, or "". checkWords calls it for -s, -d and the like.
func checkAddress(text string, family Family) string {
	if strings.Contains(text, ",") {
		return fmt.Sprintf("lists addresses (%s), which iptables splits into several rules: write one rule for each", text)
	}
	address, _, _ := strings.Cut(text, "/")
	ip, err := netip.ParseAddr(address)
	switch {
	case err != nil && strings.Trim(address, "0123456789.") == "":
		return "" // iptables knows short forms such as 10/8
	case err != nil:
		return fmt.Sprintf("has %q where an address is due: names are not looked up", address)
	case ip.Is4() != (family == IPv4):
		return fmt.Sprintf("has the address %s in a file of rules for %s", address, family)
	default:
		return ""
	}
}

// close ends a table at COMMIT and adds its section. An error means that a rule in a
// built-in chain jumps to no chain of the table, or that a jump is there twice.
func (p *fragmentParser) close() *ParseError {
	s := Section{Chains: p.table.Chains}
	for i, h := range p.jumps {
		wrong := func(reason string) *ParseError { return &ParseError{Line: h.line, Text: h.text, Reason: reason} }
		if p.table.Chain(h.Rule.Target) == nil {
			return wrong("is a rule in a built-in chain that jumps to no chain of this table of this file: " +
				"declare a chain, put the rule there, and jump to it from " + h.Chain)
		}
		for _, o := range p.jumps[:i] {
			if o.Same(h.Jump) {
				return wrong(fmt.Sprintf("is on line %d already", o.line))
			}
		}
		s = s.Then(Section{Jumps: []Jump{h.Jump}})
	}
	sorting.Stable(s.Jumps, func(a, b Jump) int {
		return slices.Index(builtin[p.table.Name], a.Chain) - slices.Index(builtin[p.table.Name], b.Chain)
	})
	s.DependsOn = chainsOfOthers(p.table)
	p.all.Sections[p.table.Name] = s
	p.all.Lines[p.table.Name], p.all.RuleLines[p.table.Name] = p.lines, p.rules
	p.table = nil
	return nil
}

// Then returns the section that results from loading later after s. The top jumps of later
// are placed before the jumps of s, and its bottom jumps behind them. internal/source joins
// its sources so, in their order.
func (s Section) Then(later Section) Section {
	var top, bottom []Jump
	for _, h := range later.Jumps {
		if h.Anchor.Position == Top {
			top = append(top, h)
		} else {
			bottom = append(bottom, h)
		}
	}
	joined := s.Join(later)
	joined.Jumps = slices.Concat(top, s.Jumps, bottom)
	return joined
}

// chainsOfOthers returns the targets of t's rules that must be other owners' chains; close
// makes them the section's DependsOn. These are the operands of -g, and names that no
// extension can have: extensions use capitals and digits only. A target such as DOCKER is
// not returned.
func chainsOfOthers(t *Table) []string {
	var found []string
	for i := range t.Chains {
		for _, r := range t.Chains[i].Rules {
			if r.Target == "" || t.Chain(r.Target) != nil || slices.Contains(found, r.Target) {
				continue
			}
			words, _ := r.Words()
			goes := slices.Contains(words, "-g") || slices.Contains(words, "--goto")
			if goes || strings.Trim(r.Target, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") != "" {
				found = append(found, r.Target)
			}
		}
	}
	slices.Sort(found)
	return found
}
