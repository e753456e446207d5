package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// onLegacy runs body in a namespace of its own for each family.
func onLegacy(t *testing.T, body func(t *testing.T, k *Kernel, family rules.Family)) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, program(Legacy, family, "-save"))
				body(t, openKernel(t, Config{Backend: Legacy}), family)
			})
		})
	}
}

// learnLegacy reads under the lock.
func learnLegacy(t *testing.T, k *Kernel, family rules.Family) {
	t.Helper()
	s := begin(t, k)
	mustRead(t, s, family)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// withoutSave calls f while iptables-save always fails.
func withoutSave(t *testing.T, k *Kernel, family rules.Family, f func()) {
	t.Helper()
	real := k.tools[family]
	standIn(t, k, family, "echo it was executed >&2; exit 3")
	f()
	k.tools[family] = real
}

// wantKnown compares what is said without executing anything with what
// iptables-save prints.
func wantKnown(t *testing.T, k *Kernel, family rules.Family, after string) {
	t.Helper()
	saved, unreadable, err := k.save(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	withoutSave(t, k, family, func() {
		got, err := k.Read(t.Context(), family)
		if err != nil {
			t.Fatalf("after %s: %v; not known is %q", after, err, unknownOf(t, k, family, saved))
		}
		if diff := cmp.Diff(spelt(saved, unreadable), spelt(got.Tables, got.Unreadable)); diff != "" {
			t.Fatalf("after %s (-saved +said):\n%s", after, diff)
		}
		if now := mustProbe(t, k, family).Digest; now != got.Digest {
			t.Errorf("after %s: the digest is %#x, a probe's %#x", after, got.Digest, now)
		}
	})
}

// spelt returns a Snapshot to the letter, because Rules are equal by their
// meaning.
func spelt(set rules.Ruleset, unreadable map[rules.TableName]error) (lines []string) {
	for _, name := range slices.Sorted(maps.Keys(set)) {
		lines = append(lines, "*"+string(name))
		for _, c := range set[name].Chains {
			lines = append(lines, ":"+c.Name+" "+c.Policy)
			for _, r := range c.Rules {
				lines = append(lines, "-A "+c.Name+" "+r.Spec+" goes to "+r.Target)
			}
		}
	}
	return append(lines, fmt.Sprint(unreadable))
}

// unknownOf returns the rules whose text the lexicon does not know.
func unknownOf(t *testing.T, k *Kernel, family rules.Family, saved rules.Ruleset) (list []string) {
	t.Helper()
	seen, err := k.walk(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range seen.tables {
		for i, c := range table.chains {
			for at, n := range table.names(i) {
				if _, known := k.words[family].rule(n.key, 0); !known {
					list = append(list, saved[table.name].Chain(c.name).Rules[at].Spec)
				}
			}
		}
	}
	return list
}

func wantUnknown(t *testing.T, k *Kernel, family rules.Family, after string) {
	t.Helper()
	withoutSave(t, k, family, func() {
		if s, err := k.Read(t.Context(), family); err == nil || !strings.Contains(err.Error(), "it was executed") {
			t.Errorf("after %s it answers by itself: %v, %v", after, describe(s.Tables, nil), err)
		}
	})
}

// saveLegacy returns everything as text. After a restore into tables that already
// have rules, every chain begins elsewhere.
func saveLegacy(t *testing.T, family rules.Family) string {
	t.Helper()
	return nstest.Command(t, program(Legacy, family, "-save"))
}

// canaryd learns the rules of all clusters of the corpus under the lock. It must
// know them again after a flush and at other places of the table.
func TestLegacyCorpusIsReadWithoutExecutingAnything(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		k := openKernel(t, Config{Backend: Legacy})
		known := 0
		for file, text := range corpus(t) {
			_, _ = tryTool(t, text, "iptables-legacy-restore")
			learnLegacy(t, k, rules.IPv4)
			saved := saveLegacy(t, rules.IPv4)
			if strings.Contains(saved, "--match-set") || strings.Contains(saved, "-j SET") {
				wantUnknown(t, k, rules.IPv4, file)
				continue
			}
			wantKnown(t, k, rules.IPv4, file)
			nstest.CommandInput(t, "*nat\n:AAA - [0:0]\n-A AAA -m comment --comment canaryd-canary:0123\nCOMMIT\n*filter\nCOMMIT\n", "iptables-legacy-restore")
			wantKnown(t, k, rules.IPv4, file+" and a flush")
			nstest.CommandInput(t, saved, "iptables-legacy-restore", "--noflush")
			wantKnown(t, k, rules.IPv4, file+", a flush and a restore")
			known += strings.Count(saved, "\n-A ")
		}
		if known < 500 {
			t.Errorf("only %d rules were known in all", known)
		}
	})
}

// The same for random rules in every table, of both families.
func TestLegacyRandomRulesAreReadWithoutExecutingAnything(t *testing.T) {
	seed := directSeed(t)
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		restore := program(Legacy, family, "-restore")
		draws, loaded := testkit.Size(20, 50), 0
		for i, table := range protect.Tables() {
			r := rand.New(rand.NewPCG(seed, uint64(family)<<8|uint64(i)))
			nstest.CommandInput(t, "*"+string(table)+"\n:X - [0:0]\n:Y - [0:0]\n:Z - [0:0]\n-A Y -g Z\nCOMMIT\n", restore, "--noflush")
			var drawn []string
			for range draws {
				rule := randrules.Draw(r, family, table).Spell(r)
				if strings.Count(rule, "--comment") < 2 { // two comments are not distinguished
					drawn = append(drawn, "-A X "+rule+"\n")
				}
			}
			restoreEach(t, restore, table, drawn)
			learnLegacy(t, k, family)
			wantKnown(t, k, family, "rules of "+string(table))
			saved := saveLegacy(t, family)
			nstest.CommandInput(t, "*"+string(table)+"\n:AAA - [0:0]\nCOMMIT\n", restore)
			wantKnown(t, k, family, "a flush of "+string(table))
			nstest.CommandInput(t, saved, restore)
			wantKnown(t, k, family, "a restore of "+string(table))
			loaded += strings.Count(saved, "\n-A X ")
		}
		if loaded < 2*draws {
			t.Errorf("only %d rules were loaded in all", loaded)
		}
	})
}

