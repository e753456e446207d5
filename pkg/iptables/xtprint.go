package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A printer has iptables-legacy print single rules of a table whose saved text does not fit its
// bytes.
type printer struct {
	tools   map[rules.Family]tools
	timeout time.Duration
	env     []string
}

func (k *Kernel) printer() printer {
	return printer{tools: k.tools, timeout: k.cfg.ReadTimeout, env: k.childEnv()}
}

// A ruleAt is a rule by its place: the index counts from 0.
type ruleAt struct {
	chain string
	index int
}

const (
	// printMost is the number of rules that one process prints.
	printMost = 512
	// printTries bounds the processes for so many rules. It takes 19 processes to find a rule
	// that is printed over several lines.
	printTries = 64
)

var (
	// errOverLines: the rule's bytes contain a line break, or something else that breaks its
	// line.
	errOverLines = errors.New("it is not printed on one line")
	// errTries: see printTries.
	errTries = errors.New("so many rules next to it are printed over several lines that it was not asked for alone")
	errName  = errors.New("iptables does not take its chain's name")
)

// print calls f with each of these rules of a table, or with the reason why it has no text;
// printUnknown calls it. One process prints several rules at once. Each rule takes at least one
// line, so equal numbers of lines and rules mean one line for each. Otherwise print halves the
// list.
func (p printer) print(ctx context.Context, family rules.Family, table rules.TableName, wanted []ruleAt, f func(ruleAt, rules.Rule, error)) error {
	wanted = slices.DeleteFunc(slices.Clone(wanted), func(r ruleAt) bool {
		if printableName(r.chain) {
			return false
		}
		f(r, rules.Rule{}, errName)
		return true
	})
	for some := range slices.Chunk(wanted, printMost) {
		tries := 0
		var halve func(some []ruleAt) error
		halve = func(some []ruleAt) error {
			if tries++; tries > printTries {
				for _, r := range some {
					f(r, rules.Rule{}, errTries)
				}
				return nil
			}
			res, err := p.list(ctx, family, table, some)
			if err != nil {
				return err
			}
			switch printed, whole := parseListing(res.stdout, some); {
			case whole:
				for i, r := range some {
					f(r, printed[i], nil)
				}
			case len(some) == 1:
				f(some[0], rules.Rule{}, errOverLines)
			default:
				return errors.Join(halve(some[:len(some)/2]), halve(some[len(some)/2:]))
			}
			return nil
		}
		if err := halve(some); err != nil {
			return err
		}
	}
	return nil
}

// printableName reports whether a chain's name is certainly read as one name in a line for
// iptables-restore. The rules of any other chain are not printed, and are opaque.
func printableName(name string) bool {
	if name == "" || len(name) > rules.MaxName || strings.ContainsAny(name[:1], "-!#") {
		return false
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c > '~' || c == '"' || c == '\'' || c == '\\' {
			return false
		}
	}
	return true
}

// noSuchChain is a name that no chain has. If a chain has it, iptables prints that chain in
// vain.
const noSuchChain = "canaryd-no-such-chain"

// list has one iptables-restore execute a "-S CHAIN NUMBER" for each rule, and then a line that
// fails, so that nothing is written. print calls it, and parseListing judges the output: the
// exit code means nothing.
func (p printer) list(ctx context.Context, family rules.Family, table rules.TableName, wanted []ruleAt) (result, error) {
	var script strings.Builder
	fmt.Fprintf(&script, "*%s\n", table)
	for _, r := range wanted {
		fmt.Fprintf(&script, "-S %s %d\n", r.chain, r.index+1)
	}
	fmt.Fprintf(&script, "-S %s\nCOMMIT\n", noSuchChain)
	path := p.tools[family].restore
	res, err := command{path: path, args: []string{"--noflush"}, stdin: strings.NewReader(script.String()), timeout: p.timeout, env: p.env}.run(ctx)
	if err == nil && len(res.stdout) == 0 && isPermissionText(string(res.stderr)) {
		err = exitError(path, res)
	}
	return res, err
}

// parseListing reads the printed lines of these rules, for print. whole reports that each rule
// has one line; otherwise printed is of no use.
func parseListing(text []byte, wanted []ruleAt) (printed []rules.Rule, whole bool) {
	for line := range bytes.Lines(text) {
		if len(printed) == len(wanted) {
			return nil, false
		}
		rest, ok := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\n")), []byte("-A "+wanted[len(printed)].chain))
		if !ok || len(rest) > 0 && rest[0] != ' ' {
			return nil, false
		}
		printed = append(printed, compactRule(rules.PrintedRule(strings.TrimPrefix(string(rest), " "))))
	}
	return printed, len(printed) == len(wanted)
}
