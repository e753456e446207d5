package rules_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

const fragment = `# the site's own
*filter
:SITE-IN - [0:0]
:SITE-DROP -
:FORWARD - [0:0]
[3:180] -A SITE-IN -s 192.0.2.0/24 -m comment --comment "a, b and -s" -g SITE-DROP
-A SITE-IN -j KUBE-MARK-DROP
-A SITE-DROP -j DROP
-A FORWARD -j SITE-IN
-I INPUT -p tcp -j SITE-IN
-I INPUT -p udp -j SITE-IN
COMMIT

*nat
:SITE-NAT - [0:0]
-A POSTROUTING -j SITE-NAT
COMMIT
`

func TestParseFragment(t *testing.T) {
	got, err := rules.ParseFragment(strings.NewReader(strings.ReplaceAll(fragment, "\n", "\r\n")), rules.IPv4, protect.Tables()...)
	if err != nil {
		t.Fatal(err)
	}
	top, bottom := rules.Anchor{Position: rules.Top}, rules.Anchor{Position: rules.Bottom}
	want := rules.Fragment{
		Sections: map[rules.TableName]rules.Section{
			rules.Filter: {
				Chains: []rules.Chain{
					{Name: "SITE-IN", Rules: []rules.Rule{
						rule(t, `-s 192.0.2.0/24 -m comment --comment "a, b and -s" -g SITE-DROP`), rule(t, "-j KUBE-MARK-DROP"),
					}},
					{Name: "SITE-DROP", Rules: []rules.Rule{rule(t, "-j DROP")}},
				},
				Jumps: []rules.Jump{ // in the order of the chains, the last -I first
					{Chain: "INPUT", Rule: rule(t, "-p udp -j SITE-IN"), Anchor: top},
					{Chain: "INPUT", Rule: rule(t, "-p tcp -j SITE-IN"), Anchor: top},
					{Chain: "FORWARD", Rule: rule(t, "-j SITE-IN"), Anchor: bottom},
				},
				DependsOn: []string{"KUBE-MARK-DROP"},
			},
			rules.Nat: {
				Chains: []rules.Chain{{Name: "SITE-NAT"}},
				Jumps:  []rules.Jump{{Chain: "POSTROUTING", Rule: rule(t, "-j SITE-NAT"), Anchor: bottom}},
			},
		},
		Lines: map[rules.TableName]map[string]int{
			rules.Filter: {"SITE-IN": 3, "SITE-DROP": 4},
			rules.Nat:    {"SITE-NAT": 15},
		},
		RuleLines: map[rules.TableName]map[rules.ChainRule]int{
			rules.Filter: {
				{Chain: "SITE-IN", Rule: `-s 192.0.2.0/24 -m comment --comment "a, b and -s" -g SITE-DROP`}: 6,
				{Chain: "SITE-IN", Rule: "-j KUBE-MARK-DROP"}:                                               7,
				{Chain: "SITE-DROP", Rule: "-j DROP"}:                                                       8,
				{Chain: "FORWARD", Rule: "-j SITE-IN"}:                                                      9,
				{Chain: "INPUT", Rule: "-p tcp -j SITE-IN"}:                                                 10,
				{Chain: "INPUT", Rule: "-p udp -j SITE-IN"}:                                                 11,
			},
			rules.Nat: {{Chain: "POSTROUTING", Rule: "-j SITE-NAT"}: 16},
		},
	}
	if diff := cmp.Diff(want, got, exactly); diff != "" {
		t.Error(diff)
	}
	for f := range want.Sections {
		if err := rules.Validate(rules.Generation{rules.IPv4.Table(f): got.Sections[f]}); err != nil {
			t.Error(err)
		}
	}
}

// TestParseFragmentTakesValuesThatLookLikeOptions: a value that looks like an option is still a
// value.
func TestParseFragmentTakesValuesThatLookLikeOptions(t *testing.T) {
	for _, spec := range []string{
		`-m comment --comment "-h" -j DROP`, `-m comment --comment "--modprobe=/x" -j DROP`, "-i -h -j DROP", "--in-interface -tnat -j DROP",
		"-m recent --set --name -F -j DROP", "-m set --match-set -h src -j DROP", `-m string --string "-t nat" --algo bm -j DROP`,
		"-m policy --dir in --pol ipsec -j DROP", "-p tcp -m tcp --dport 80 ! -f -j DROP", "-m conntrack --ctorigdst 10.0.0.1 -j DROP",
		`-j LOG --log-prefix "-h "`, "-m statistic --mode random --probability 0.5 -j DROP", "-m recent --set -j DROP",
	} {
		text := "*filter\n:X -\n-A X " + spec + "\nCOMMIT\n"
		if _, err := rules.ParseFragment(strings.NewReader(text), rules.IPv4, protect.Tables()...); err != nil {
			t.Errorf("%s: %v", spec, err)
		}
	}
}

func TestParseFragmentRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		text   string
		line   int
		reason string // part of it
	}{
		"no table":                    {"-A X -j DROP", 1, "outside a table"},
		"no fragment":                 {"# keys\nhush:$6$salt$hash:19000:0:99999:7:::", 2, "outside a table"},
		"no fragment with a star":     {"*.hush", 1, "outside a table"},
		"a table that is not guarded": {"*nat\nCOMMIT\n*broute\nCOMMIT", 3, "raw, mangle, nat, filter, security"},
		"a table twice":               {"*nat\nCOMMIT\n*nat\nCOMMIT", 3, "was closed above"},
		"a table in a table":          {"*nat\n*filter", 2, "inside another one"},
		"cut off":                     {"\n*nat\n:X -\n", 2, "is the file cut off?"},
		"cut off in a rule":           {"*nat\n:X -\n-A X -m comment --comment \"ha", 3, "quote that is not closed"},
		"a command":                   {"*nat\n-F X", 2, "is no rule"},
		"a policy":                    {"*filter\n:FORWARD DROP [0:0]", 2, "sets a policy"},
		"a policy of a chain":         {"*filter\n:X DROP", 2, "gives a policy"},
		"a nameless chain":            {"*filter\n:", 2, "declares no chain"},
		"a long name":                 {"*filter\n:ABCDEFGHIJKLMNOPQRSTUVWXYZABC -", 2, "longer than 28"},
		"another's built-in":          {"*filter\n:PREROUTING -", 2, "is a built-in chain"},
		"a canary":                    {"*filter\n:KUBE-PROXY-CANARY -", 2, "is a canary's name"},
		"a verdict":                   {"*filter\n:RETURN -", 2, "has a verdict's name"},
		"a chain twice":               {"*filter\n:X -\n:X -", 3, "declared on line 2 already"},
		"a chain not declared":        {"*filter\n-A DOCKER-USER -j DROP", 2, "write :DOCKER-USER - [0:0]"},
		"a chain of no table":         {"*filter\n-A PREROUTING -j DROP", 2, "table filter does not have"},
		"-I in a chain":               {"*filter\n:X -\n-I X -j DROP", 3, "write its rules with -A"},
		"a rule's number":             {"*filter\n:X -\n-I INPUT 2 -j X", 3, "a rule's number"},
		"no jump":                     {"*filter\n:X -\n-A INPUT -j DROP\nCOMMIT", 3, "jump to it from INPUT"},
		"a jump into another's":       {"*filter\n-A INPUT -j DOCKER-USER\nCOMMIT", 2, "jumps to no chain of this table of this file"},
		"a jump twice":                {"*filter\n:X -\n-A INPUT -p 6 -j X\n-A INPUT -p tcp -j X\nCOMMIT", 4, "is on line 3 already"},
		"the other family":            {"*filter\n:X -\n-A X ! -s 2001:db8::/32 -j DROP", 3, "file of rules for ipv4"},
		"a host's name":               {"*filter\n:X -\n-A X -d example.com -j DROP", 3, "names are not looked up"},
		"a list of addresses":         {"*filter\n:X -\n-A X -d 10.0.0.1,10.0.0.2 -j DROP", 3, "one rule for each"},
		"an option cut off":           {"*filter\n:X -\n-A X -d", 3, "no value behind -d"},
		"a table in a rule":           {"*filter\n:X -\n-A X -t nat -j DROP", 3, "names a table"},
		"a module loader":             {"*filter\n:X -\n-A X --modprobe=/tmp/x -j DROP", 3, "--modprobe of the program iptables"},
		"a module loader, short":      {"*filter\n:X -\n-A X -M/tmp/x -j DROP", 3, `"-M/tmp/x" is an option of the program`},
		"a module loader, cut":        {"*filter\n:X -\n-A X --modp /tmp/x -j DROP", 3, "--modprobe of the program iptables"},
		"a table, attached":           {"*filter\n:X -\n-A X -tnat -j DROP", 3, `"-tnat" is an option of the program`},
		"a table, long and attached":  {"*filter\n:X -\n-A X --table=nat -j DROP", 3, "--table of the program iptables"},
		"a table behind a match":      {"*filter\n:X -\n-A X -p tcp -t nat -j DROP", 3, `"-t" is an option of the program`},
		"help":                        {"*filter\n:X -\n-A X -h", 3, `"-h" is an option of the program`},
		"another family's":            {"*filter\n:X -\n-A X -6 -j DROP", 3, `"-6" is an option of the program`},
		"a flush":                     {"*filter\n:X -\n-A X -F -j DROP", 3, `"-F" is an option of the program`},
		"a bundle":                    {"*filter\n:X -\n-A X -fh -j DROP", 3, `"-fh" is -f with its value in one word`},
		"a host's name, attached":     {"*filter\n:X -\n-A X -sexample.org -j DROP", 3, `"-sexample.org" is -s with its value`},
		"a host's name, long":         {"*filter\n:X -\n-A X --source=example.org -j DROP", 3, `is --source with its value`},
		"a host's name, cut":          {"*filter\n:X -\n-A X --sour example.org -j DROP", 3, `"--sour" is short for --source`},
		"a host's name in a match":    {"*filter\n:X -\n-A X -m conntrack --ctorigdst example.org -j DROP", 3, "names are not looked up"},
		"a host's name in a target":   {"*mangle\n:X -\n-A X -j TEE --gateway example.org", 3, "names are not looked up"},
		"a host's name of a netmap":   {"*nat\n:X -\n-A X -j NETMAP --to example.org", 3, "names are not looked up"},
		"the end of options":          {"*filter\n:X -\n-A X -- -j DROP", 3, `"--" ends the options`},
		"too long":                    {"*filter\n:X -\n-A X -m comment --comment " + strings.Repeat("x", 11000), 3, "reads no line of more than"},
		"open counters":               {"*filter\n:X -\n[3:4 -A X -j DROP", 3, "counters"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := rules.ParseFragment(strings.NewReader(c.text), rules.IPv4, protect.Tables()...)
			var wrong *rules.ParseError
			if !errors.As(err, &wrong) {
				t.Fatalf("error %v, want a ParseError", err)
			}
			if strings.Contains(err.Error(), "hush") {
				t.Errorf("a line of what is no fragment is quoted: %v", err)
			}
			if wrong.Line != c.line || !strings.Contains(wrong.Reason, c.reason) {
				t.Errorf("line %d: %s; want line %d: ...%s...", wrong.Line, wrong.Reason, c.line, c.reason)
			}
		})
	}
}
