package source

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A RulesDir declares the operator's own fragments: the files *.v4 and *.v6 of a folder, in the
// order of their names. rules.ParseFragment describes their content.
type RulesDir struct {
	Dir string
	// Families are the families whose rules are used; none means both. Files of other families
	// are checked anyway.
	Families []rules.Family
	// Canary is the name of canaryd's own chain, which no file may declare.
	Canary string
}

// Name returns "rules-dir".
func (d RulesDir) Name() string { return "rules-dir" }

func (d RulesDir) files() files {
	return files{path: d.Dir, wanted: inRulesDir, kinds: "*.v4 or *.v6", folderOnly: true}
}

// recall returns an earlier run's rules of the folder as a declaration; the folder claims their
// chains. The Watcher takes it if the files are broken at the start.
func (d RulesDir) recall(g rules.Generation) Declared {
	own := map[string]bool{}
	for _, s := range g {
		for _, c := range s.Chains {
			own[c.Name] = true
		}
	}
	return Declared{Generation: g, owners: []owner{{
		source: d.Name(),
		claims: func(chain string) bool { return own[chain] },
		where: func(rules.Family, rules.TableName, string) string {
			return "the stored fragments of " + d.Dir
		},
	}}}
}

var fragmentFamilies = map[string]rules.Family{".v4": rules.IPv4, ".v6": rules.IPv6}

func inRulesDir(name string) bool {
	return !strings.HasPrefix(name, ".") && fragmentFamilies[filepath.Ext(name)] != 0
}

type chainKey struct {
	table rules.TableID
	chain string
}

type ruleKey struct {
	table rules.TableID
	rule  rules.ChainRule
}

// declare makes the declaration of all fragments. The error joins the errors of all files; then
// none of them counts. Fragments of a family that is not watched are only checked.
func (d RulesDir) declare(files []file, _ Declared) (Declared, error) {
	all := Declared{Generation: rules.Generation{}}
	declared := map[chainKey]string{} // file and line
	lines := map[ruleKey]string{}     // file and line
	var bad []error
	for _, file := range files {
		family := fragmentFamilies[filepath.Ext(file.name)]
		fragment, err := d.parse(file, family)
		if err == nil {
			err = addChains(declared, file.name, family, fragment)
		}
		if err != nil {
			bad = append(bad, err)
			continue
		}
		for t, list := range fragment.RuleLines {
			for r, line := range list {
				lines[ruleKey{family.Table(t), r}] = fmt.Sprintf("%s:%d", file.name, line)
			}
		}
		if len(d.Families) > 0 && !slices.Contains(d.Families, family) {
			continue
		}
		for t, s := range fragment.Sections {
			all.Generation = all.Generation.With(family.Table(t), all.Generation[family.Table(t)].Then(s))
		}
	}
	if len(bad) > 0 {
		return Declared{}, errors.Join(bad...)
	}
	if err := checkCycles(all.Generation, declared); err != nil {
		return Declared{}, err
	}
	own := map[string]bool{}
	for key := range declared {
		own[key.chain] = true
	}
	all.owners = []owner{{
		source: d.Name(),
		claims: func(chain string) bool { return own[chain] },
		line: func(f rules.Family, t rules.TableName, chain string, r rules.Rule) string {
			return lines[ruleKey{f.Table(t), rules.ChainRule{Chain: chain, Rule: r.Key()}}]
		},
		where: func(f rules.Family, t rules.TableName, chain string) string {
			return cmp.Or(declared[chainKey{f.Table(t), chain}], "the fragments in "+d.Dir)
		},
	}}
	return all, nil
}

// parse parses one fragment. A file without a table, or with canaryd's own chain, is an error.
// Errors name file and line.
func (d RulesDir) parse(f file, family rules.Family) (rules.Fragment, error) {
	fragment, err := rules.ParseFragment(bytes.NewReader(f.data), family, protect.Tables()...)
	if wrong := (*rules.ParseError)(nil); errors.As(err, &wrong) {
		return rules.Fragment{}, fmt.Errorf("%s:%d: %w", f.name, wrong.Line, &rules.ParseError{Text: wrong.Text, Reason: wrong.Reason})
	}
	if err != nil {
		return rules.Fragment{}, fmt.Errorf("%s: %w", f.name, err)
	}
	if len(fragment.Sections) == 0 {
		return rules.Fragment{}, fmt.Errorf("%s: holds no table: delete the file if it shall declare no rules", f.name)
	}
	for t, lines := range fragment.Lines {
		if line := lines[d.Canary]; line != 0 {
			return rules.Fragment{}, fmt.Errorf("%s:%d: %s in %s is canaryd's own chain: choose another name", f.name, line, d.Canary, t)
		}
	}
	return fragment, nil
}

// addChains records in declared where the fragment's chains are declared. It returns an error
// for a chain that another file declares, because two files may not share a chain. name is the
// file's.
func addChains(declared map[chainKey]string, name string, family rules.Family, fragment rules.Fragment) error {
	var bad []error
	for _, t := range protect.Tables() {
		for _, c := range fragment.Sections[t].Chains {
			key, here := chainKey{family.Table(t), c.Name}, fmt.Sprintf("%s:%d", name, fragment.Lines[t][c.Name])
			if there := declared[key]; there != "" {
				bad = append(bad, fmt.Errorf("%s: chain %s of %s is declared in %s too: give one of them another name", here, c.Name, t, there))
				continue
			}
			declared[key] = here
		}
	}
	return errors.Join(bad...)
}

// checkCycles returns an error if chains jump to each other in a circle, because the kernel
// refuses the whole table then.
func checkCycles(g rules.Generation, declared map[chainKey]string) error {
	for _, f := range rules.Families() {
		for _, t := range protect.Tables() {
			section := g[f.Table(t)]
			done := map[string]bool{}
			var visit func(name string, way []string) []string
			visit = func(name string, way []string) []string {
				if i := slices.Index(way, name); i >= 0 {
					return append(way[i:], name)
				}
				chain, found := section.Chain(name)
				if !found || done[name] {
					return nil
				}
				way = append(way, name)
				for _, r := range chain.Rules {
					if circle := visit(r.Target, way); circle != nil {
						return circle
					}
				}
				done[name] = true
				return nil
			}
			for _, c := range section.Chains {
				if circle := visit(c.Name, nil); circle != nil {
					return fmt.Errorf("%s: chains of %s jump in a circle: %s", declared[chainKey{f.Table(t), circle[0]}], t, strings.Join(circle, " -> "))
				}
			}
		}
	}
	return nil
}
