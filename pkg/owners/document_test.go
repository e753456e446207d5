package owners

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/golden"
)

// made has the documents with tables that are made from the table of owners, and the tables.
func made() map[string]map[string]string {
	return map[string]map[string]string{
		"../../docs/presets.md":      {"presets": presetTable()},
		"../../docs/how-it-works.md": {"emptied": emptiedTable(), "parts": partTable(), "removals": removalTable()},
	}
}

// TestOwnersInDocuments: documents have tables that are made from the table of owners, and must
// match it. With -update the test writes them again. The text around them is written by hand.
func TestOwnersInDocuments(t *testing.T) {
	for path, tables := range made() {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want := string(text)
		for name, table := range tables {
			begin, end := "<!-- "+name+": go test ./pkg/owners -update -->\n", "<!-- end -->\n"
			before, rest, begun := strings.Cut(want, begin)
			_, after, ended := strings.Cut(rest, end)
			if !begun || !ended {
				t.Fatalf("%s lacks the lines between which the table %q is:\n%s%s", path, name, begin, end)
			}
			want = before + begin + table + end + after
		}
		if golden.Update() {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if diff := cmp.Diff(want, string(text)); diff != "" {
			t.Errorf("%s is not made from the table of owners (-table +document); -update writes it:\n%s", path, diff)
		}
	}
}

// code formats words as code.
func code(words ...string) string {
	if len(words) == 0 {
		return ""
	}
	return "`" + strings.Join(words, "`, `") + "`"
}

// namesOf returns the names of chains.
func namesOf(chains []Chains, wanted func(Chains) bool) []string {
	var names []string
	for _, c := range chains {
		if wanted(c) {
			for _, f := range c.Names {
				if name := f.String(); !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names
}

func every(Chains) bool { return true }

// straightText returns the rules that an owner writes into built-in chains: a comment, or targets
// and the places of these rules. Targets with the same places share them.
func straightText(o Owner) string {
	var targets []string
	places := map[string][]Straight{}
	for _, s := range o.Straight {
		target := "comment `" + s.Comment + "`"
		for i, word := range s.Words {
			if word == "-j" {
				target = s.Words[i+1]
			}
		}
		if !slices.Contains(targets, target) {
			targets = append(targets, target)
		}
		if !slices.ContainsFunc(places[target], func(p Straight) bool { return p.Table == s.Table && p.Chain == s.Chain }) {
			places[target] = append(places[target], s)
		}
	}
	var texts []string
	shared := map[string][]string{}
	for _, target := range targets {
		text := placesText(places[target])
		if strings.HasPrefix(target, "comment ") {
			text = "" // the comment says enough
		}
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
		shared[text] = append(shared[text], target)
	}
	for i, text := range texts {
		texts[i] = strings.TrimSuffix(strings.Join(shared[text], ", ")+": "+text, ": ")
	}
	return strings.Join(texts, "; ")
}

// placesText returns built-in chains. It names a table once for chains that follow each other.
func placesText(places []Straight) string {
	var text, inTable string
	for _, p := range places {
		if text != "" {
			text += ", "
		}
		if p.Table != inTable {
			text += p.Table + " "
		}
		text, inTable = text+code(p.Chain), p.Table
	}
	return text
}

// presetTable lists all owners: the word of each, the damage of a flush, and all that the word
// names.
func presetTable() string {
	text := "| word: owner | a flush breaks (the owner repairs) | chains, **rules** in built-in chains, native **tables** |\n|---|---|---|\n"
	for _, o := range All() {
		var names []string
		if o.Preset != "" {
			for _, part := range [][2]string{{"", code(braced(namesOf(o.Chains, every))...)}, {"**rules** ", straightText(o)}, {"**tables** ", ids(o.Tables)}} {
				if part[1] != "" {
					names = append(names, part[0]+part[1])
				}
			}
		}
		text += fmt.Sprintf("| %s: [%s](%s) | %s (%s) | %s |\n", wordsFor(o), o.Title, o.Docs, o.Breaks, o.Heals, strings.Join(names, "; "))
	}
	return text
}

// braced returns names, and joins those with a common beginning by braces, as in a shell:
// KUBE-{SVC,SEP}.
func braced(names []string) []string {
	ends := map[string][]string{}
	var begins []string
	for _, name := range names {
		begin := name[:strings.IndexAny(name, "-_")+1]
		if _, found := ends[begin]; !found {
			begins = append(begins, begin)
		}
		ends[begin] = append(ends[begin], name[len(begin):])
	}
	var all []string
	for _, begin := range begins {
		if list := ends[begin]; begin != "" && len(list) > 1 {
			all = append(all, begin+"{"+strings.Join(list, ",")+"}")
		} else {
			for _, end := range list {
				all = append(all, begin+end)
			}
		}
	}
	return all
}

// emptiedTable lists each owner's habit for its chains, and canaryd's reaction when a chain is
// emptied.
func emptiedTable() string {
	named := func(wanted func(c Chains, in string) bool) string {
		var cells []string
		for _, in := range []string{"nat", "filter"} {
			var names []string
			for _, o := range All() {
				names = append(names, namesOf(o.Chains, func(c Chains) bool { return slices.Contains(c.In, in) && wanted(c, in) })...)
			}
			if slices.Sort(names); len(names) > 0 {
				cells = append(cells, in+" "+code(slices.Compact(names)...))
			}
		}
		return strings.Join(cells, "; ")
	}
	is := func(e Emptying) func(Chains, string) bool {
		return func(c Chains, _ string) bool { return c.Emptied == e }
	}
	text := "| chains | their owner | what canaryd does |\n|---|---|---|\n"
	for _, row := range [][3]string{
		{named(is(EmptyNever)), "never leaves them empty", "puts them back, in about 0.1 s"},
		{named(is(EmptyUnreferenced)), "empties them with, or after, all rules that lead to them", "puts them back, in about 0.1 s, if a rule leads to them"},
		{named(is(EmptyBriefly)), "flushes them, and fills or deletes them with later commands", "puts them back after `--jump-grace`, if a rule leads to them and they are still empty"},
		{"all others; these in other tables; chains that only a glob names", "removes single rules, also the last one; `CNI-ADMIN` and `DOCKER-USER` have an operator's rules", "accepts it, unless chains that only they led to still hold rules; then it puts them back, shared chains after `--jump-grace`"},
	} {
		text += "| " + strings.Join(row[:], " | ") + " |\n"
	}
	return text
}

// ids formats native tables as code.
func ids(tables []Table) string {
	var names []string
	for _, t := range tables {
		for _, id := range t.IDs() {
			names = append(names, id.NFT())
		}
	}
	return code(names...)
}

// partTable lists the parts of native tables that canaryd puts back. Tables with the same parts
// share a row.
func partTable() string {
	var parts []string
	names := map[string][]string{}
	for _, o := range All() {
		for _, t := range o.Tables {
			if !t.Habits.Known {
				continue
			}
			part := fmt.Sprintf("| %s | %s |\n", t.Back, t.Accepted)
			if !slices.Contains(parts, part) {
				parts = append(parts, part)
			}
			names[part] = append(names[part], t.Name)
		}
	}
	text := "| table | canaryd puts back | canaryd accepts |\n|---|---|---|\n"
	for _, part := range parts {
		text += "| " + code(names[part]...) + " " + part
	}
	return text + "| any other | a base chain of two rules or more | a deleted chain, a chain's only rule, other chains, sets |\n"
}

// removalTable lists how owners remove rules, and the origin of the rules that tests flush.
func removalTable() string {
	text := "| owner | removes by | tested with |\n|---|---|---|\n"
	for _, o := range All() {
		text += fmt.Sprintf("| %s | %s | %s |\n", o.Title, o.Removes, o.TriedWith())
	}
	return text
}

// wordsFor returns the words that name an owner's rules: its preset, or globs and native tables.
func wordsFor(o Owner) string {
	if o.Preset != "" {
		return code(o.Preset)
	}
	var words []string
	if names := namesOf(o.Chains, every); len(names) > 0 {
		words = append(words, names...)
	}
	for _, t := range o.Tables {
		for _, id := range t.IDs() {
			words = append(words, "nft:"+strings.Replace(id.NFT(), " ", ":", 1))
		}
	}
	text := code(words...)
	if len(o.Straight) > 0 {
		text = strings.TrimPrefix(text+", "+code("rule:TABLE:CHAIN:GLOB"), ", ")
	}
	if text == "" {
		return "globs of its chains: see `canaryd status`"
	}
	return text
}
