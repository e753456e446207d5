package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
)

// A class is a pattern of sentences that read oddly.
type class struct {
	name string
	// target is the intended number in 1,000 words: at most twice as many as in corerad,
	// knftables and raft. No sentence should be long.
	target float64
	// ceilings are for comments, documents, help and errors, and log lines. A ceiling above the
	// target is the number on the day when it was set, rounded up. Lower it, never raise it.
	ceilings [4]float64
	find     func(s sentence) []int // offsets in the text
}

// classes are the counted patterns. The name is the argument of -v.
var classes = []class{
	{"what", 3, [4]float64{3, 3, 3, 3}, notInQuestion(pattern(`what`))},
	{"of which", 0.2, [4]float64{0.2, 0.2, 0.2, 0.2}, pattern(`of which`)},
	{"one that/of", 1.3, [4]float64{1.3, 1.3, 1.3, 1.3}, pattern(`one (?:that|of)`)},
	{"those that", 0.2, [4]float64{0.2, 0.2, 0.2, 0.2}, pattern(`those that`)},
	{"that which", 0, [4]float64{0, 0, 0, 0}, pattern(`that which`)},
	{"stands", 0.7, [4]float64{0.7, 0.7, 0.7, 0.7}, pattern(`stands?`)},
	{"asks", 0.2, [4]float64{0.2, 0.2, 0.3, 0.2}, pattern(`asks?`)},
	{"comes/goes", 0.8, [4]float64{0.8, 1.2, 0.8, 0.8}, without(pattern(`comes?|go(?:es)?`), `^(Go|go (build|generate|install|list|mod|run|test|tool|vet))\b`)},
	{"over 25 words", 0, [4]float64{0.1, 2.5, 2, 0}, long},
	{"no verb", 0.5, [4]float64{0.5, 0.5, 0.5, 0.5}, verbless},
}

// pattern finds whole words: no part of a name or of a word with a hyphen.
func pattern(words string) func(sentence) []int {
	find := regexp.MustCompile(`(?i)(?:^|[^\w./-])(` + words + `)(?:$|[^\w/-])`)
	return func(s sentence) []int {
		var at []int
		for _, m := range find.FindAllStringSubmatchIndex(s.text, -1) {
			at = append(at, m[2])
		}
		return at
	}
}

func notInQuestion(find func(sentence) []int) func(sentence) []int {
	return func(s sentence) []int {
		if strings.HasSuffix(strings.TrimRight(s.text, closing), "?") {
			return nil
		}
		return find(s)
	}
}

// without removes hits at which another pattern matches.
func without(find func(sentence) []int, other string) func(sentence) []int {
	not := regexp.MustCompile(other)
	return func(s sentence) []int {
		return slices.DeleteFunc(find(s), func(at int) bool { return not.MatchString(s.text[at:]) })
	}
}

// longest is how many words a sentence may have.
const longest = 25

func long(s sentence) []int {
	if s.words() > longest {
		return []int{0}
	}
	return nil
}

// words counts the words that have a letter or a digit.
func (s sentence) words() int {
	n := 0
	for w := range strings.FieldsSeq(s.text) {
		if strings.ContainsFunc(w, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			n++
		}
	}
	return n
}

// near is the number of words within which a sentence has its verb.
const near = 12

// verbless finds a whole sentence that certainly has no verb near its beginning. A program
// cannot distinguish a verb from a plural, so each word on -s or -ed may be one.
func verbless(s sentence) []int {
	words := strings.Fields(s.text)
	if len(words) < 6 || !unicode.IsUpper(rune(words[0][0])) || !strings.HasSuffix(strings.TrimRight(s.text, closing), ".") {
		return nil
	}
	for _, w := range words[:min(near, len(words))] {
		w = strings.ToLower(strings.Trim(w, `.,;:!?"'()[]*_`))
		switch {
		case slices.Contains(verbs, w), strings.HasSuffix(w, "n't"), strings.HasSuffix(w, "'s"), strings.HasSuffix(w, "ed"),
			len(w) > 3 && strings.HasSuffix(w, "s") && !strings.HasSuffix(w, "ss") && !strings.HasSuffix(w, "us"):
			return nil
		}
	}
	return []int{0}
}

// verbs are forms that end neither on -s nor on -ed.
var verbs = strings.Fields(`
am are be been can cannot could did do does had has have is may might must shall should was were will would
accept add adopt agree allow answer appear apply ask assume avoid await become begin behave belong break bring build
call carry change check choose clear close come compare configure confirm contain copy correct cost count create cut
decide delete delay deny depend describe detect differ draw drop enable end enter escape exclude execute exist expect explain
fail fall file fill find finish flush follow forget format gain get give go grant grow guard hang happen have hear help hold
ignore include insert install invoke join jump keep kill know lack last lead learn leave let lie limit list listen live log look lose
make mark match mean measure meet mention miss move name need note notice open ought own pass pause pay plan plant point prefer print proceed
prove publish push put quote reach read receive recognize record refer refuse remain remember remove rename render repair repeat replace
replay report require resolve rest restart restore return return rotate run save say see seem select send serve set settle share show shut
skip sort speak spell stand start stay stop store subscribe supply survive sync take test touch trace translate treat try turn
update upgrade use verify wait wake walk want watch work wrap write
became began brought built came caught chose did drew fell felt found gave got grew heard held kept knew known lay learnt led left lost made meant met
put ran read said sat saw sent set shown shut spoke spent stood struck taken took tried understood went woke won wrote written
`)

