package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A printer has iptables-nft print chains.
//
// It gives one iptables-restore many "-S CHAIN" lines, which it obeys: 512
// chains of 5,000 services take 25 ms, all of them in pieces of 512 as long as
// one iptables-nft-save (iptables 1.8.9). The save fetches all rules between
// two equal genids and never returns next to a busy writer; a piece does.
//
// The last line is one that fails, so that no transaction is sent. Without it
// iptables would send one: empty, but in its turn all the same, and from the
// beginning whenever another process was faster. Next to an owner that does nothing but commit
// (66 times a second at 1,000 services) that took 0.8 s, and what was printed was past.
type printer struct {
	tools   map[rules.Family]tools
	timeout time.Duration
	env     []string
	late    bool // the program gets its input when it has started: fetchesLate
	// ready, which may be nil, is called before chains are asked for. It corrects how many rules
	// the chains hold by then.
	ready func(chains []printedChain) error
}

// fetchesLate is the first version of which iptables-nft-restore --noflush is known to fetch
// nothing before its first line. 1.8.4 fetches all rules when it starts; those that
// TestMirrorBesideBusyWriter runs with do not.
var fetchesLate = version{1, 8, 7}

func (k *Kernel) printer() printer {
	return printer{tools: k.tools, timeout: k.cfg.ReadTimeout, env: k.childEnv(), late: k.info.Backend == NFT && !k.version.before(fetchesLate)}
}

// printMost is how many chains one process prints. Fetching them must fit
// between two commits of a busy writer.
const printMost = 512

// errUnprintable: iptables does not understand a chain.
var errUnprintable = errors.New("holds rules that iptables cannot print")

// A failedPrint is what became of an iptables that was to print one chain. Versions differ in what
// they say of a chain that is gone; the caller asks the kernel whether it is.
type failedPrint struct{ error }

func (f failedPrint) Unwrap() error { return f.error }

// A printedChain is what one is to print of a chain: all of its rules, of which there are so many.
type printedChain struct {
	place Place
	rules int
}

// errLines: a chain is printed on other lines than its rules are. If it did not change meanwhile,
// a rule is printed over several lines, which may say anything.
var errLines = errors.New("is not printed as one line a rule")

// print calls f with each chain's rules, or with why they are not to be used: errLines, or why
// iptables cannot print it. chains must be at most printMost. After an error some may be missing.
func (p printer) print(ctx context.Context, family rules.Family, chains []printedChain, f func(Place, []rules.Rule, error)) error {
	for len(chains) > 0 {
		if !printableName(chains[0].place.Chain) {
			f(chains[0].place, nil, errors.New("its name is none that iptables takes"))
			chains = chains[1:]
			continue
		}
		n := 1
		for n < len(chains) && printableName(chains[n].place.Chain) && chains[n].place.Table == chains[0].place.Table {
			n++
		}
		done, err := p.batch(ctx, family, chains[:n], f)
		if err != nil {
			return err
		}
		chains = chains[done:]
		if done == n {
			continue
		}
		// It stopped at this one; alone it says why, or (if this iptables
		// lists nothing in a restore) is printed.
		if err := p.single(ctx, family, chains[0], f); err != nil {
			return err
		}
		chains = chains[1:]
	}
	return nil
}

// printableName reports whether a chain's name can stand in a line for
// iptables-restore and be nothing but a name. nft allows any, and up to 127 characters.
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

// noSuchChain is a name that no chain has. If one does, it is printed in vain.
const noSuchChain = "canaryd-no-such-chain"

