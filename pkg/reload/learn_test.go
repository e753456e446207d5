package reload

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// A lesson is one read: its time, its content, and the generation that must follow.
type lesson struct {
	at      time.Duration
	seen    []string // lines of nat
	waiting []string // jumps of PREROUTING that are in the finding's Waiting
	want    []string // nil: seen
	due     time.Duration
}

const (
	services = ":KUBE-SERVICES"
	masq     = ":KUBE-MARK-MASQ"
	svcA     = ":KUBE-SVC-A"
	svcB     = ":KUBE-SVC-B"

	toServices = "-A PREROUTING -j KUBE-SERVICES"
	ruleA      = "-A KUBE-SERVICES -d 10.96.0.1/32 -j KUBE-SVC-A"
	ruleB      = "-A KUBE-SERVICES -d 10.96.0.2/32 -j KUBE-SVC-B"
	inA        = "-A KUBE-SVC-A -j RETURN"
	inB        = "-A KUBE-SVC-B -j RETURN"
	inMasq     = "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"
)

var (
	whole = []string{services, masq, svcA, svcB, toServices, ruleA, ruleB, inA, inB, inMasq}
	noB   = []string{services, masq, svcA, toServices, ruleA, inA, inMasq}
	// A service's chain is back, without rules.
	emptyB = []string{services, masq, svcA, svcB, toServices, ruleA, inA, inMasq}
	// Three of six rules; fewer would be less than half.
	few = []string{services, toServices, "-A KUBE-SERVICES -j RETURN"}
)

func TestLearn(t *testing.T) {
	const s = time.Second
	noBYet := []string{services, masq, svcA, svcB, toServices, ruleA, inA, inB, inMasq}
	tests := []struct {
		name    string
		lessons []lesson
	}{
		{"the first read is believed", []lesson{{0, few, nil, nil, 0}, {s, few, nil, nil, 0}}},
		{"growth counts at once", []lesson{{0, noB, nil, nil, 0}, {s, whole, nil, nil, 0}}},
		{"a rule that became another counts at once", []lesson{
			{0, whole, nil, nil, 0},
			{0, []string{services, masq, svcA, svcB, toServices, ruleA, ruleB, "-A KUBE-SVC-A -j DROP", inB, inMasq}, nil, nil, 0},
		}},
		{"a chain that is gone is kept for two seconds", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, noB, nil, noBYet, 12 * s},
			{11 * s, noB, nil, noBYet, 12 * s},
			{12*s - 1, noB, nil, noBYet, 12 * s},
			{12 * s, noB, nil, nil, 0},
		}},
		{"a chain that is empty is kept for two seconds", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, emptyB, nil, noBYet, 12 * s},
			{12 * s, emptyB, nil, nil, 0},
			{13 * s, emptyB, nil, nil, 0},
		}},
		{"a chain that never held a rule, as KUBE-IPTABLES-HINT, and is gone is kept for two seconds", []lesson{
			{0, emptyB, nil, nil, 0},
			{10 * s, noB, nil, emptyB, 12 * s},
			{12 * s, noB, nil, nil, 0},
		}},
		{"emptied first and removed later, it has been gone since it was emptied", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, emptyB, nil, noBYet, 12 * s},
			{11 * s, noB, nil, noBYet, 12 * s},
			{12 * s, noB, nil, nil, 0},
		}},
		{"a chain that comes back and goes again waits anew", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, noB, nil, noBYet, 12 * s},
			{11 * s, whole, nil, nil, 0},
			{13 * s, noB, nil, noBYet, 15 * s},
			{15 * s, noB, nil, nil, 0},
		}},
		{"two chains wait each for itself", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, noB, nil, noBYet, 12 * s},
			{
				11 * s, []string{services, masq, toServices, ruleA, inMasq}, nil,
				[]string{services, masq, svcA, svcB, toServices, ruleA, inA, inB, inMasq}, 12 * s,
			},
			{
				12 * s, []string{services, masq, toServices, ruleA, inMasq}, nil,
				[]string{services, masq, svcA, toServices, ruleA, inA, inMasq}, 13 * s,
			},
			{13 * s, []string{services, masq, toServices, ruleA, inMasq}, nil, nil, 0},
		}},
		{"a table that loses more than half waits as a whole, and not twice", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, few, nil, whole, 12 * s},
			{11 * s, few, nil, whole, 12 * s},
			{12 * s, few, nil, nil, 0},
		}},
		{"half a table that comes back and goes again waits anew", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, few, nil, whole, 12 * s},
			{11 * s, whole, nil, nil, 0},
			{12 * s, few, nil, whole, 14 * s},
		}},
		{"a chain that goes while the table waits has its own two seconds", []lesson{
			{0, whole, nil, nil, 0},
			{10 * s, []string{services, masq, svcA, svcB, inMasq}, nil, whole, 12 * s},
			{
				11 * s, []string{services, svcA, svcB, "-A KUBE-SERVICES -j RETURN"}, nil, whole, 12 * s,
			},
			{
				12 * s, []string{services, svcA, svcB, "-A KUBE-SERVICES -j RETURN"}, nil,
				[]string{services, masq, svcA, svcB, "-A KUBE-SERVICES -j RETURN", inMasq}, 13 * s,
			},
			{13 * s, []string{services, svcA, svcB, "-A KUBE-SERVICES -j RETURN"}, nil, nil, 0},
		}},
		{"the jump into a chain that is kept is kept, one into a chain that stands goes", []lesson{
			{0, append(slices.Clone(whole), "-A PREROUTING -j KUBE-SVC-B", "-A OUTPUT -j KUBE-SERVICES"), nil, nil, 0},
			{10 * s, noB, nil, append(slices.Clone(noBYet), "-A PREROUTING -j KUBE-SVC-B"), 12 * s},
			{12 * s, noB, nil, nil, 0},
		}},
		{"a jump that waits is kept as long as it waits", []lesson{
			{0, whole, nil, nil, 0},
			{s, []string{services, masq, svcA, svcB, ruleA, ruleB, inA, inB, inMasq}, []string{"-j KUBE-SERVICES"}, whole, 0},
			{2 * s, []string{services, masq, svcA, svcB, ruleA, ruleB, inA, inB, inMasq}, nil, nil, 0},
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var l Learned
			for _, lesson := range test.lessons {
				var finding canary.Finding
				for _, spec := range lesson.waiting {
					finding.Waiting = append(finding.Waiting, rules.Jump{Chain: "PREROUTING", Rule: rule(spec)})
				}
				next, again := l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, lesson.seen...), finding, noon.Add(lesson.at))
				l = next
				if lesson.want == nil {
					lesson.want = lesson.seen
				}
				want, got := sectionOf(t, rules.Nat, lesson.want...), l.Generation[v4.Table(rules.Nat)]
				if !want.Equal(got) {
					t.Errorf("%v: (-want +got):\n%s", lesson.at, cmp.Diff(want, got))
				}
				due := noon.Add(lesson.due)
				if lesson.due == 0 {
					due = time.Time{}
				}
				if !again.Equal(due) {
					t.Errorf("%v: look again at %v, want %v", lesson.at, again, due)
				}
			}
		})
	}
}