// A number is the frequency of a class in a kind of text.
type number struct {
	Class                 string
	Kind                  kind
	Hits, Words           int
	Rate, Ceiling, Target float64
}

// A tally has the numbers of all classes and kinds, and the places of the hits.
type tally struct {
	numbers []number
	hits    map[string][]string // by class
}

// count counts in sentences.
func count(all []sentence) tally {
	t := tally{hits: map[string][]string{}}
	words := map[kind]int{}
	hits := map[string]map[kind]int{}
	for _, c := range classes {
		hits[c.name] = map[kind]int{}
	}
	for _, s := range all {
		words[s.kind] += s.words()
		for _, c := range classes {
			for _, at := range c.find(s) {
				hits[c.name][s.kind]++
				t.hits[c.name] = append(t.hits[c.name], fmt.Sprintf("%s:%d: %s: %s", s.file, s.lineOf(at), s.kind, s.text))
			}
		}
	}
	for _, c := range classes {
		for i, k := range kinds {
			n := number{Class: c.name, Kind: k, Hits: hits[c.name][k], Words: words[k], Ceiling: c.ceilings[i], Target: c.target}
			n.Rate = math.Round(100000*float64(n.Hits)/float64(max(1, n.Words))) / 100
			t.numbers = append(t.numbers, n)
		}
	}
	return t
}

// above returns a line for each number that is above its ceiling.
func (t tally) above() []string {
	var found []string
	for _, n := range t.numbers {
		if n.Rate > n.Ceiling {
			found = append(found, fmt.Sprintf("%s: %q is %.2f times in 1,000 words, more than %g: go run ./hack/prose -count -v %q", n.Kind, n.Class, n.Rate, n.Ceiling, n.Class))
		}
	}
	return found
}

// table writes a row for each class, with the hits in 1,000 words and the ceiling for each
// kind.
func (t tally) table(w io.Writer) error {
	to := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(to, "in 1,000 words (ceiling)\t")
	for _, k := range kinds {
		fmt.Fprintf(to, "%s\t", k)
	}
	fmt.Fprint(to, "target\t\n")
	for i, n := range t.numbers {
		if i%len(kinds) == 0 {
			fmt.Fprintf(to, "%s\t", n.Class)
		}
		fmt.Fprintf(to, "%.2f (%g)\t", n.Rate, n.Ceiling)
		if i%len(kinds) == len(kinds)-1 {
			fmt.Fprintf(to, "%g\t\n", n.Target)
		}
	}
	fmt.Fprint(to, "words\t")
	for _, n := range t.numbers[:len(kinds)] {
		fmt.Fprintf(to, "%d\t", n.Words)
	}
	fmt.Fprint(to, "\t\n")
	return to.Flush()
}

// show writes the part of a tally that the flags select: its table, JSON, or the hits of one
// class.
func (t tally) show(w io.Writer, output, name string) error {
	if name != "" {
		if !slices.ContainsFunc(classes, func(c class) bool { return c.name == name }) {
			return fmt.Errorf("no class is named %q: go run ./hack/prose -count lists them", name)
		}
		for _, line := range t.hits[name] {
			fmt.Fprintln(w, line)
		}
		return nil
	}
	if output == "json" {
		return json.NewEncoder(w).Encode(t.numbers)
	}
	return t.table(w)
}

// sentences returns the sentences of the files under the given paths, or of all files.
func sentences(texts []file, under []string) ([]sentence, error) {
	var found []sentence
	var parsed []goFile
	names := map[string]map[string]bool{} // by folder
	counts := func(name string) bool {
		return len(under) == 0 || slices.ContainsFunc(under, func(p string) bool { p = path.Clean(p); return p == "." || name == p || strings.HasPrefix(name, p+"/") })
	}
	var errs []error
	for _, f := range texts {
		if path.Ext(f.name) == ".md" {
			if counts(f.name) {
				found = append(found, sentencesOfMarkdown(f.name, string(f.text))...)
			}
			continue
		}
		g, err := parseGo(f.name, f.text)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		parsed = append(parsed, g)
		if g.program() {
			folder := path.Dir(f.name)
			if names[folder] == nil {
				names[folder] = map[string]bool{}
			}
			messageNames(g, names[folder])
		}
	}
	for _, g := range parsed {
		if counts(g.name) {
			found = append(found, sentencesOfGo(g, names[path.Dir(g.name)])...)
		}
	}
	return found, errors.Join(errs...)
}
