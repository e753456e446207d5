package iptables

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// ParseScripts reads the format of Scripts.WriteTo: chains are declared before anything else,
// and every table is committed. It is for callers that have a restore as text; canaryd composes
// its own. It does not check rules: the scripts contain even rules that iptables would refuse.
func ParseScripts(text string) (Scripts, error) {
	var scripts Scripts
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		verb, rest, _ := strings.Cut(line, " ")
		switch {
		case strings.HasPrefix(line, "*"):
			scripts = append(scripts, Script{Table: rules.TableName(line[1:])})
			continue
		case line == "COMMIT":
			continue
		case len(scripts) == 0 || len(verb) < 2:
			return nil, fmt.Errorf("no script can say %q", line)
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
	return scripts, nil
}
