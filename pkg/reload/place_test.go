package reload

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// applied runs commands on a FORWARD chain with these rules, through each backend's restore, and
// returns the rules afterwards.
func applied(t *testing.T, standing, commands []string) []string {
	t.Helper()
	var results [][]string
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		fake := iptablestest.NewFake(backend, v4)
		text := "*filter\n:KUBE-A - [0:0]\n:KUBE-B - [0:0]\n:KUBE-C - [0:0]\n"
		for _, s := range standing {
			text += "-A FORWARD " + s + "\n"
		}
		must(t, fake.RestoreNoflush(v4, text+"COMMIT\n"))
		must(t, fake.RestoreNoflush(v4, "*filter\n"+strings.Join(append(slices.Clone(commands), "COMMIT\n"), "\n")))
		snapshot, err := fake.Read(t.Context(), v4)
		must(t, err)
		got := []string{}
		for _, r := range snapshot.Tables[rules.Filter].Chain("FORWARD").Rules {
			got = append(got, r.Spec)
		}
		results = append(results, got)
	}
	if d := cmp.Diff(results[0], results[1]); d != "" {
		t.Fatalf("the backends differ (-nft +legacy):\n%s", d)
	}
	return results[0]
}

// texts returns steps as iptables-restore reads them.
func texts(t *testing.T, steps []iptables.Step) []string {
	t.Helper()
	var b strings.Builder
	_, err := (&iptables.Script{Table: rules.Filter, Steps: steps}).WriteTo(&b)
	must(t, err)
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	return lines[1 : len(lines)-1] // without "*filter" and "COMMIT"
}

// learnedJumps learns the jumps of a FORWARD chain with these rules.
func learnedJumps(t *testing.T, specs ...string) []rules.Jump {
	t.Helper()
	lines := []string{":KUBE-A", ":KUBE-B", ":KUBE-C"}
	for _, s := range specs {
		lines = append(lines, "-A FORWARD "+s)
	}
	return sectionOf(t, rules.Filter, lines...).Jumps
}

const (
	a, b, c = "-j KUBE-A", "-j KUBE-B", "-j KUBE-C"
	x, y, z = "-i lo -j ACCEPT", "-i eth0 -j ACCEPT", "-i tun0 -j DROP"
)

func TestPlaceJumps(t *testing.T) {
	tests := []struct {
		name                   string
		before, standing, want []string
		commands               []string // nil: any commands with that result
	}{
		{
			name: "nothing is missing", before: []string{a, x, b}, standing: []string{a, x, b},
			want: []string{a, x, b}, commands: []string{},
		},
		{
			name: "jumps at the top come back with plain -I in reverse order", before: []string{a, b, c, x}, standing: []string{x},
			want: []string{a, b, c, x}, commands: []string{"-I FORWARD " + c, "-I FORWARD " + b, "-I FORWARD " + a},
		},
		{
			name: "jumps at the bottom come back with -A", before: []string{x, a, b}, standing: []string{x},
			want: []string{x, a, b}, commands: []string{"-A FORWARD " + a, "-A FORWARD " + b},
		},
		{
			name: "into an emptied chain no index is used", before: []string{a, x, b, y, c}, standing: nil,
			want: []string{a, b, c}, commands: []string{"-I FORWARD " + c, "-I FORWARD " + b, "-I FORWARD " + a},
		},
		{
			name: "a jump goes behind its neighbour", before: []string{x, y, a, z}, standing: []string{x, y, z},
			want: []string{x, y, a, z}, commands: []string{"-I FORWARD 3 " + a},
		},
		{
			name: "two jumps go behind one neighbour in their order", before: []string{x, a, b, z}, standing: []string{x, z},
			want: []string{x, a, b, z}, commands: []string{"-I FORWARD 2 " + a, "-I FORWARD 3 " + b},
		},
		{
			name: "jumps behind two neighbours", before: []string{x, a, y, b, z}, standing: []string{x, y, z},
			want: []string{x, a, y, b, z}, commands: []string{"-I FORWARD 2 " + a, "-I FORWARD 4 " + b},
		},
		{
			name: "a neighbour that moved is followed", before: []string{x, a, y}, standing: []string{y, x, z},
			want: []string{y, x, a, z},
		},
		{
			name: "a neighbour that is gone means top", before: []string{x, a, z}, standing: []string{z},
			want: []string{a, z}, commands: []string{"-I FORWARD " + a},
		},
		{
			name: "a neighbour that is gone, and a jump that stood before", before: []string{b, x, a, z}, standing: []string{b, z},
			want: []string{b, a, z},
		},
		{
			name: "top, middle and bottom at once", before: []string{a, x, b, y, c}, standing: []string{x, y},
			want:     []string{a, x, b, y, c},
			commands: []string{"-I FORWARD " + a, "-I FORWARD 3 " + b, "-A FORWARD " + c},
		},
		{
			name: "the first of its kind is missing", before: []string{a, b, c, x}, standing: []string{b, c, x},
			want: []string{a, b, c, x}, commands: []string{"-I FORWARD " + a},
		},
		{
			name: "the middle one of its kind is missing", before: []string{a, b, c, x}, standing: []string{a, c, x},
			want: []string{a, b, c, x}, commands: []string{"-I FORWARD 2 " + b},
		},
		{
			name: "the last one of its kind is missing", before: []string{a, b, c, x}, standing: []string{a, b, x},
			want: []string{a, b, c, x}, commands: []string{"-I FORWARD 3 " + c},
		},
		{
			name: "a stranger put a rule on top: what stands is where the top is", before: []string{a, b, x}, standing: []string{y, a, x},
			want: []string{y, a, b, x},
		},
		{
			name: "positions of what stands are not corrected", before: []string{a, b, x}, standing: []string{x, b, a},
			want: []string{x, b, a}, commands: []string{},
		},
		{
			name: "a jump that stood twice and stands once comes back once", before: []string{a, a, x}, standing: []string{a, x},
			want: []string{a, a, x},
		},
		{
			name: "bottom jumps in a chain that a stranger lengthened", before: []string{x, a, b}, standing: []string{x, a, y},
			want: []string{x, a, b, y},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			wanted := learnedJumps(t, test.before...)
			steps, placed := placeJumps("FORWARD", ruleList(test.standing...), wanted)
			commands := texts(t, steps)
			if d := cmp.Diff(test.want, applied(t, test.standing, commands)); d != "" {
				t.Errorf("by %q the chain becomes (-want +got):\n%s", commands, d)
			}
			if d := cmp.Diff(test.commands, append([]string{}, commands...)); test.commands != nil && d != "" {
				t.Errorf("commands (-want +got):\n%s", d)
			}
			if len(placed) != len(commands) || len(placed) != len(test.want)-len(test.standing) {
				t.Errorf("%d jumps are said to be placed by %d commands", len(placed), len(commands))
			}
			again, _ := placeJumps("FORWARD", ruleList(test.want...), wanted)
			if len(again) > 0 {
				t.Errorf("a second replay would write %q", texts(t, again))
			}
		})
	}
}

