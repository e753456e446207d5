package rules

import (
	"fmt"
	"slices"
	"strings"
)

// This file reads a rule's words as getopt_long reads them, to find those that iptables would
// take for an option of its own: "-i a -h", where "a -h" is an interface's name that was printed
// without quotes, makes iptables-restore print its help, and "-M PROGRAM" makes it execute one.

// programOptions are the long options that are no part of a rule (iptables.c of 1.8.9).
var programOptions = []string{
	"append", "delete", "check", "insert", "replace", "list", "list-rules", "flush", "zero", "new-chain", "delete-chain",
	"rename-chain", "policy", "table", "numeric", "verbose", "wait", "wait-interval", "exact", "version", "help",
	"line-numbers", "modprobe", "ipv4", "ipv6",
}

// longBase are the long options that are part of a rule.
var longBase = []string{
	"source", "src", "destination", "dst", "in-interface", "out-interface", "protocol", "proto", "fragment", "fragments",
	"match", "jump", "goto", "set-counters",
}

// misreading returns why iptables would read the words of a rule as something else than a rule,
// or nothing.
func whyMisread(words []string) string { return readOptions(words, nil) }

// readOptions goes through the words option by option. base is called with each option of no
// extension and its value, and may refuse it; nil refuses none.
func readOptions(words []string, base func(option, value string) string) string {
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0], target: -1}
	for i := 0; i < len(words); {
		word := words[i]
		if !strings.HasPrefix(word, "-") {
			i++ // "!", or a value of an option that is not known
			continue
		}
		owned := f.owns(word)
		if !owned {
			if reason := f.misread(word); reason != "" {
				return reason
			}
		}
		n := f.option(false, words[i:])
		if n == 0 || n == 1 && !owned {
			n = f.skip(words[i:])
		}
		// getopt takes the first value whatever it is, an extension the second itself.
		if n == 3 && strings.HasPrefix(words[i+2], "-") {
			return fmt.Sprintf("%q stands where the second value of %s is due", words[i+2], word)
		}
		if n > 1 && base != nil {
			if reason := base(word, words[i+1]); reason != "" {
				return reason
			}
		}
		i += n
	}
	return ""
}

// understood reports whether a form that was read has known extensions only, and no value that
// looks like an option where an extension reads it itself.
func (f *form) understood() bool {
	for i := range f.exts {
		if f.exts[i].known == nil && !f.exts[i].bare {
			return false
		}
	}
	for i := range f.opts {
		if w := f.opts[i].words; len(w) > 1 && strings.HasPrefix(w[1], "-") {
			return false
		}
	}
	return true
}

// skip returns how many words an option takes that form.option does not.
func (f *form) skip(words []string) int {
	short := baseOptions[words[0]]
	if len(words) > 1 && (short != "" && short != "-f" || slices.Contains(freeText, words[0]) || slices.Contains(hostOptions, words[0])) {
		return 2
	}
	return 1
}

// owns reports whether an extension of the rule is known to have the option.
func (f *form) owns(word string) bool {
	for i := range f.exts {
		k := f.exts[i].known
		if k == nil {
			// The one match with an option that is the beginning of one of the program's.
			if f.exts[i].name == "policy" && word == "--pol" {
				return true
			}
			continue
		}
		if _, ok := k.options[word]; ok {
			return true
		}
		if _, ok := k.short[word]; ok {
			return true
		}
	}
	return false
}

// misread returns why getopt takes a word for something else than an option of a rule that
// stands alone, or nothing.
func (f *form) misread(word string) string {
	if baseOptions[word] != "" {
		return ""
	}
	if word == "-" || word == "--" {
		return fmt.Sprintf("%q ends the options of iptables", word)
	}
	if !strings.HasPrefix(word, "--") {
		short := word[:2]
		if baseOptions[short] == "" {
			return fmt.Sprintf("%q is an option of the program iptables and of no rule", word)
		}
		return fmt.Sprintf("%q is %s with its value in one word", word, short)
	}
	name, _, valued := strings.Cut(word[2:], "=")
	for _, option := range programOptions {
		if strings.HasPrefix(option, name) {
			return fmt.Sprintf("%q is the option --%s of the program iptables and of no rule", word, option)
		}
	}
	for _, option := range longBase {
		switch {
		case option == name && valued:
			return fmt.Sprintf("%q is --%s with its value in one word", word, option)
		case option != name && strings.HasPrefix(option, name):
			return fmt.Sprintf("%q is short for --%s", word, option)
		}
	}
	return ""
}
