package iptables

import (
	"strconv"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Scripts makes scripts of a restore's text, in which chains are declared
// before anything else and every table is committed. Rules are not looked at:
// what iptables would refuse is in the scripts as it stands in the text.
func Scripts(t testing.TB, text string) []Script {
	t.Helper()
	var scripts []Script
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		verb, rest, _ := strings.Cut(line, " ")
		switch {
		case line[0] == '*':
			scripts = append(scripts, Script{Table: rules.TableName(line[1:])})
			continue
		case line == "COMMIT":
			continue
		case len(scripts) == 0 || len(verb) < 2:
			t.Fatalf("no script can say %q", line)
		}
		s := &scripts[len(scripts)-1]
		if verb[0] == ':' {
			s.Declare = append(s.Declare, verb[1:])
			continue
		}
		step := Step{Verb: Verb(verb[1])}
		step.Chain, rest, _ = strings.Cut(rest, " ")
		if first, behind, _ := strings.Cut(rest, " "); step.Verb == Insert || step.Verb == Delete {
			if n, err := strconv.Atoi(first); err == nil {
				step.Index, rest = n, behind
			}
		}
		step.Rule.Spec = rest
		if rule, err := rules.ParseRule(rest); err == nil {
			step.Rule = rule
		}
		s.Steps = append(s.Steps, step)
	}
	return scripts
}

// write hands a text to a session's Restore as the payload of one family.
func write(t testing.TB, s Session, family rules.Family, text string) (raced bool, err error) {
	t.Helper()
	written := s.Restore(t.Context(), Payload{family: Scripts(t, text)})
	if len(written) != 1 {
		t.Fatalf("a Restore of one family answers for %v", written)
	}
	return written[family].Raced, written[family].Err
}