// Every change of a rule makes an unknown rule.
func TestLegacyChangesAreNotKnown(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		run := func(line string) { t.Helper(); iptablesCommand(t, Legacy, family, line) }
		run("-t nat -N X")
		run("-t nat -N Y")
		run("-t nat -A X -p tcp --dport 80 -m comment --comment one -j Y")
		learnLegacy(t, k, family)
		for _, other := range []string{
			"-p tcp --dport 81 -m comment --comment one -j Y", "-p udp --dport 80 -m comment --comment one -j Y",
			"-p tcp --dport 80 -m comment --comment two -j Y", "-p tcp --dport 80 -m comment --comment one -g Y",
			"-p tcp --dport 80 -m comment --comment one", "-p tcp --dport 80 -m comment --comment one -j RETURN",
			"-i lo -p tcp --dport 80 -m comment --comment one -j Y",
		} {
			run("-t nat -R X 1 " + other)
			wantUnknown(t, k, family, other)
		}
		run("-t nat -R X 1 -p tcp --dport 80 -m comment --comment one -j Y")
		wantKnown(t, k, family, "the same as before")
		run("-t nat -N Z")
		run("-t nat -R X 1 -p tcp --dport 80 -m comment --comment one -j Z")
		wantUnknown(t, k, family, "a jump elsewhere")
		run("-t nat -R X 1 -p tcp --dport 80 -m comment --comment one -j Y")
		run("-t nat -E Y W")
		wantUnknown(t, k, family, "a chain with another name")
	})
}

// iptables does not always make the same bytes of a rule and of its saved text.
// That difference alone does not count as a change.
func TestLegacyKnowsARecentThatWasSaved(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		iptablesCommand(t, Legacy, family, "-t nat -N X")
		iptablesCommand(t, Legacy, family, "-t nat -A X -m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap -j ACCEPT")
		learnLegacy(t, k, family)
		before := mustProbe(t, k, family).Digest
		nstest.CommandInput(t, saveLegacy(t, family), program(Legacy, family, "-restore"))
		wantKnown(t, k, family, "a restore of what was saved")
		if now := mustProbe(t, k, family).Digest; now != before {
			t.Errorf("the digest was %#x and is %#x", before, now)
		}
		iptablesCommand(t, Legacy, family, "-t nat -R X 1 -m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap -j ACCEPT "+
			map[rules.Family]string{rules.IPv4: "--mask 255.255.255.0", rules.IPv6: "--mask ffff:ffff::"}[family])
		wantUnknown(t, k, family, "another mask")
	})
}

