package rules_test

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

func r(spec string) rules.Rule {
	rule, _ := rules.ParseRule(spec)
	return rule
}

func small() rules.Generation {
	return rules.Generation{rules.IPv4.Table(rules.Nat): {
		Chains: []rules.Chain{
			{Name: "KUBE-SERVICES", Rules: []rules.Rule{r(`-d 10.96.0.1/32 -m comment --comment "it\'s \"x\"" -j KUBE-A`), r("-j corp")}},
			{Name: "KUBE-A", Rules: []rules.Rule{r("-j MASQUERADE")}},
			{Name: "KUBE-EMPTY"},
		},
		Jumps: []rules.Jump{
			{Chain: "PREROUTING", Rule: r("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Behind, Neighbour: r("-i lo -j ACCEPT")}},
			{Chain: "OUTPUT", Rule: r("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Top}},
		},
		DependsOn: []string{"corp"},
		Policies:  map[string]string{"OUTPUT": "ACCEPT"},
	}}
}

// changed returns small() with its nat section changed.
func changed(change func(*rules.Section)) rules.Generation {
	g := small()
	s := g[rules.IPv4.Table(rules.Nat)]
	change(&s)
	return g.With(rules.IPv4.Table(rules.Nat), s)
}

func TestIDDoesNotDependOnTheOrderOfChainsNorOnWhatIsNotReplayed(t *testing.T) {
	want := small().ID()
	if !regexp.MustCompile(`^[0-9a-f]{12}$`).MatchString(want) {
		t.Fatalf("ID is %q, want 12 hexadecimal digits", want)
	}
	for name, g := range map[string]rules.Generation{
		"the same again":  small(),
		"chains reversed": changed(func(s *rules.Section) { slices.Reverse(s.Chains) }),
		"another policy":  changed(func(s *rules.Section) { s.Policies = map[string]string{"OUTPUT": "DROP"} }),
		"no dependency":   changed(func(s *rules.Section) { s.DependsOn = nil }),
	} {
		if got := g.ID(); got != want {
			t.Errorf("%s: ID %s, want %s", name, got, want)
		}
		if !g[rules.IPv4.Table(rules.Nat)].Equal(small()[rules.IPv4.Table(rules.Nat)]) {
			t.Errorf("%s: the sections are not Equal", name)
		}
	}
}

func TestIDDependsOnEverythingElse(t *testing.T) {
	ids := map[string]string{small().ID(): "unchanged"}
	for name, g := range map[string]rules.Generation{
		"nothing":           {},
		"the other family":  {rules.IPv6.Table(rules.Nat): small()[rules.IPv4.Table(rules.Nat)]},
		"the other table":   {rules.IPv4.Table(rules.Filter): small()[rules.IPv4.Table(rules.Nat)]},
		"one chain less":    changed(func(s *rules.Section) { s.Chains = s.Chains[:2] }),
		"a chain renamed":   changed(func(s *rules.Section) { s.Chains[1].Name = "KUBE-B" }),
		"one rule less":     changed(func(s *rules.Section) { s.Chains[0].Rules = s.Chains[0].Rules[:1] }),
		"a rule changed":    changed(func(s *rules.Section) { s.Chains[1].Rules[0] = r("-j MASQUERADE --random-fully") }),
		"rules reversed":    changed(func(s *rules.Section) { slices.Reverse(s.Chains[0].Rules) }),
		"rules moved":       changed(func(s *rules.Section) { s.Chains[1].Rules, s.Chains[2].Rules = nil, s.Chains[1].Rules }),
		"one jump less":     changed(func(s *rules.Section) { s.Jumps = s.Jumps[:1] }),
		"a jump changed":    changed(func(s *rules.Section) { s.Jumps[0].Rule = r("-p tcp -j KUBE-SERVICES") }),
		"a jump moved":      changed(func(s *rules.Section) { s.Jumps[1].Chain = "POSTROUTING" }),
		"jumps reversed":    changed(func(s *rules.Section) { slices.Reverse(s.Jumps) }),
		"another position":  changed(func(s *rules.Section) { s.Jumps[1].Anchor.Position = rules.Bottom }),
		"another neighbour": changed(func(s *rules.Section) { s.Jumps[0].Anchor.Neighbour = r("-j DROP") }),
	} {
		if g[rules.IPv4.Table(rules.Nat)].Equal(small()[rules.IPv4.Table(rules.Nat)]) {
			t.Errorf("%s: the sections are Equal", name)
		}
		id := g.ID()
		if other, taken := ids[id]; taken {
			t.Errorf("%q has the ID of %q", name, other)
		}
		ids[id] = name
	}
}

func TestAGenerationSurvivesJSON(t *testing.T) {
	data, err := json.Marshal(small())
	if err != nil {
		t.Fatal(err)
	}
	var got rules.Generation
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	if d := cmp.Diff(small(), got, exactly); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got.ID() != small().ID() {
		t.Errorf("ID %s, was %s", got.ID(), small().ID())
	}
	if !strings.Contains(string(data), `"ipv4":{"nat":`) {
		t.Errorf("families and tables are not spelled as in flags: %s", data)
	}
}

func TestJSONOfSomethingElseIsRefused(t *testing.T) {
	for name, data := range map[string]string{
		"a family that is none": `{"ipv5":{}}`,
		"an open quote":         `{"ipv4":{"nat":{"chains":[{"Name":"A","Rules":["-m comment --comment \"x"]}]}}}`,
	} {
		var g rules.Generation
		if err := json.Unmarshal([]byte(data), &g); err == nil {
			t.Errorf("%s: read as %v", name, g)
		}
	}
}

// TestOddRulesOfAStoredGenerationAreOpaque: a generation that an older canaryd stored may hold
// a text that is no rule.
func TestOddRulesOfAStoredGenerationAreOpaque(t *testing.T) {
	for _, spec := range []string{"-m x [unsupported revision] -j A", "-i a -h -j A", "-i a -M /tmp/x -j A"} {
		var g rules.Generation
		if err := json.Unmarshal([]byte(`{"ipv4":{"nat":{"hooks":[{"chain":"OUTPUT","rule":"`+spec+`"}]}}}`), &g); err != nil {
			t.Fatal(err)
		}
		jump := g[rules.IPv4.Table(rules.Nat)].Jumps[0].Rule
		if _, opaque := jump.Opaque(); !opaque || jump.Target != "A" || rules.Validate(g) != nil {
			t.Errorf("%s is read as %q to %q", spec, jump.Spec, jump.Target)
		}
		if text := rules.Render(g, rules.IPv4); strings.Contains(text, "\n-A") || !strings.Contains(text, "\n# -A OUTPUT # rule ") {
			t.Errorf("%s is written as\n%s", spec, text)
		}
	}
}

func TestAChangedCloneLeavesTheGenerationAlone(t *testing.T) {
	g := small()
	c := g.Clone()
	c[rules.IPv4.Table(rules.Nat)] = rules.Section{}
	delete(c, rules.IPv4.Table(rules.Nat))
	with := g.With(rules.IPv6.Table(rules.Filter), small()[rules.IPv4.Table(rules.Nat)])
	if d := cmp.Diff(small(), g, exactly); d != "" {
		t.Errorf("the original changed (-want +got):\n%s", d)
	}
	if n, chains := with.Counts(); n != 10 || chains != 6 {
		t.Errorf("two sections hold %d rules and %d chains, want 10 and 6", n, chains)
	}
}

func TestRenderWritesWhatLoadsIntoEmptyTables(t *testing.T) {
	set := savefile.Tables(t, testdata(t, "node.nft.save"))
	g := rules.Generation{rules.IPv6.Table(rules.Nat): small()[rules.IPv4.Table(rules.Nat)]}
	for name, table := range set {
		g[rules.IPv4.Table(name)] = rules.Protection{Chain: selector(t, "kube", "cni").Protects}.Extract(table, isMark)
	}
	g[rules.IPv4.Table(rules.Raw)] = rules.Section{Policies: map[string]string{"OUTPUT": "DROP"}}
	for f, file := range map[rules.Family]string{rules.IPv4: "render.v4.golden", rules.IPv6: "render.v6.golden"} {
		got := rules.Render(g, f)
		golden.Compare(t, file, []byte(got))
		for _, chain := range rules.BuiltinChains(rules.Mangle) {
			if strings.Contains(got, ":"+chain) {
				t.Errorf("%s declares %s and so sets its policy", f, chain)
			}
		}
	}
	if got := rules.Render(rules.Generation{}, rules.IPv4); got != "" {
		t.Errorf("nothing is rendered as %q", got)
	}
}

// TestOpaqueRulesOfASection: unchanged chains must not be searched again, but changed chains
// must.
func TestOpaqueRulesOfASection(t *testing.T) {
	odd, plain := rules.OpaqueRule([]byte("x"), "B", "why"), rule(t, "-j RETURN")
	first := rules.Section{
		Chains: []rules.Chain{{Name: "A", Rules: []rules.Rule{plain, odd}}, {Name: "B", Rules: []rules.Rule{plain}}},
		Jumps:  []rules.Jump{{Chain: "OUTPUT", Rule: odd}, {Chain: "OUTPUT", Rule: plain}},
	}
	found := first.Opaque(rules.Section{}, nil)
	want := []rules.TextlessRule{{Chain: "OUTPUT", Rule: odd}, {Chain: "A", Rule: odd}}
	if d := cmp.Diff(want, found, exactly); d != "" {
		t.Errorf("found (-want +got):\n%s", d)
	}
	later := rules.Section{Chains: []rules.Chain{
		{Name: "A", Rules: first.Chains[0].Rules}, {Name: "AA", Rules: []rules.Rule{odd}}, {Name: "B", Rules: []rules.Rule{plain, plain, odd}},
	}}
	want = []rules.TextlessRule{{Chain: "A", Rule: odd}, {Chain: "AA", Rule: odd}, {Chain: "B", Rule: odd}}
	if d := cmp.Diff(want, later.Opaque(first, found), exactly); d != "" {
		t.Errorf("found later (-want +got):\n%s", d)
	}
}
