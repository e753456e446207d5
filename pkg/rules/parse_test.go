package rules_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

func testdata(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// exactly compares field by field. cmp would call the Equal methods of Rule and Section, which
// ignore target, policy and dependencies.
var exactly = cmp.Options{
	cmpopts.IgnoreUnexported(rules.Table{}),
	cmp.Transformer("Rule", func(r rules.Rule) plainRule { return plainRule(r) }),
	cmp.Transformer("Section", func(s rules.Section) plainSection { return plainSection(s) }),
}

type (
	plainRule    rules.Rule
	plainSection rules.Section
)

func rule(t *testing.T, spec string) rules.Rule {
	t.Helper()
	r, err := rules.ParseRule(spec)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestParseRuleFindsTheTargetAndNotFreeText(t *testing.T) {
	tests := []struct{ name, spec, want string }{
		{"a jump", "-s 10.0.0.1/32 -j KUBE-MARK-MASQ", "KUBE-MARK-MASQ"},
		{"a goto", "-p tcp -m tcp --dport 80 -g X", "X"},
		{"a target with options", "-j DNAT --to-destination 10.0.0.1:80", "DNAT"},
		{"no target", `-m comment --comment canaryd`, ""},
		{"no words at all", "", ""},
		{"a jump that is quoted text", `-m comment --comment "-j X"`, ""},
		{"a comment that is -j, before another option", "-m comment --comment -j -m mark --mark 0x1", ""},
		{"a comment that is -g", "-m comment --comment -g", ""},
		{"a comment that is -j, then a jump", "-m comment --comment -j -j X", "X"},
		{"a jump inside quotes, then a jump", `-m comment --comment "it\'s \"q\" \\ b; # -j Y" -j X`, "X"},
		{"a prefix of LOG", `-j LOG --log-prefix -j --log-level 4`, "LOG"},
		{"a prefix of NFLOG", `-j NFLOG --nflog-prefix -g --nflog-group 1`, "NFLOG"},
		{"a string to look for", `-m string --string -j --algo bm -j X`, "X"},
		{"a target that is quoted", `-j "X"`, "X"},
		{"-j at the end names nothing", "-p tcp -j", ""},
		{"a list's name", "-m recent --name -j --set -j X", "X"},
		{"a long option", "--protocol tcp --jump X", "X"},
		{"a long goto before a match", "--goto X -m comment --comment y", "X"},
		{"a comment on what iptables cannot print", `-m comment --comment "an [unsupported revision] of it" -j X`, "X"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := rule(t, test.spec)
			if d := cmp.Diff(rules.Rule{Spec: test.spec, Target: test.want}, got, exactly); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// TestParseRuleMakesOddRulesOpaque: a rule whose text may not be written back is opaque.
func TestParseRuleMakesOddRulesOpaque(t *testing.T) {
	long := func(n int) string { return "-m comment --comment " + strings.Repeat("x", n) }
	for _, test := range []struct{ name, spec, reason, target string }{
		{"a match of a newer kernel module", "-m set [unsupported revision] -j A", "cannot print", "A"},
		{"an interface that is an option", "-i a -h -j A", `"-h" is an option of the program iptables`, "A"},
		{"one that is two", "-i x -M /tmp/evil -j A", `"-M" is an option of the program iptables`, "A"},
		{"a set that is", "-m set --match-set a -h src -j A", `"-h" is in the place of the second value of --match-set`, "A"},
		{"a list that is", "-m recent --rcheck --name a -tnat --rsource -j A", `"-tnat" is an option`, "A"},
		{"a hash that is", "-m hashlimit --hashlimit-upto 3/sec --hashlimit-name a --modprobe=/x -j A", "--modprobe of the program", "A"},
		{"an option of connlabel without it", "-m realm --realm 1 --set -j A", "short for --set-counters", "A"},
		{"a long one", long(11000), "reads no line of more than", ""},
		{"an endless one", long(1 << 20), "reads no line of more than", ""},
		{"a carriage return", "-m comment --comment \"a\rb\" -j A", "control character", "A"},
		{"Latin 1", "-m comment --comment \"\xe4\" -j A", "not UTF-8", "A"},
	} {
		t.Run(test.name, func(t *testing.T) {
			odd := rule(t, test.spec)
			reason, opaque := odd.Opaque()
			if !opaque || !strings.Contains(reason, test.reason) || odd.Target != test.target {
				t.Errorf("the rule is read as %q to %q", odd.Spec, odd.Target)
			}
			text, err := odd.MarshalText()
			var again rules.Rule
			if err != nil || again.UnmarshalText(text) != nil || again != odd {
				t.Errorf("stored and read again it is %q to %q", again.Spec, again.Target)
			}
			if other, err := rules.ParseRule(test.spec + " "); err == nil && other.Equal(odd) {
				t.Error("it equals a rule of other bytes")
			}
		})
	}
}

// TestParseTakesTextForText: a text that an extension prints in quotes is its value, even if it
// looks like an option.
func TestParseTakesTextForText(t *testing.T) {
	for _, spec := range []string{
		`-m comment --comment "-h" -j A`, `-m comment --comment "a -M x" -j A`, "-m comment --comment --help -j A", "-i -h -j A",
		// Complete options that are also the beginnings of other options.
		`-m connlabel --label "41" --set -j A`, "-m policy --dir in --pol ipsec --strict --reqid 1 --proto esp -j A",
		"-m recent --set --name x --rsource -j A", "-j CLUSTERIP --new --hashmode sourceip --clustermac 01:00:5E:00:00:20",
		`-j LOG --log-prefix "-F "`, `-m string --string "-t nat" --algo bm --to 65535 -j A`, "-m recent --rcheck --name -h --rsource",
	} {
		if reason, opaque := rule(t, spec).Opaque(); opaque {
			t.Errorf("%s: %s", spec, reason)
		}
	}
}

// TestParseRuleHasNoErrorThatIsNil: a caller may keep the result in a variable of type error.
// Without an error it must be nil.
func TestParseRuleHasNoErrorThatIsNil(t *testing.T) {
	var err error
	if _, err = rules.ParseRule("-j ACCEPT"); err != nil {
		t.Errorf("a good rule has the error %#v", err)
	}
	var wrong *rules.ParseError
	if _, err = rules.ParseRule(`-m comment --comment "x`); !errors.As(err, &wrong) {
		t.Errorf("a quote that is not closed: %#v, want a *ParseError", err)
	}
}

func TestParseErrorsAreShort(t *testing.T) {
	_, err := rules.ParseRule(`"` + strings.Repeat("x", 5000))
	if err == nil || len(err.Error()) > 250 {
		t.Errorf("error has %d characters: %v", len(err.Error()), err)
	}
}

func TestTableFindsChainsByName(t *testing.T) {
	table := rules.NewTable(rules.Nat)
	for _, name := range []string{"B", "C"} {
		table.Add(rules.Chain{Name: name})
	}
	for _, name := range []string{"B", "C"} {
		if c := table.Chain(name); c == nil || c.Name != name {
			t.Errorf("%s is found as %v", name, c)
		}
	}
	table.Add(rules.Chain{Name: "C", Rules: []rules.Rule{{Spec: "-j B", Target: "B"}}})
	if len(table.Chains) != 2 || table.RuleCount() != 1 {
		t.Errorf("adding C again did not replace it: %v", table.Chains)
	}
	var none *rules.Table
	if none.Chain("A") != nil || none.RuleCount() != 0 {
		t.Error("no table holds something")
	}
}
