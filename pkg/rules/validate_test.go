package rules_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

func TestValidateTakesWhatWasLearned(t *testing.T) {
	for name, g := range map[string]rules.Generation{
		"a generation": small(), "an empty one": {}, "none": nil,
	} {
		if err := rules.Validate(g); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValidateRefusesWhatNoCaptureMakes(t *testing.T) {
	name := func(n string) func(*rules.Section) {
		return func(s *rules.Section) { s.Chains[1].Name = n }
	}
	spec := func(text string) func(*rules.Section) {
		return func(s *rules.Section) { s.Chains[1].Rules[0].Spec = text }
	}
	tests := []struct {
		name   string
		change func(*rules.Section)
		want   string
	}{
		{"a second line in a rule", spec("-j RETURN\nCOMMIT\n*filter\n:INPUT DROP"), "control character"},
		{"a carriage return in a rule", spec("-j RETURN\r-F"), "control character"},
		{"a NUL in a rule", spec("-j RETURN\x00"), "control character"},
		{"a second line in a jump", func(s *rules.Section) { s.Jumps[0].Rule.Spec = "-j A\n-F" }, "control character"},
		{"a second line in a chain's name", name("A\n-F"), "protected chain"},
		{"a blank in a chain's name", name("A -j X"), "protected chain"},
		{"a chain without name", name(""), "protected chain"},
		{"a chain that looks like an option", name("-F"), "protected chain"},
		{"a chain that looks negated", name("!A"), "protected chain"},
		{"a chain that looks declared", name(":A"), "protected chain"},
		{"a chain with a quote", name(`A"`), "protected chain"},
		{"a chain beyond ASCII", name("KÜBE"), "protected chain"},
		{"a name of 29 characters", name(strings.Repeat("A", 29)), "protected chain"},
		{"a built-in chain as a protected one", name("OUTPUT"), "protected chain"},
		{"a chain that stands twice", func(s *rules.Section) { s.Chains[1].Name = s.Chains[0].Name }, "occurs twice"},
		{"a jump in a user's chain", func(s *rules.Section) { s.Jumps[0].Chain = "KUBE-A" }, "built-in"},
		{"a jump in another table's chain", func(s *rules.Section) { s.Jumps[0].Chain = "FORWARD" }, "built-in"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := rules.Validate(changed(test.change))
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "ipv4 nat") {
				t.Errorf("error is %v, want one of ipv4 nat that says %q", err, test.want)
			}
		})
	}
	for name, g := range map[string]rules.Generation{
		"a table that is none":  {rules.IPv4.Table("nat\n*filter"): {}},
		"a family that is none": {rules.Family(5).Table(rules.Nat): small()[rules.IPv4.Table(rules.Nat)]},
	} {
		if err := rules.Validate(g); err == nil {
			t.Errorf("%s: it is accepted", name)
		}
	}
}

func TestCheckChainName(t *testing.T) {
	for _, name := range []string{"KUBE-CANARYD-CANARY", strings.Repeat("A", 28), "a_b.c", "input"} {
		if err := rules.CheckChainName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, want := range map[string]string{
		strings.Repeat("A", 29): "longer than 28", "": "not a chain name", "A B": "not a chain name", "-A": "not a chain name",
		"A\n": "not a chain name", "INPUT": "built-in", "POSTROUTING": "built-in",
	} {
		if err := rules.CheckChainName(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error is %v, want %q", name, err, want)
		}
	}
}
