package iptables

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
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
				body(t, openKernel(t, Config{Backend: Legacy, Families: []rules.Family{family}}), family)
			})
		})
	}
}

// guarded reads in a Session of its own.
func guarded(t *testing.T, k *Kernel, family rules.Family) Snapshot {
	t.Helper()
	s := begin(t, k)
	got := mustRead(t, s, family)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return got
}

// withoutPrograms calls f while each program fails.
func withoutPrograms(t *testing.T, k *Kernel, family rules.Family, f func()) {
	t.Helper()
	real := k.tools[family]
	standIn(t, k, family, "echo it was executed >&2; exit 3")
	f()
	k.tools[family] = real
}

// save returns the output of iptables-save, parsed.
func (k *Kernel) save(t *testing.T, family rules.Family) rules.Ruleset {
	t.Helper()
	return savefile.Tables(t, nstest.Command(t, program(k.info.Backend, family, "-save")))
}

// wantAsPrinted compares a read with the output of iptables-legacy-save, and
// returns the number of rules. Opaque rules, which only some rows may have, count
// as printed.
func wantAsPrinted(t *testing.T, k *Kernel, family rules.Family, after string, mayBeOpaque bool) (count, opaque int) {
	t.Helper()
	saved := k.save(t, family)
	withoutPrograms(t, k, family, func() {
		got, err := k.Read(t.Context(), family)
		if err != nil {
			t.Fatalf("after %s: %v", after, err)
		}
		for name, table := range got.Tables {
			for _, c := range table.Chains {
				for i, r := range c.Rules {
					count++
					if reason, is := r.Opaque(); is {
						if t.Logf("%s: opaque: %s", after, r.Label()); !mayBeOpaque || !r.HasBytes() {
							t.Errorf("after %s: a rule of %s is opaque: %s", after, c.Name, reason)
						}
						opaque++
						if printed := saved[name].Chain(c.Name); printed != nil && i < len(printed.Rules) && (printed.Rules[i].Target == r.Target || r.Target == "CT") {
							printed.Rules[i] = r
						}
					}
				}
			}
		}
		// Rules are equal by their meaning: 1.8.7 prints more blanks, and --to 65535 of a string.
		if diff := cmp.Diff(describe(saved, nil), describe(got.Tables, got.Unreadable)); diff != "" {
			t.Fatalf("after %s (-saved +read):\n%s", after, diff)
		}
		if now := mustProbe(t, k, family).Digest; now != got.Digest {
			t.Errorf("after %s: the digest is %#x, a probe's %#x", after, got.Digest, now)
		}
	})
	return count, opaque
}

// saveLegacy returns everything as text. After a restore into tables that already
// have rules, every chain begins elsewhere.
func saveLegacy(t *testing.T, family rules.Family) string {
	t.Helper()
	return nstest.Command(t, program(Legacy, family, "-save"))
}

func withoutCounters(saved string) []string {
	return slices.DeleteFunc(strings.Split(saved, "\n"), func(line string) bool { return strings.HasPrefix(line, "#") })
}

// The rules of all clusters of the corpus are read in iptables' words. No program
// runs for it at first, after a flush, and at other places of the table.
func TestLegacyCorpusIsReadWithoutExecutingAnything(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		k := openKernel(t, Config{Backend: Legacy})
		known, opaque := 0, 0
		for file, text := range corpus(t) {
			_, _ = tryTool(t, text, "iptables-legacy-restore")
			saved := saveLegacy(t, rules.IPv4)
			n, odd := wantAsPrinted(t, k, rules.IPv4, file, true)
			known, opaque = known+n, opaque+odd
			nstest.CommandInput(t, "*nat\n:AAA - [0:0]\n-A AAA -m comment --comment canaryd-canary:0123\nCOMMIT\n*filter\nCOMMIT\n", "iptables-legacy-restore")
			wantAsPrinted(t, k, rules.IPv4, file+" and a flush", true)
			nstest.CommandInput(t, saved, "iptables-legacy-restore", "--noflush")
			wantAsPrinted(t, k, rules.IPv4, file+", a flush and a restore", true)
		}
		t.Logf("%d rules, %d of them opaque", known, opaque)
		if known < 500 || opaque > 0 {
			t.Errorf("of %d rules %d were opaque", known, opaque)
		}
	})
}

