package rules

import (
	"fmt"
	"slices"
	"strings"
)

// This file reads a rule's words as getopt_long does, to find words that iptables would take
// for its own options. If an interface is named "a -h", iptables prints "-i a -h" without
// quotes, and iptables-restore then prints its help. "-M PROGRAM" makes it execute the program.

// programOptions are the long options of the program that are not part of a rule (iptables.c of
// 1.8.9).
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

// readOptions reads the words option by option. It returns why iptables would not read them as
// a rule, or "". It calls base with each option that belongs to no extension and its value;
// base may return a reason to refuse it. A nil base refuses none.
func readOptions(words []string, base func(option, value string) string) string {
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0], target: -1}
	for i := 0; i < len(words); {
		word := words[i]
		if !strings.HasPrefix(word, "-") {
			i++ // "!", or the value of an unknown option
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
		// getopt accepts any word as the first value. The extension reads the second value
		// itself.
		if n == 3 && strings.HasPrefix(words[i+2], "-") {
			return fmt.Sprintf("%q is in the place of the second value of %s", words[i+2], word)
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

// understood reports whether all extensions of a form are known, and no second value of an
// option looks like an option. For any other rule ParseRule checks the text before it may be
// written.
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

// skip returns the number of words, 1 or 2, of an option that form.option cannot read.
// readOptions continues behind them.
func (f *form) skip(words []string) int {
	short := baseOptions[words[0]]
	if len(words) > 1 && (short != "" && short != "-f" || slices.Contains(freeText, words[0]) || slices.Contains(hostOptions, words[0])) {
		return 2
	}
	return 1
}

// ambiguous maps options of extensions without a vocabulary to these extensions. Each option is
// in full the beginning of an option of the program or of a rule. No other extension of
// iptables 1.8.7 to 1.8.13 has any.
var ambiguous = map[string]string{"--pol": "policy", "--set": "connlabel", "--new": "CLUSTERIP"}

// owns reports whether a known extension of the rule has the option. readOptions then does
// not call misread.
func (f *form) owns(word string) bool {
	for i := range f.exts {
		k := f.exts[i].known
		if k == nil {
			if owner := ambiguous[word]; owner != "" && owner == f.exts[i].name {
				return true
			}
			continue
		}
		_, full := k.options[word]
		if _, short := k.short[word]; full || short {
			return true
		}
	}
	return false
}

// misread returns why getopt does not take a word for a complete option of a rule, or "".
// With a reason, the rule must not be written back. readOptions calls it.
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
