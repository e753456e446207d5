package iptables

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// scriptsOf returns the scripts that add the chains and rules of a save to tables without them.
func scriptsOf(t testing.TB, text string) (scripts Scripts) {
	t.Helper()
	set := savefile.Tables(t, text)
	for _, name := range rules.AllTables() {
		if set[name] == nil {
			continue
		}
		s := Script{Table: name}
		for _, c := range set[name].Chains {
			if !rules.Builtin(name, c.Name) {
				s.Declare = append(s.Declare, c.Name)
			}
			for _, r := range c.Rules {
				s.Steps = append(s.Steps, Step{Verb: Append, Chain: c.Name, Rule: r})
			}
		}
		scripts = append(scripts, s)
	}
	return scripts
}

// write passes scripts to a session's Restore as the payload of one family.
func write(t testing.TB, s Session, family rules.Family, scripts ...Script) (raced bool, err error) {
	t.Helper()
	written := s.Restore(t.Context(), Payload{family: scripts})
	if len(written) != 1 {
		t.Fatalf("a Restore of one family answers for %v", written)
	}
	return written[family].Raced, written[family].Err
}