// The same for random rules in every table, of both families.
func TestLegacyRandomRulesAreReadWithoutExecutingAnything(t *testing.T) {
	seed := directSeed(t)
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		t.Logf("CANARYD_SEED=%d", seed)
		restore := program(Legacy, family, "-restore")
		draws, loaded, opaque := testkit.Size(20, 50), 0, 0
		for i, table := range protect.Tables() {
			r := rand.New(rand.NewPCG(seed, uint64(family)<<8|uint64(i)))
			nstest.CommandInput(t, "*"+string(table)+"\n:X - [0:0]\n:Y - [0:0]\n:Z - [0:0]\n-A Y -g Z\nCOMMIT\n", restore, "--noflush")
			var drawn []string
			for range draws {
				drawn = append(drawn, "-A X "+randrules.Draw(r, family, table).Spell(r)+"\n")
			}
			restoreEach(t, restore, table, drawn)
			wantAsPrinted(t, k, family, "rules of "+string(table), true)
			saved := saveLegacy(t, family)
			nstest.CommandInput(t, "*"+string(table)+"\n:AAA - [0:0]\nCOMMIT\n", restore)
			wantAsPrinted(t, k, family, "a flush of "+string(table), true)
			nstest.CommandInput(t, saved, restore)
			_, odd := wantAsPrinted(t, k, family, "a restore of "+string(table), true)
			loaded += strings.Count(saved, "\n-A X ")
			opaque += odd
		}
		t.Logf("%d rules, %d of them opaque", loaded, opaque)
		if loaded < 2*draws || opaque > loaded*2/3 {
			t.Errorf("of %d rules %d were opaque", loaded, opaque)
		}
	})
}

// iptables does not always make the same bytes of a rule and of its saved text.
// That difference alone does not count as a change.
func TestLegacyKnowsARecentThatWasSaved(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		rule := "X -m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap -j ACCEPT"
		iptablesCommand(t, Legacy, family, "-t nat -N X")
		iptablesCommand(t, Legacy, family, "-t nat -A "+rule)
		before, first := mustProbe(t, k, family).Digest, mustRead(t, k, family).Tables[rules.Nat].Rules("X")
		nstest.CommandInput(t, saveLegacy(t, family), program(Legacy, family, "-restore"))
		if now := mustProbe(t, k, family).Digest; now != before {
			t.Errorf("the digest was %#x and is %#x", before, now)
		}
		wantAsPrinted(t, k, family, "a restore of the saved text", false)
		iptablesCommand(t, Legacy, family, "-t nat -R X 1"+rule[1:]+" "+
			map[rules.Family]string{rules.IPv4: "--mask 255.255.255.0", rules.IPv6: "--mask ffff:ffff::"}[family])
		if now := mustRead(t, k, family).Tables[rules.Nat].Rules("X"); rules.EqualRules(first, now) {
			t.Errorf("with another mask it is the same rule: %v", now)
		}
	})
}

// A rule has its ipset's name. The number by which the kernel names the set may
// belong to another set later.
func TestLegacySetsAreAskedForEachTime(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		nstest.NeedProgram(t, "ipset")
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		iptablesCommand(t, Legacy, family, "-t nat -N X")
		for _, name := range []string{"one", "two"} { // the second gets the number of the first
			rule := "-m set --match-set " + name + " src -j ACCEPT"
			nstest.Command(t, "ipset", "create", name, "hash:ip", "family", inet)
			iptablesCommand(t, Legacy, family, "-t nat -A X "+rule)
			wantAsPrinted(t, k, family, rule, false)
			iptablesCommand(t, Legacy, family, "-t nat -F X")
			nstest.Command(t, "ipset", "destroy", name)
		}
	})
}

// Rules that an older canaryd stored as bytes of an entry are read again as this
// version reads them.
func TestOlderEntriesAreReread(t *testing.T) {
	onLegacy(t, func(t *testing.T, k *Kernel, family rules.Family) {
		for _, line := range []string{"-N MINE", "-N GOAL", "-A MINE -p tcp -m quota --quota 7 -j GOAL", "-A MINE -p tcp -m limit --limit 5/min -j ACCEPT", "-A MINE -m quota --quota 8", "-A MINE -m quota --quota 9 -j LOG"} {
			iptablesCommand(t, Legacy, family, line)
		}
		list := mustRead(t, k, family).Tables[rules.Filter].Rules("MINE")
		goals := []string{"GOAL", "ACCEPT", "", "LOG"}
		socket := k.reader.(xtReader).sockets[family]
		at := 0
		err := socket.entries(rules.Filter, func(info xtInfo, data []byte) error {
			here := ""
			return walkEntries(family, info, data, xtVisitor{
				chain: func(name string, _ int) { here = name },
				rule: func(r xtRule) {
					if here != "MINE" {
						return
					}
					whole := r.entry.whole
					if r.entry.isStandard {
						whole = whole[:len(whole)-xtStandardLen+xtExtDataAt]
					}
					older := rules.OpaqueBytes(whole, []byte(goals[at]), goals[at], "as an older canaryd says")
					if now := Reread(family, older); now != list[at] {
						t.Errorf("%q is reread as %q", list[at].Label(), now.Label())
					}
					at++
				},
			})
		})
		if err != nil || at != len(goals) {
			t.Errorf("%d rules, %v", at, err)
		}
	})
}