// The index by which a rule names an ipset may belong to another set later.
func TestLegacySetsAreAskedForEachTime(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		put := func(name string) string {
			rule := "-m set --match-set " + name + " src -j ACCEPT"
			nstest.Command(t, "ipset", "create", name, "hash:ip", "family", inet)
			iptablesCommand(t, Legacy, family, "-t nat -A X "+rule)
			return rule
		}
		iptablesCommand(t, Legacy, family, "-t nat -N X")
		put("one")
		learnLegacy(t, k, family)
		wantUnknown(t, k, family, "a rule with a set")
		iptablesCommand(t, Legacy, family, "-t nat -F X")
		nstest.Command(t, "ipset", "destroy", "one")
		want := put("two") // gets the index of the first
		if got := mustRead(t, k, family).Tables[rules.Nat].Chain("X").Rules[0].Spec; got != want {
			t.Errorf("with another set the rule is %q, want %q", got, want)
		}
	})
}

// Without the lock, iptables-save's output and the walk may be of different
// moments. The same holds under the lock, if another process ignores it.
func TestLegacyLearnsUnderTheLockOnly(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		iptablesCommand(t, Legacy, family, "-t nat -N X")
		iptablesCommand(t, Legacy, family, "-t nat -A X -p tcp --dport 80 -j ACCEPT")
		mustRead(t, k, family)
		wantUnknown(t, k, family, "a read without the lock")

		real := k.tools[family]
		change := func(port string) string {
			return "XTABLES_LOCKFILE=/run/another.lock " + real.iptables + " -w 5 -t nat -R X 1 -p tcp --dport " + port + " -j ACCEPT\n"
		}
		standIn(t, k, family, change("81")+real.save+" \"$@\"\n")
		learnLegacy(t, k, family)
		k.tools[family] = real
		wantUnknown(t, k, family, "somebody ignored the lock")
		iptablesCommand(t, Legacy, family, "-t nat -R X 1 -p tcp --dport 80 -j ACCEPT")
		wantUnknown(t, k, family, "what he ignored it for is back")

		learnLegacy(t, k, family)
		wantKnown(t, k, family, "a read under the lock")
	})
}

// Between a flush and its proof canaryd executes nothing but iptables-restore.
func TestLegacyReplayIsProvedWithoutExecutingAnything(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		const text = "*nat\n:X - [0:0]\n:Y - [0:0]\n-A X -p tcp -m tcp --dport 80 -j Y\n-A Y -j RETURN\nCOMMIT\n"
		nstest.CommandInput(t, text, program(Legacy, family, "-restore"))
		learnLegacy(t, k, family)
		iptablesCommand(t, Legacy, family, "-t nat -F")
		iptablesCommand(t, Legacy, family, "-t nat -X")
		real := k.tools[family]
		standIn(t, k, family, "exit 3")
		broken := k.tools[family]
		broken.restore = real.restore
		k.tools[family] = broken
		s := begin(t, k)
		if empty := mustRead(t, s, family).Tables[rules.Nat]; empty.RuleCount() != 0 || empty.Chain("X") != nil {
			t.Errorf("after the flush there is %v", empty.Chains)
		}
		mark := "-m comment --comment \"canaryd-witness:0123\""
		wantRestore(t, s, family, "*nat\n:X - [0:0]\n:Y - [0:0]\n-A X -p tcp -m tcp --dport 80 -j Y\n-A Y -j RETURN\n-A OUTPUT "+mark+"\nCOMMIT\n", false, nil)
		got := mustRead(t, s, family)
		want := map[string][]rules.Rule{
			"X": {{Spec: "-p tcp -m tcp --dport 80 -j Y", Target: "Y"}}, "Y": {{Spec: "-j RETURN", Target: "RETURN"}}, "OUTPUT": {{Spec: mark}},
		}
		for chain, list := range want {
			if diff := cmp.Diff(list, got.Tables[rules.Nat].Chain(chain).Rules); diff != "" {
				t.Errorf("%s (-want +got):\n%s", chain, diff)
			}
		}
		if now := mustProbe(t, k, family).Digest; now != got.Digest || got.Moved {
			t.Errorf("the digest is %#x, a probe's %#x; moved: %t", got.Digest, now, got.Moved)
		}
	})
}
