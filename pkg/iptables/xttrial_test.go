package iptables

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// twins are matches that iptables-legacy 1.8.9 prints in the same words. The
// first never matches; the second matches as the words say.
var twins = []struct{ never, always string }{
	{"! -i +", ""},
	{"! -o +", ""},
	{"-p tcp -m tcp ! --sport :", "-p tcp -m tcp"},
	{"-p tcp -m tcp ! --dport 0:65535", "-p tcp -m tcp"},
	{"-p udp -m udp ! --sport :", "-p udp -m udp"},
	{"-p udp -m udp ! --dport 0:65535", "-p udp -m udp"},
	{"-p esp -m esp ! --espspi :", "-p esp -m esp"},
	{"-p ah -m ah ! --ahspi :", "-p ah -m ah"},
	{"-p ipcomp -m ipcomp ! --ipcompspi :", "-p ipcomp -m ipcomp"},
	{"-p mh -m mh ! --mh-type :", "-p mh -m mh"},
	{"-m rt ! --rt-segsleft :", "-m rt"},
	{"-m frag ! --fragid :", "-m frag"},
}

// onTrials runs body on legacy for each family, with a Kernel that tries texts.
func onTrials(t *testing.T, body func(t *testing.T, k *Kernel, family rules.Family)) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, program(Legacy, family, ""))
				body(t, openKernel(t, Config{Backend: Legacy, Families: []rules.Family{family}, Trials: true}), family)
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

// Two rules have the same printed text. The rule that the text does not describe
// is opaque as soon as a Session has read it, and before. The other rule keeps
// the text, whichever of the two was first. 1.8.11 prints each in words of its
// own, and both keep their text.
func TestATextOfAnotherRuleIsNotTheRules(t *testing.T) {
	onTrials(t, func(t *testing.T, k *Kernel, family rules.Family) {
		taken := 0
		for _, c := range twins {
			for _, order := range [][2]string{{c.never, c.always}, {c.always, c.never}} {
				iptablesCommand(t, Legacy, family, "-N MINE")
				if !addOdd(t, Legacy, family, "MINE", append(strings.Fields(order[0]), "-j", "ACCEPT")) {
					iptablesCommand(t, Legacy, family, "-X MINE")
					continue
				}
				guarded(t, k, family)
				iptablesCommand(t, Legacy, family, "-A MINE "+order[1]+" -j ACCEPT")
				saved := saveLegacy(t, family)
				never := slices.Index(order[:], c.never)
				printed := strings.Split(saved[strings.Index(saved, "-A MINE "):], "\n")[never]
				misled := !strings.Contains(printed, "!") // as each of these rules was written
				digest := mustProbe(t, k, family).Digest
				for _, read := range []func() Snapshot{
					func() Snapshot { return mustRead(t, k, family) }, func() Snapshot { return guarded(t, k, family) },
					func() Snapshot { return mustRead(t, k, family) }, func() Snapshot { return guarded(t, k, family) },
				} {
					list := read().Tables[rules.Filter].Chain("MINE").Rules
					for i, r := range list {
						if _, opaque := r.Opaque(); order[i] == c.never && !opaque && misled {
							t.Errorf("%s %s is taken for %q", family, order[i], r.Spec)
						}
						if r.Target != "ACCEPT" {
							t.Errorf("%s %s goes to %q", family, order[i], r.Target)
						}
					}
				}
				list := guarded(t, k, family).Tables[rules.Filter].Chain("MINE").Rules
				switch reason, opaque := list[never].Opaque(); {
				case misled && (!opaque || reason != saysAnother):
					t.Errorf("%s is %q", c.never, list[never].Spec)
				case !misled && "-A MINE "+list[never].Spec != printed:
					t.Errorf("%s is %q, and iptables prints %q", c.never, list[never].Spec, printed)
				}
				if _, opaque := list[1-never].Opaque(); opaque {
					t.Errorf("%q is %q", c.always, list[1-never].Spec)
				}
				if now := mustProbe(t, k, family).Digest; now != digest {
					t.Errorf("%s: the trial changed the tables", c.never)
				}
				if diff := cmp.Diff(withoutCounters(saved), withoutCounters(saveLegacy(t, family))); diff != "" {
					t.Errorf("%s: the trial changed the tables (-before +now):\n%s", c.never, diff)
				}
				withoutSave(t, k, family, func() { mustRead(t, k, family) })
				iptablesCommand(t, Legacy, family, "-F MINE")
				iptablesCommand(t, Legacy, family, "-X MINE")
				taken++
			}
		}
		if taken < 12 {
			t.Errorf("only %d of %d rules are taken here", taken, 2*len(twins))
		}
	})
}

func withoutCounters(saved string) []string {
	return slices.DeleteFunc(strings.Split(saved, "\n"), func(line string) bool { return strings.HasPrefix(line, "#") })
}

