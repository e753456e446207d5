// Package savefile reads the output of iptables-save, for tests.
package savefile

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Tables is Parse for a test, which ends with an error.
func Tables(t testing.TB, text string) rules.Ruleset {
	t.Helper()
	set, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

// Parse reads the output of iptables-save, for one family. A table that iptables cannot print is
// missing. A rule whose text may not be written back is opaque.
func Parse(text string) (rules.Ruleset, error) {
	set := rules.Ruleset{}
	var table *rules.Table
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, " \n") // iptables 1.8.7 prints a space behind some matches
		switch {
		case table == nil && (line == "" || line[0] == '#'):
		case line[0] == '*':
			table = rules.NewTable(line[1:])
			set[table.Name] = table
		case table == nil:
			return nil, fmt.Errorf("outside a table: %.100q", line)
		case line == "COMMIT":
			table = nil
		default:
			if !add(table, line) {
				return nil, fmt.Errorf("in table %s: %.100q", table.Name, line)
			}
		}
	}
	if table != nil {
		return nil, fmt.Errorf("table %s is not closed by COMMIT", table.Name)
	}
	return set, nil
}

// add adds a chain or a rule to a table. It returns false for any other line.
func add(table *rules.Table, line string) bool {
	if chain, found := strings.CutPrefix(line, ":"); found {
		name, rest, found := strings.Cut(chain, " ")
		policy, _, _ := strings.Cut(rest, " ")
		if policy == "-" || !rules.Builtin(table.Name, name) {
			policy = ""
		}
		table.Add(rules.Chain{Name: name, Policy: policy})
		return found
	}
	if line[0] == '[' { // iptables-save -c
		_, line, _ = strings.Cut(line, "] ")
	}
	rest, found := strings.CutPrefix(line, "-A ")
	name, spec, _ := strings.Cut(rest, " ")
	chain := table.Chain(name)
	if !found || chain == nil {
		return false
	}
	rule, err := rules.ParseRule(spec)
	if err != nil {
		rule = rules.OpaqueRule([]byte(spec), "", err.Error())
	}
	chain.Rules = append(chain.Rules, rule)
	return true
}