// TestARuleGoesWithItsChain: a chain was emptied, and waits for its owner. The owner removes a
// chain behind it meanwhile. Then the rule that led there is gone, too: a replay could not write
// it.
func TestARuleGoesWithItsChain(t *testing.T) {
	var l Learned
	waiting := canary.Finding{Waiting: []rules.Jump{{Chain: "KUBE-SERVICES", Rule: rule("-j KUBE-SVC-A")}}}
	l, _ = l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, whole...), canary.Finding{}, noon)
	for _, at := range []time.Duration{time.Second, 4 * time.Second} {
		l, _ = l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, services, masq, svcA, toServices, inA, inMasq), waiting, noon.Add(at))
	}
	want, got := sectionOf(t, rules.Nat, noB...), l.Generation[v4.Table(rules.Nat)]
	if !want.Equal(got) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, got))
	}
}

func TestWhatOneTableWaitsForIsNoneOfTheOthersBusiness(t *testing.T) {
	var l Learned
	for _, f := range rules.Families() {
		l, _ = l.Learn(f, rules.Nat, sectionOf(t, rules.Nat, whole...), canary.Finding{}, noon)
	}
	l, _ = l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, noB...), canary.Finding{}, noon.Add(time.Second))
	l, due := l.Learn(v6, rules.Nat, sectionOf(t, rules.Nat, noB...), canary.Finding{}, noon.Add(2*time.Second))
	if want := noon.Add(4 * time.Second); !due.Equal(want) {
		t.Errorf("ipv6 is due at %v, want %v", due, want)
	}
	l, due = l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, noB...), canary.Finding{}, noon.Add(3*time.Second))
	if !due.IsZero() {
		t.Errorf("ipv4 is due at %v, though its two seconds are over", due)
	}
	if _, there := l.Generation[v6.Table(rules.Nat)].Chain("KUBE-SVC-B"); !there {
		t.Error("ipv6 forgot its chain with ipv4")
	}
	if l.Knows(v4, rules.Filter) {
		t.Error("filter is known, though nobody read it")
	}
}