// TestALayoutMatchesAndMerges: each rule in force is matched once, equal ones in their order. A
// missing rule is inserted behind all rules that preceded it.
func TestALayoutMatchesAndMerges(t *testing.T) {
	tests := []struct {
		name, stands, wants string
		at                  []int
		merged              string
	}{
		{"nothing stands", "", "a b", []int{-1, -1}, "a b"},
		{"all stands", "a b", "a b", []int{0, 1}, "a b"},
		{"more stands", "x a y b z", "a b", []int{1, 3}, "x a y b z"},
		{"a copy is missing", "a b a", "a a b a", []int{0, 2, 1, -1}, "a b a a"},
		{"a copy more stands", "a a b", "a b", []int{0, 2}, "a a b"},
		{"another order", "c b a", "a b c", []int{2, 1, 0}, "c b a"},
		{"missing between", "a x c", "a b c", []int{0, -1, 2}, "a b x c"},
		{"missing in another order", "c a", "a b c d", []int{1, -1, 0, -1}, "c a b d"},
		{"in other words", "a A b", "A a b", []int{0, 1, 2}, "a A b"},
		{"the last resort goes to the end", "a x", "a b DROP", []int{0, -1, -1}, "a b x DROP"},
		{"but not if one stands", "a DROP x", "a b REJECT DROP", []int{0, -1, -1, 1}, "a b REJECT DROP x"},
	}
	words := map[string]string{"A": "-p tcp -j a -s 10.0.0.1", "a": "-s 10.0.0.1/32 -p tcp -j a", "DROP": "-j DROP", "REJECT": "-j REJECT"}
	list := func(names string) (list []rules.Rule) {
		for _, name := range strings.Fields(names) {
			if spec := words[name]; spec != "" {
				list = append(list, rule(spec))
			} else {
				list = append(list, rule("-j "+name))
			}
		}
		return list
	}
	for _, test := range tests {
		wants := list(test.wants)
		l := newLayout(list(test.stands), wants)
		if d := cmp.Diff(test.at, l.at); d != "" {
			t.Errorf("%s: the places of those that stand (-want +got):\n%s", test.name, d)
		}
		l.merge(wants, func(i int) (rules.Rule, bool) { return wants[i], true })
		if d := cmp.Diff(list(test.merged), l.rules()); d != "" {
			t.Errorf("%s: merged (-want +got):\n%s", test.name, d)
		}
	}
}
