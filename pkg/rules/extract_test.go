package rules_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func selector(t *testing.T, list ...string) protect.Selector {
	t.Helper()
	s, err := protect.NewSelector(list)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func isMark(r rules.Rule) bool { return strings.Contains(r.Spec, "canaryd-") }

func extract(t *testing.T, table rules.TableName, body string) rules.Section {
	t.Helper()
	text := "*" + string(table) + "\n" + body + "COMMIT\n"
	return rules.Protection{Chain: selector(t, "KUBE-*").Protects}.Extract(savefile.Tables(t, text)[table], isMark)
}

const (
	mark    = "-m comment --comment \"canaryd-witness:1\"\n"
	foreign = "-i lo -j ACCEPT"
)

func TestExtractAnchorsAJumpByTheForeignRulesAroundIt(t *testing.T) {
	top := rules.Anchor{Position: rules.Top}
	bottom := rules.Anchor{Position: rules.Bottom}
	behind := func(spec string) rules.Anchor {
		r, _ := rules.ParseRule(spec)
		return rules.Anchor{Position: rules.Behind, Neighbour: r}
	}
	tests := []struct {
		name  string
		rules []string // of INPUT
		want  []rules.Anchor
	}{
		{"alone", []string{"-j KUBE-A"}, []rules.Anchor{top}},
		{"before a foreign rule", []string{"-j KUBE-A", foreign}, []rules.Anchor{top}},
		{"after all foreign rules", []string{foreign, "-j KUBE-A"}, []rules.Anchor{bottom}},
		{"between foreign rules", []string{"-j DROP", foreign, "-j KUBE-A", "-j DROP"}, []rules.Anchor{behind(foreign)}},
		{
			"two in every place", []string{"-j KUBE-A", "-j KUBE-B", foreign, "-j KUBE-A", "-j KUBE-B", "-j DROP", "-j KUBE-A", "-j KUBE-B"},
			[]rules.Anchor{top, top, behind(foreign), behind(foreign), bottom, bottom},
		},
		{"a mark before it is no neighbour", []string{mark, "-j KUBE-A"}, []rules.Anchor{top}},
		{"a mark after it does not make it less the last", []string{foreign, "-j KUBE-A", mark}, []rules.Anchor{bottom}},
		{"a mark between it and its neighbour", []string{foreign, mark, "-j KUBE-A", "-j DROP"}, []rules.Anchor{behind(foreign)}},
		{"a rule to an unprotected chain is no jump", []string{"-j corp"}, nil},
		{"a comment that names a protected chain is no jump", []string{`-m comment --comment "-j KUBE-A"`}, nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			body := ":INPUT ACCEPT [0:0]\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n:corp - [0:0]\n"
			for _, r := range test.rules {
				body += "-A INPUT " + strings.TrimSuffix(r, "\n") + "\n"
			}
			var got []rules.Anchor
			section := extract(t, rules.Filter, body)
			if alone := slices.Contains(section.Alone, "INPUT"); alone != (test.name == "alone" || test.name == "a mark before it is no neighbour") {
				t.Errorf("alone: %t", alone)
			}
			for _, h := range section.Jumps {
				if h.Chain != "INPUT" || !strings.HasPrefix(h.Rule.Target, "KUBE-") {
					t.Errorf("jump %s", h)
				}
				got = append(got, h.Anchor)
			}
			if d := cmp.Diff(test.want, got, exactly); d != "" {
				t.Errorf("anchors (-want +got):\n%s", d)
			}
		})
	}
}

func TestExtractTakesWhatIsProtectedAndNothingElse(t *testing.T) {
	got := extract(t, rules.Nat, `:PREROUTING ACCEPT [0:0]
:OUTPUT DROP [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-Z - [0:0]
:KUBE-A - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:corp - [0:0]
:idle - [0:0]
-A POSTROUTING -j KUBE-Z
-A PREROUTING -j KUBE-A
-A corp -j KUBE-A
-A KUBE-Z -j corp
-A KUBE-Z -p tcp -j corp
-A KUBE-Z -j KUBE-A
-A KUBE-Z -j MASQUERADE
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:1"
`)
	want := rules.Section{
		Chains: []rules.Chain{
			{Name: "KUBE-Z", Rules: []rules.Rule{
				{Spec: "-j corp", Target: "corp"},
				{Spec: "-p tcp -j corp", Target: "corp"},
				{Spec: "-j KUBE-A", Target: "KUBE-A"},
				{Spec: "-j MASQUERADE", Target: "MASQUERADE"},
			}},
			{Name: "KUBE-A"},
		},
		Jumps: []rules.Jump{
			{Chain: "PREROUTING", Rule: rules.Rule{Spec: "-j KUBE-A", Target: "KUBE-A"}, Anchor: rules.Anchor{Position: rules.Top}},
			{Chain: "POSTROUTING", Rule: rules.Rule{Spec: "-j KUBE-Z", Target: "KUBE-Z"}, Anchor: rules.Anchor{Position: rules.Top}},
		},
		Alone:     []string{"PREROUTING", "POSTROUTING"},
		DependsOn: []string{"corp"},
		Policies:  map[string]string{"PREROUTING": "ACCEPT", "OUTPUT": "DROP", "POSTROUTING": "ACCEPT"},
	}
	if d := cmp.Diff(want, got, exactly); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"PREROUTING", "POSTROUTING"}, got.JumpChains(rules.Nat)); d != "" {
		t.Errorf("jumped chains (-want +got):\n%s", d)
	}
	if n := got.RuleCount(); n != 6 {
		t.Errorf("%d rules, want 6", n)
	}
}

func TestExtractOfNoTableIsNothing(t *testing.T) {
	if d := cmp.Diff(rules.Section{}, rules.Protection{Chain: func(string) bool { return true }}.Extract(nil, isMark), exactly); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