func TestJumpsThatAreKeptKeepTheirOrder(t *testing.T) {
	jump := func(spec string) rules.Jump { return rules.Jump{Chain: "FORWARD", Rule: rule(spec)} }
	a, b, c, d, e := jump("-j KUBE-A"), jump("-j KUBE-B"), jump("-j KUBE-C"), jump("-j KUBE-D"), jump("-j KUBE-E")
	old := []rules.Jump{a, b, c, d}
	tests := []struct {
		name             string
		seen, keep, want []rules.Jump
	}{
		{"none is missing", old, old, old},
		{"one in the middle", []rules.Jump{a, c, d}, []rules.Jump{b}, old},
		{"the first", []rules.Jump{b, c, d}, []rules.Jump{a}, old},
		{"the last", []rules.Jump{a, b, c}, []rules.Jump{d}, old},
		{"all", nil, old, old},
		{"one behind one that goes", []rules.Jump{a, d}, []rules.Jump{c}, []rules.Jump{a, c, d}},
		{"one before a new one", []rules.Jump{a, b, d, e}, []rules.Jump{c}, []rules.Jump{a, b, c, d, e}},
		{"none is kept", []rules.Jump{d, a}, nil, []rules.Jump{d, a}},
	}
	for _, test := range tests {
		got := keepJumps(old, test.seen, func(h rules.Jump) bool { return slices.ContainsFunc(test.keep, h.Same) })
		if d := cmp.Diff(test.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
	}
}

func TestALearnedPolicyIsTheNewest(t *testing.T) {
	section := sectionOf(t, rules.Nat, whole...)
	l, _ := Learned{}.Learn(v4, rules.Nat, section, canary.Finding{}, noon)
	id := l.Generation.ID()
	section.Policies = map[string]string{"OUTPUT": "DROP"}
	l, _ = l.Learn(v4, rules.Nat, section, canary.Finding{}, noon.Add(time.Second))
	if d := cmp.Diff(section.Policies, l.Generation[v4.Table(rules.Nat)].Policies); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if l.Generation.ID() != id {
		t.Error("a policy changed the generation's ID")
	}
}

// TestAJumpThatIsAloneKeepsItsAnchor: a reload of firewalld flushes twice. In between, the table
// has only replayed rules, and a jump's place means nothing then.
func TestAJumpThatIsAloneKeepsItsAnchor(t *testing.T) {
	const (
		accept = "-A PREROUTING -i lo -j ACCEPT"
		docker = "-A PREROUTING -j DOCKER"
		toB    = "-A PREROUTING -j KUBE-SVC-B"
		toA    = "-A PREROUTING -j KUBE-SVC-A"
	)
	chains := []string{services, svcA, svcB, ruleA, ruleB, inA, inB}
	top, bottom := rules.Anchor{Position: rules.Top}, rules.Anchor{Position: rules.Bottom}
	behind := rules.Anchor{Position: rules.Behind, Neighbour: rule("-i lo -j ACCEPT")}
	for _, test := range []struct {
		name        string
		first, then []string // rules of PREROUTING
		want        []rules.Anchor
	}{
		{"each its own", []string{toServices, accept, toA, docker, toB}, []string{toServices, toA, toB}, []rules.Anchor{top, behind, bottom}},
		{"one that was not there before is on top", []string{accept, toB}, []string{toA, toB}, []rules.Anchor{top, bottom}},
		{"in another order they are where their owner put them", []string{toServices, accept, toB}, []string{toB, toServices}, []rules.Anchor{top, top}},
		{"beside a foreign rule they are where they stand", []string{toServices, accept, toB}, []string{toServices, toB, docker}, []rules.Anchor{top, top}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var l Learned
			for _, jumps := range [][]string{test.first, test.then} {
				l, _ = l.Learn(v4, rules.Nat, sectionOf(t, rules.Nat, append(slices.Clone(chains), jumps...)...), canary.Finding{}, noon)
			}
			var got []rules.Anchor
			for _, h := range l.Generation[v4.Table(rules.Nat)].Jumps {
				got = append(got, h.Anchor)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("anchors (-want +got):\n%s", diff)
			}
		})
	}
}
