package iptablestest

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A command is one line of a table, and the line's number.
type command struct {
	*words
	line int
}

// words are the content of a line. They never change: all Fakes share them.
type words struct {
	name string   // ":" for a declaration
	args []string // behind it
	// at is the number before a rule, counted from 1; 0 is none.
	at      int
	rule    rules.Rule // of -A, -I, -R, -D and -C
	refused error      // the reason why there is no such rule
}

// readLines has the parsed lines, by family: stories write the same lines again and again.
var readLines = struct {
	sync.Mutex
	of map[rules.Family]map[string]*words
}{of: map[rules.Family]map[string]*words{}}

// linesKept bounds the memory for lines with nonces.
const linesKept = 50_000

// readLine splits a line and spells its rule. The error is a sentence in iptables' style.
func readLine(family rules.Family, raw string) (*words, error) {
	readLines.Lock()
	defer readLines.Unlock()
	if w := readLines.of[family][raw]; w != nil {
		return w, nil
	}
	raw = strings.Clone(raw) // the script around it is not kept
	list, err := split(raw)
	if err != nil {
		return nil, err
	}
	w := &words{name: list[0], args: list[1:]}
	if slices.Contains([]string{"-A", "-I", "-R", "-D", "-C"}, w.name) && len(w.args) > 0 {
		w.spell(family)
	}
	if known := readLines.of[family]; known == nil || len(known) > linesKept {
		readLines.of[family] = map[string]*words{}
	}
	readLines.of[family][raw] = w
	return w, nil
}

const badNumber = "Invalid rule number" // xtables begins with a capital

// spell reads the rule behind the command and the chain.
func (w *words) spell(family rules.Family) {
	spec := w.args[1:]
	if w.name != "-A" && w.name != "-C" && len(spec) > 0 {
		if n, err := strconv.Atoi(spec[0]); err == nil {
			w.at, spec = n, spec[1:]
			if n < 1 {
				w.refused = errors.New(badNumber + " `" + strconv.Itoa(n) + "'")
				return
			}
		}
	}
	if len(spec) == 1 && strings.HasPrefix(" "+spec[0], opaqueRule) {
		w.rule, w.refused = rules.ParseRule(spec[0])
		return
	}
	w.rule, w.refused = normalize(family, spec)
}

// opaqueRule begins the text of an opaque rule, behind its chain.
const opaqueRule = " # rule "

// split splits a line into words; ":X ..." and counters become separate words. An opaque rule,
// which only a Session writes, is one word.
func split(raw string) ([]string, error) {
	if head, rule, opaque := strings.Cut(raw, opaqueRule); opaque {
		return append(strings.Fields(head), strings.TrimSpace(opaqueRule)+" "+rule), nil
	}
	if rest, found := strings.CutPrefix(raw, ":"); found {
		return append([]string{":"}, strings.Fields(rest)...), nil
	}
	if raw[0] == '[' {
		_, raw, _ = strings.Cut(raw, "]")
	}
	words, err := rules.Split(raw)
	if err == nil && (len(words) == 0 || !strings.HasPrefix(words[0], "-")) {
		err = badArgument(strings.TrimSpace(raw))
	}
	return words, err
}