// batch prints as many of chains, which are of one table, as iptables-restore does
// before it stops. The last one is printed twice: with the second time begins what
// comes after the first. Chains that have no rules by then are not asked for.
func (p printer) batch(ctx context.Context, family rules.Family, chains []printedChain, f func(Place, []rules.Rule, error)) (int, error) {
	var asked []int // of chains
	began := false  // else the program ended before: alone it says why
	res, err := p.list(ctx, family, chains[0].place.Table, func() ([]string, error) {
		began = true
		if p.ready != nil {
			if err := p.ready(chains); err != nil {
				return nil, err
			}
		}
		var commands []string
		for i, c := range chains {
			if c.rules > 0 {
				asked, commands = append(asked, i), append(commands, c.place.Chain)
			}
		}
		return append(commands, commands[max(len(commands)-1, 0):]...), nil
	})
	if err != nil || !began {
		return 0, err
	}
	if len(asked) == 0 {
		return len(chains), nil
	}
	twice := make([]printedChain, 0, len(asked)+1)
	for _, i := range asked {
		twice = append(twice, chains[i])
	}
	twice = append(twice, twice[len(asked)-1])
	listed, whole := parseListing(res.stdout, twice)
	if whole && len(listed) == len(twice) {
		listed = listed[:len(asked)]
	} else if whole {
		listed = listed[:min(len(listed), len(asked)-1)]
	}
	for i, l := range listed {
		if err := l.err(twice[i].rules); err != nil && !whole {
			// What follows it may be a rule's text. It is asked for again.
			f(twice[i].place, nil, err)
			return asked[i] + 1, nil
		} else if err != nil {
			f(twice[i].place, nil, err)
		} else {
			f(twice[i].place, l.rules, nil)
		}
	}
	if len(listed) == len(asked) {
		return len(chains), nil
	}
	return asked[len(listed)], nil
}

// list has one iptables-restore obey "-S" with each of the words that commands returns. If the
// program can wait, they are asked for when it does. Without any it does nothing.
func (p printer) list(ctx context.Context, family rules.Family, table rules.TableName, commands func() ([]string, error)) (result, error) {
	script := func() (string, error) {
		list, err := commands()
		if err != nil || len(list) == 0 {
			return "", err
		}
		return "*" + string(table) + "\n-S " + strings.Join(list, "\n-S ") + "\n-S " + noSuchChain + "\nCOMMIT\n", nil
	}
	stdin, err := p.input(script)
	if err != nil {
		return result{}, err
	}
	path := p.tools[family].restore
	res, err := command{path: path, args: []string{"--noflush"}, stdin: stdin, timeout: p.timeout, env: p.env}.run(ctx)
	if err == nil && len(res.stdout) == 0 && isPermissionText(string(res.stderr)) {
		err = exitError(path, res)
	}
	return res, err
}

// input returns the input of a program that obeys script.
func (p printer) input(script func() (string, error)) (io.WriterTo, error) {
	if p.late {
		return heldScript(script), nil
	}
	text, err := script()
	return strings.NewReader(text), err
}

// single prints one chain.
func (p printer) single(ctx context.Context, family rules.Family, chain printedChain, f func(Place, []rules.Rule, error)) error {
	res, err := p.ask(ctx, family, chain.place, chain.place.Chain)
	switch {
	case errors.Is(err, errUnprintable), errors.As(err, &failedPrint{}):
		f(chain.place, nil, err)
		return nil
	case err != nil:
		return err
	}
	listed, whole := parseListing(res.stdout, []printedChain{chain})
	if len(listed) != 1 || !whole {
		f(chain.place, nil, errLines)
		return nil
	}
	f(chain.place, listed[0].rules, listed[0].err(chain.rules))
	return nil
}

// ask executes "iptables -S".
func (p printer) ask(ctx context.Context, family rules.Family, place Place, words ...string) (result, error) {
	path := p.tools[family].iptables
	res, err := command{path: path, args: append([]string{"-t", string(place.Table), "-S"}, words...), timeout: p.timeout, env: p.env}.run(ctx)
	if err != nil || res.exit == 0 {
		return res, err
	}
	// The second is what 1.8.8 and later say of a rule of nft's with expressions they do not know.
	if bytes.Contains(res.stderr, []byte("is incompatible")) || bytes.Contains(res.stderr, []byte("Parsing nftables rule failed")) {
		return res, fmt.Errorf("it %w: %s", errUnprintable, firstLines(res.stderr))
	}
	return res, failedPrint{exitError(path, res)}
}

// A listedChain is what was printed of one chain.
type listedChain struct {
	rules []rules.Rule
	cut   bool // what was printed behind these is nothing that iptables prints of a chain
}

func (l listedChain) err(rules int) error {
	if l.cut || len(l.rules) != rules {
		return errLines
	}
	return nil
}

