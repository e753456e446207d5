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

const presetsDoc = "../../docs/presets.md"

// TestPresetsDocument: the tables of docs/presets.md are made from the table of owners. With
// -update they are written again; the text around them is written by hand.
func TestPresetsDocument(t *testing.T) {
	text, err := os.ReadFile(presetsDoc)
	if err != nil {
		t.Fatal(err)
	}
	want := string(text)
	for name, made := range map[string]string{
		"presets": presetTable(), "emptied": emptiedTable(), "native": nativeTable(), "parts": partTable(), "owners": ownerTable(),
	} {
		begin, end := "<!-- "+name+": go test ./pkg/owners -update -->\n", "<!-- end -->\n"
		before, rest, begun := strings.Cut(want, begin)
		_, after, ended := strings.Cut(rest, end)
		if !begun || !ended {
			t.Fatalf("%s lacks the lines between which the table %q is:\n%s%s", presetsDoc, name, begin, end)
		}
		want = before + begin + made + end + after
	}
	if golden.Update() {
		if err := os.WriteFile(presetsDoc, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s is not made from the table of owners (-table +document); -update writes it:\n%s", presetsDoc, diff)
	}
}

// code returns words as code.
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

// straightText returns the rules that an owner writes into built-in chains, by their targets.
func straightText(o Owner) string {
	var places []string
	targets := map[string][]string{}
	for _, s := range o.Straight {
		place, target := s.Table+" `"+s.Chain+"`", "all with the comment `"+s.Comment+"`"
		for i, word := range s.Words {
			if word == "-j" {
				target = s.Words[i+1]
			}
		}
		if !slices.Contains(places, place) {
			places = append(places, place)
		}
		if !slices.Contains(targets[place], target) {
			targets[place] = append(targets[place], target)
		}
	}
	for i, place := range places {
		places[i] = place + ": " + strings.Join(targets[place], ", ")
	}
	return strings.Join(places, "; ")
}

// presetTable has the words of --protect that name chains or rules.
func presetTable() string {
	text := "| preset | whose | chains | straight into built-in chains | written again after a flush |\n|---|---|---|---|---|\n"
	for _, o := range All() {
		if o.Preset == "" || len(o.Chains)+len(o.Straight) == 0 {
			continue
		}
		chains := code(namesOf(o.Chains, every)...)
		if chains == "" {
			chains = "none"
		}
		straight := straightText(o)
		if straight == "" {
			straight = "none"
		}
		word := code(o.Preset)
		if o.Alone {
			word += ", " + code(o.Name) + " for `cleanup --rules`"
		}
		text += fmt.Sprintf("| %s | %s | %s | %s | %s |\n", word, o.Title, chains, straight, o.Heals)
	}
	return text
}

// emptiedTable has what each owner does to its chains, and what canaryd does when one is emptied.
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
	var often []string
	for _, o := range All() {
		often = append(often, namesOf(o.Chains, func(c Chains) bool { return c.Emptied == EmptyOften && !c.Hint })...)
	}
	slices.Sort(often)
	is := func(e Emptying) func(Chains, string) bool {
		return func(c Chains, _ string) bool { return c.Emptied == e }
	}
	text := "| chains | their owner | what canaryd does |\n|---|---|---|\n"
	for _, row := range [][3]string{
		{named(is(EmptyNever)), "never leaves them empty", "puts them back, in about 0.1 s"},
		{named(is(EmptyUnreferenced)), "empties them only with, or after, all rules that lead to them", "puts them back, in about 0.1 s, if a rule leads there"},
		{named(is(EmptyBriefly)), "flushes them, and fills or deletes them by later commands: a pod's end, a start of Docker", "puts them back after `--jump-grace`, if a rule leads there and they are still empty"},
		{code(slices.Compact(often)...) + "; those of the first rows in other tables; all that only a glob names", "removes single rules, also the last one; `CNI-ADMIN` and `DOCKER-USER` have an operator's rules", "puts them back, if chains that only they led to still hold rules: of chains that many containers or networks share after `--jump-grace`; else accepts it: nothing shows whether a container, network or service has gone"},
	} {
		text += "| " + strings.Join(row[:], " | ") + " |\n"
	}
	return text
}

// ids returns native tables as code.
func ids(tables []Table) string {
	var names []string
	for _, t := range tables {
		for _, id := range t.IDs() {
			names = append(names, id.NFT())
		}
	}
	return code(names...)
}

// nativeTable has the words of --protect that name native tables.
func nativeTable() string {
	text := "| preset | owner | native tables |\n|---|---|---|\n"
	for _, o := range All() {
		if o.Preset != "" && len(o.Tables) > 0 {
			text += fmt.Sprintf("| %s | %s | %s |\n", code(o.Preset), o.Title, ids(o.Tables))
		}
	}
	return text
}

// partTable has what comes back of a part of a native table.
func partTable() string {
	text := "| table | comes back | is accepted |\n|---|---|---|\n"
	for _, o := range All() {
		for _, t := range o.Tables {
			if t.Habits.Known {
				text += fmt.Sprintf("| %s | %s | %s |\n", code(t.Name), t.Back, t.Accepted)
			}
		}
	}
	return text + "| any other | a base chain of two rules or more | a deleted chain, a chain's only rule, other chains, and sets |\n"
}

// ownerTable has all owners, and how each is named.
func ownerTable() string {
	text := "| whose | a flush breaks | until the owner writes again | it removes rules | tests flush rules | `--protect` |\n|---|---|---|---|---|---|\n"
	for _, o := range All() {
		text += fmt.Sprintf("| [%s](%s) | %s | %s | %s | %s | %s |\n", o.Title, o.Docs, o.Breaks, o.Heals, o.Removes, o.TriedWith(), wordsFor(o))
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
