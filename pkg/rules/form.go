package rules

import (
	"slices"
	"strings"
)

// A form is one rule split into its options. It has the options that belong to no extension,
// the extensions in the order in which iptables loads them, and their options. Values are
// unchanged.
type form struct {
	base   [len(baseOrder)]setting // in baseOrder
	exts   []extension
	opts   []setting
	jump   string // -j or -g
	target int    // index in exts; -1 for none
}

// A setting is one option with its values.
type setting struct {
	owner int // index in form.exts
	given bool
	not   bool
	name  string
	words []string
}

// An extension is one match or the target of a rule.
type extension struct {
	name string
	// known is nil for an extension that is compared word by word.
	known *vocabulary
	// bare says that it has no options: it is a chain or a verdict.
	bare bool
}

// baseOrder are the options that belong to no extension, in the order in which iptables-save
// prints them.
var baseOrder = [...]string{"-s", "-d", "-i", "-o", "-p", "-f"}

// baseOptions are the spellings of options that belong to no extension, from iptables' own table.
var baseOptions = map[string]string{
	"-s": "-s", "--source": "-s", "--src": "-s",
	"-d": "-d", "--destination": "-d", "--dst": "-d",
	"-i": "-i", "--in-interface": "-i",
	"-o": "-o", "--out-interface": "-o",
	"-p": "-p", "--protocol": "-p", "--proto": "-p",
	"-f": "-f", "--fragment": "-f", "--fragments": "-f",
	"-m": "-m", "--match": "-m",
	"-j": "-j", "--jump": "-j",
	"-g": "-g", "--goto": "-g",
	"-c": "-c", "--set-counters": "-c",
}

const protocolAt = 4 // -p in baseOrder

// Arrays on the stack that are large enough for most rules, so that reading a rule allocates
// nothing for its extensions and options.
type (
	roomForExtensions [4]extension
	roomForOptions    [6]setting
)

// read splits a rule's words. It returns false if iptables might read the rule in another
// way: its Meaning then is its text. This is so if a plain word is in an option's place, if
// no known extension has the option, or if a value is missing.
func (f *form) read(words []string) bool {
	f.target = -1
	not := false
	for i := 0; i < len(words); {
		if words[i] == "!" {
			if not {
				return false
			}
			not = true
			i++
			continue
		}
		n := f.option(not, words[i:])
		if n == 0 {
			return false
		}
		not = false
		i += n
	}
	return !not
}

// option reads one option with its values from the front of words, and returns the number of
// these words; 0 if it cannot read them. not says that a "!" is before it. read and
// readOptions call it.
func (f *form) option(not bool, words []string) int {
	name := words[0]
	short, base := "", false
	if strings.HasPrefix(name, "-") {
		short, base = baseOptions[name]
	}
	switch {
	case !base:
		return f.extensionOption(not, words)
	case short == "-f":
		return f.setBase(short, not, words[:1])
	case len(words) < 2 || words[1] == "!": // iptables no longer takes "-s ! 10.0.0.1"
		return 0
	}
	switch short {
	case "-c":
		if not || len(words) < 3 {
			return 0
		}
		return 3
	case "-m":
		if not {
			return 0
		}
		f.load(words[1], matches)
	case "-j", "-g":
		if not || f.target >= 0 {
			return 0
		}
		f.jump, f.target = short, len(f.exts)
		f.load(words[1], targets)
		t := &f.exts[f.target]
		t.bare = short == "-g" || t.known == nil && !slices.Contains(exactTargets, t.name)
		if t.bare {
			t.known = nil
		}
	default:
		return f.setBase(short, not, words[:2])
	}
	return 2
}

// setBase notes an option that belongs to no extension, under its short name. It returns the
// number of its words; 0 if the rule has the option already.
func (f *form) setBase(short string, not bool, words []string) int {
	b := &f.base[slices.Index(baseOrder[:], short)]
	if b.given {
		return 0
	}
	*b = setting{given: true, not: not, name: short, words: words[1:]}
	return len(words)
}

// load adds the extension of that name, out of the matches or the targets; an unknown one is
// added without a vocabulary.
func (f *form) load(name string, from map[string]*vocabulary) {
	known := from[name]
	if known != nil {
		name = known.name
	}
	f.exts = append(f.exts, extension{name: name, known: known})
}

// extensionOption is option for an option of a match or target. iptables looks for the name
// in the loaded extensions, the latest first. If none has it, iptables loads the match of
// the rule's protocol. Then getopt takes the beginning of a name for the name.
func (f *form) extensionOption(not bool, words []string) int {
	last := len(f.exts) - 1
	if last >= 0 && f.exts[last].known == nil && !f.exts[last].bare {
		f.opts = append(f.opts, setting{owner: last, given: true, not: not, name: words[0]})
		return 1 // an unknown extension is read word by word
	}
	name := words[0]
	for i := last; i >= 0; i-- {
		if k := f.exts[i].known; k != nil {
			if o, ok := k.options[name]; ok {
				return f.add(i, name, o, not, words)
			}
		}
	}
	for i := last; i >= 0; i-- {
		if k := f.exts[i].known; k != nil {
			if full, ok := k.short[name]; ok {
				return f.add(i, full, k.options[full], not, words)
			}
		}
	}
	p := &f.base[protocolAt]
	if !p.given || p.not {
		return 0
	}
	number, _ := protocol(p.words[0])
	k := matches[protocolMatch[number]]
	if k == nil {
		return 0
	}
	o, ok := k.options[name]
	if !ok {
		return 0
	}
	f.exts = append(f.exts, extension{name: k.name, known: k})
	// The target keeps its place: matches may be written behind it.
	return f.add(last+1, name, o, not, words)
}

// add notes an option of extension owner (an index), under name or the name that o is an
// alias of. It returns the number of its words; 0 if values are missing.
func (f *form) add(owner int, name string, o *option, not bool, words []string) int {
	if len(words) <= o.args {
		return 0
	}
	if o.name != "" {
		name = o.name
	}
	f.opts = append(f.opts, setting{owner: owner, given: true, not: not, name: name, words: words[1 : 1+o.args]})
	return 1 + o.args
}