// parseListing reads what "-S CHAIN" printed for each of chains, in their order. If it is not
// whole, what it read of the chains at its end, from the first on of which the lines are not as
// many as the rules, may be the text of a rule.
func parseListing(text []byte, chains []printedChain) (listed []listedChain, whole bool) {
	var found []listedChain
	for line := range bytes.Lines(text) {
		if string(line) == fmt.Sprintf(saysOddChains, chains[0].place.Table) {
			continue
		}
		verb, rest, _ := strings.Cut(string(bytes.TrimSuffix(line, []byte("\n"))), " ")
		name, spec, _ := strings.Cut(rest, " ")
		switch last := len(found) - 1; {
		case (verb == "-N" || verb == "-P") && len(found) < len(chains) && chains[len(found)].place.Chain == name:
			found = append(found, listedChain{})
		case verb == "-A" && last >= 0 && chains[last].place.Chain == name:
			found[last].rules = append(found[last].rules, compactRule(rules.PrintedRule(spec)))
		default:
			if last < 0 {
				return []listedChain{{cut: true}}, false
			}
			found[last].cut = true
			return found, false
		}
	}
	return found, true
}

// saysOddChains is what iptables-nft prints before each chain of a table that has a chain with a
// hook which is none of the built-in ones (1.8.9).
const saysOddChains = "# Table `%s' contains incompatible base-chains, use 'nft' tool to list them.\n"

// printTries is how many processes are executed for the rules of one chain. One rule among 10,000
// that is printed over several lines takes 26.
const printTries = 64

var (
	// errOverLines: the rule's bytes hold a line break, or something else that breaks its line.
	errOverLines = errors.New("it is printed over several lines")
	// errTries: see printTries.
	errTries = errors.New("so many rules of its chain are printed over several lines that it was not asked for alone")
)

// printRules calls f with each of these rules of a chain, by its index, or with why it has no text.
// Each is asked for by its number, as many at once as are printed on one line each: as every
// rule takes one line at least, as many lines as rules are one for each.
func (p printer) printRules(ctx context.Context, family rules.Family, place Place, wanted []int, f func(int, rules.Rule, error)) error {
	fail := func(list []int, err error) {
		for _, i := range list {
			f(i, rules.Rule{}, err)
		}
	}
	if !printableName(place.Chain) {
		fail(wanted, errors.New("its chain's name is none that iptables takes"))
		return nil
	}
	tries := 0
	var halve func(list []int) error
	halve = func(list []int) error {
		if len(list) == 0 {
			return nil
		}
		if tries++; tries > printTries {
			fail(list, errTries)
			return nil
		}
		commands := make([]string, len(list))
		for n, i := range list {
			commands[n] = fmt.Sprintf("%s %d", place.Chain, i+1)
		}
		res, err := p.list(ctx, family, place.Table, func() ([]string, error) { return commands, nil })
		if err != nil {
			return err
		}
		if len(res.stdout) == 0 {
			if _, err := p.ask(ctx, family, place, place.Chain); errors.Is(err, errUnprintable) {
				fail(list, err)
				return nil
			} else if err != nil {
				return err
			}
		}
		// As if the chain had been printed.
		listed, whole := parseListing(slices.Concat([]byte("-N "+place.Chain+"\n"), res.stdout), []printedChain{{place, len(list)}})
		switch {
		case whole && listed[0].err(len(list)) == nil:
			for n, i := range list {
				f(i, listed[0].rules[n], nil)
			}
		case len(list) == 1:
			fail(list, errOverLines)
		default:
			return errors.Join(halve(list[:len(list)/2]), halve(list[len(list)/2:]))
		}
		return nil
	}
	for len(wanted) > 0 {
		n := min(len(wanted), printMost)
		if err := halve(wanted[:n]); err != nil {
			return err
		}
		wanted = wanted[n:]
	}
	return nil
}

// compactRule returns the rule in memory of its own, and no more than it needs:
// it may stay for ever.
func compactRule(rule rules.Rule) rules.Rule {
	rule.Spec = strings.Clone(rule.Spec)
	if i := strings.LastIndex(rule.Spec, rule.Target); i >= 0 {
		rule.Target = rule.Spec[i : i+len(rule.Target)]
	}
	return rule
}