// After a restore canaryd compares the kernel's rules by their bytes, even if the
// words are the same. So the proof of a replay sees another rule.
func TestAProofComparesBytes(t *testing.T) {
	onTrials(t, func(t *testing.T, k *Kernel, family rules.Family) {
		iptablesCommand(t, Legacy, family, "-N MINE")
		iptablesCommand(t, Legacy, family, "-A MINE -p tcp -m tcp ! --sport : -j ACCEPT")
		s := begin(t, k)
		before := mustRead(t, s, family).Tables[rules.Filter].Chain("MINE").Rules
		text := rules.Rule{Spec: "-p tcp -m tcp -j ACCEPT", Target: "ACCEPT"}
		script := Script{Table: rules.Filter, Declare: []string{"MINE"}, Steps: []Step{{Verb: Append, Chain: "MINE", Rule: text}}}
		if err := s.Restore(t.Context(), Payload{family: {script}})[family].Err; err != nil {
			t.Fatal(err)
		}
		after := mustRead(t, s, family).Tables[rules.Filter].Chain("MINE").Rules
		if rules.EqualRules(before, after) || !rules.EqualRules(after, []rules.Rule{text}) {
			t.Errorf("before %v, after %v", before, after)
		}
	})
}

// A rule that names an ipset is tried by its words, and by its bytes without the
// set's number.
func TestATextWithASetIsTried(t *testing.T) {
	onTrials(t, func(t *testing.T, k *Kernel, family rules.Family) {
		inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
		for _, set := range []string{"one", "two"} {
			nstest.Command(t, "ipset", "create", set, "hash:ip", "family", inet)
			iptablesCommand(t, Legacy, family, "-N MINE-"+set)
			for _, port := range []string{"! --sport :", "--sport :"} {
				iptablesCommand(t, Legacy, family, "-A MINE-"+set+" -p tcp -m tcp "+port+" -m set --match-set "+set+" src -j ACCEPT")
			}
		}
		misled := strings.Count(saveLegacy(t, family), "!") == 0
		for range 2 {
			filter := guarded(t, k, family).Tables[rules.Filter]
			for _, set := range []string{"one", "two"} {
				list := filter.Chain("MINE-" + set).Rules
				never := "-p tcp -m tcp ! --sport 0:65535 -m set --match-set " + set + " src -j ACCEPT"
				if reason, opaque := list[0].Opaque(); misled != (opaque && reason == saysAnother) || !misled && list[0].Spec != never {
					t.Errorf("the rule that never matches is %q, want %q unless it is printed in words of another one", list[0].Spec, never)
				}
				if want := "-p tcp -m tcp -m set --match-set " + set + " src -j ACCEPT"; list[1].Spec != want {
					t.Errorf("the other one is %q, want %q", list[1].Spec, want)
				}
			}
		}
	})
}

// The rules of kube-proxy, kubelet and CNI plugins need no trial: all of them are
// plain, and have their text.
func TestOrdinaryRulesNeedNoTrial(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		k := openKernel(t, Config{Backend: Legacy, Trials: true})
		known := 0
		for file, text := range corpus(t) {
			_, _ = tryTool(t, text, "iptables-legacy-restore")
			for table, seen := range guarded(t, k, rules.IPv4).Tables {
				for _, c := range seen.Chains {
					for _, r := range c.Rules {
						known++
						if reason, opaque := r.Opaque(); opaque {
							t.Errorf("%s: a rule of %s %s is opaque: %s", file, table, c.Name, reason)
						}
					}
				}
			}
		}
		var tried []string
		for _, key := range slices.Sorted(maps.Keys(k.words[rules.IPv4].made)) {
			tried = append(tried, string(key))
		}
		t.Logf("%d rules, %d texts were tried:\n%s", known, len(tried), strings.Join(tried, "\n"))
		for _, text := range tried {
			if strings.Contains(text, "KUBE-") || strings.Contains(text, "CNI-") || strings.Contains(text, "DOCKER") {
				t.Errorf("a trial of %s", text)
			}
		}
	})
}

// The text of kube-proxy's rules with an nfacct match is known at the first read,
// without the lock. A flush may precede the next read under the lock.
func TestAnAccountNeedsNoTrial(t *testing.T) {
	onTrials(t, func(t *testing.T, k *Kernel, family rules.Family) {
		if err := (&Sets{}).Account(t.Context(), "localhost_nps_accepted_pkts"); err != nil {
			t.Fatal(err)
		}
		iptablesCommand(t, Legacy, family, "-N MINE")
		const text = "-p tcp -m comment --comment town/one -m tcp --dport 30001 -m nfacct --nfacct-name localhost_nps_accepted_pkts -j ACCEPT"
		iptablesCommand(t, Legacy, family, "-A MINE "+text)
		got := mustRead(t, k, family).Tables[rules.Filter].Chain("MINE").Rules
		if reason, opaque := got[0].Opaque(); opaque {
			t.Errorf("it is opaque: %s", reason)
		}
		if len(k.words[family].made) > 0 {
			t.Errorf("trials: %v", k.words[family].made)
		}
	})
}
