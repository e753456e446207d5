package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
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
// two equal genids and never returns beside a busy writer; a piece does.
//
// The last line is one that fails, so that no transaction is sent. Without it
// iptables would send one: empty, but in its turn all the same, and from the
// beginning whenever somebody was faster. Beside an owner who does nothing but commit
// (66 times a second at 1,000 services) that took 0.8 s, and what was printed was past.
type printer struct {
	tools   map[rules.Family]tools
	timeout time.Duration
	env     []string
}

// printMost is how many chains one process prints. Fetching them must fit
// between two commits of a busy writer.
const printMost = 512

// errUnprintable: iptables does not understand a chain.
var errUnprintable = errors.New("holds rules that iptables cannot print")

// print calls f with each chain's rules, or with why iptables cannot print it.
// places must be at most printMost. After an error some may be missing.
func (p printer) print(ctx context.Context, family rules.Family, places []Place, f func(Place, []rules.Rule, error)) error {
	for len(places) > 0 {
		if !printableName(places[0].Chain) {
			f(places[0], nil, errors.New("its name is none that iptables takes"))
			places = places[1:]
			continue
		}
		n := 1
		for n < len(places) && printableName(places[n].Chain) && places[n].Table == places[0].Table {
			n++
		}
		done, err := p.batch(ctx, family, places[:n], f)
		if err != nil {
			return err
		}
		places = places[done:]
		if done == n {
			continue
		}
		// It stopped at this one; alone it says why, or (if this iptables
		// lists nothing in a restore) is printed.
		if err := p.single(ctx, family, places[0], f); err != nil {
			return err
		}
		places = places[1:]
	}
	return nil
}

// printableName reports whether a chain's name can stand in a line for
// iptables-restore and be nothing but a name. nft allows any.
func printableName(name string) bool {
	if name == "" || len(name) > 255 || strings.ContainsAny(name[:1], "-!#") {
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

// batch prints as many of places, which are of one table, as iptables-restore does
// before it stops. The last one is printed twice: with the second time begins what
// comes after the first.
func (p printer) batch(ctx context.Context, family rules.Family, places []Place, f func(Place, []rules.Rule, error)) (int, error) {
	var script bytes.Buffer
	script.WriteString("*" + string(places[0].Table) + "\n")
	twice := append(slices.Clip(places), places[len(places)-1])
	for _, place := range twice {
		script.WriteString("-S " + place.Chain + "\n")
	}
	script.WriteString("-S " + noSuchChain + "\nCOMMIT\n")
	path := p.tools[family].restore
	res, err := command{path: path, args: []string{"--noflush"}, stdin: &script, timeout: p.timeout, env: p.env}.run(ctx)
	if err != nil {
		return 0, err
	}
	told := 0
	listed, err := parseListing(res.stdout, twice, func(place Place, found []rules.Rule, err error) {
		if told++; told <= len(places) {
			f(place, found, err)
		}
	})
	switch {
	case err != nil:
		return 0, err
	case listed == len(twice):
		return len(places), nil
	case isPermissionText(string(res.stderr)):
		return 0, exitError(path, res)
	}
	return min(listed, len(places)-1), nil
}

// single prints one chain.
func (p printer) single(ctx context.Context, family rules.Family, place Place, f func(Place, []rules.Rule, error)) error {
	path := p.tools[family].iptables
	res, err := command{path: path, args: []string{"-t", string(place.Table), "-S", place.Chain}, timeout: p.timeout, env: p.env}.run(ctx)
	if err != nil {
		return err
	}
	if res.exit == 0 {
		_, err := parseListing(res.stdout, []Place{place}, f)
		return err
	}
	// 1.8.9 says the same of a chain that is gone.
	if bytes.Contains(res.stderr, []byte("is incompatible")) {
		f(place, nil, fmt.Errorf("it %w: %s", errUnprintable, firstLines(res.stderr)))
		return nil
	}
	return exitError(path, res)
}

// parseListing reads what "-S CHAIN" printed for each of places, in their
// order, and returns how many were printed.
func parseListing(text []byte, places []Place, f func(Place, []rules.Rule, error)) (int, error) {
	listed := 0
	var found []rules.Rule
	var bad error
	flush := func() {
		if listed > 0 {
			f(places[listed-1], found, bad)
		}
		found, bad = nil, nil
	}
	scan := bufio.NewScanner(bytes.NewReader(text))
	scan.Buffer(nil, maxListing)
	for scan.Scan() {
		line := scan.Text()
		verb, rest, _ := strings.Cut(line, " ")
		name, spec, _ := strings.Cut(rest, " ")
		switch verb {
		case "-N", "-P":
			flush()
			if listed == len(places) || places[listed].Chain != name {
				return 0, fmt.Errorf("iptables printed chain %q, which was not the next to be asked for", name)
			}
			listed++
		case "-A":
			if listed == 0 || places[listed-1].Chain != name {
				return 0, fmt.Errorf("iptables printed a rule of chain %q among others", name)
			}
			rule, err := rules.ParseRule(spec)
			if err != nil && bad == nil {
				bad = err
			}
			found = append(found, compactRule(rule))
		case "#", "":
		default:
			return 0, fmt.Errorf("iptables printed %.80q for a chain", line)
		}
	}
	if err := scan.Err(); err != nil {
		return 0, fmt.Errorf("reading what iptables printed: %w", err)
	}
	flush()
	return listed, nil
}

// maxListing bounds one line, as package rules does.
const maxListing = 64 << 10

// compactRule returns the rule in memory of its own, and no more than it needs:
// it may stay for ever.
func compactRule(rule rules.Rule) rules.Rule {
	rule.Spec = strings.Clone(rule.Spec)
	if i := strings.LastIndex(rule.Spec, rule.Target); i >= 0 {
		rule.Target = rule.Spec[i : i+len(rule.Target)]
	}
	return rule
}
