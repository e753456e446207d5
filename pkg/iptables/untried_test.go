package iptables_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// On legacy a flush may precede the first read under the lock, which tries the
// text of a new rule. Then the rule comes back by its bytes, and the replay is
// proved. Its text is tried later.
func TestARuleThatIsFlushedBeforeItsTrial(t *testing.T) {
	onUntried(t, []string{
		"-N MINE",
		"-N OTHER",
		"-A MINE -p tcp -j RETURN",
		"-A MINE -m limit --limit 5/min -j ACCEPT",
		"-A MINE -m quota --quota 7 -j DROP",
		"-A MINE -m limit --limit 6/min -j OTHER",
		"-A MINE -j DROP",
	}, func(n *untriedNode) {
		place := iptables.Place{Table: rules.Filter, Chain: "MINE"}
		before := n.bytes()
		n.run("-F")
		// Another owner writes a rule of the same bytes: its text is tried before
		// the write.
		n.run("-A OTHER -m limit --limit 5/min -j ACCEPT")
		n.heal()
		if diff := cmp.Diff(before[place], n.bytes()[place]); diff != "" {
			n.Errorf("MINE (-before +now):\n%s", diff)
		}
		session, err := n.kernel.Begin(n.Context())
		if err != nil {
			n.Fatal(err)
		}
		later, err := session.Read(n.Context(), n.family)
		if err != nil {
			n.Fatal(err)
		}
		if err := session.Close(); err != nil {
			n.Fatal(err)
		}
		if r := later.Tables[rules.Filter].Chain("MINE").Rules[1]; r.Spec != "-m limit --limit 5/min -j ACCEPT" {
			n.Errorf("the text of the next read under the lock is %q", r.Spec)
		}
	})
}

// canaryd learned two jumps without a text. Their owner puts back one of them
// before canaryd does. The read under the lock finds the text of that jump, which
// says nothing about the other.
func TestAnOwnerPutsBackOneOfTwoUntriedJumps(t *testing.T) {
	onUntried(t, []string{
		"-N MINE",
		"-A MINE -m limit --limit 5/min -j ACCEPT",
		"-A INPUT -m limit --limit 9/min -j MINE",
		"-A INPUT -m limit --limit 8/min -j MINE",
	}, func(n *untriedNode) {
		n.run("-F")
		n.run("-A INPUT -m limit --limit 8/min -j MINE")
		n.heal()
		var jumps []string
		for _, line := range strings.Split(n.run("-S INPUT"), "\n") {
			if strings.HasSuffix(line, "-j MINE") {
				jumps = append(jumps, line)
			}
		}
		slices.Sort(jumps)
		want := []string{"-A INPUT -m limit --limit 8/min -j MINE", "-A INPUT -m limit --limit 9/min -j MINE"}
		if diff := cmp.Diff(want, jumps); diff != "" {
			n.Errorf("the jumps of INPUT (-want +got):\n%s", diff)
		}
	})
}

// An untriedNode has rules of MINE that were learned before their texts were tried.
type untriedNode struct {
	*testing.T
	family   rules.Family
	kernel   *iptables.Kernel
	replayer reload.Replayer
	job      reload.Job
	learned  rules.Ruleset
}

// onUntried runs a test on a node with these rules, for each family.
func onUntried(t *testing.T, commands []string, test func(*untriedNode)) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				n := &untriedNode{T: t, family: family, job: reload.Job{Families: []rules.Family{family}}}
				n.kernel = iptables.OpenKernel(t, iptables.Config{Backend: iptables.Legacy, Families: n.job.Families, Trials: true})
				selector, err := protect.NewSelector([]string{"MINE"})
				if err != nil {
					t.Fatal(err)
				}
				protection := selector.Protection()
				n.replayer = reload.Replayer{Kernel: n.kernel, Canary: canary.DefaultChain, Protection: protection}
				planted, err := n.replayer.Plant(t.Context(), n.job)
				if err != nil {
					t.Fatal(err)
				}
				for name, table := range planted[family].Tables {
					n.job.Marks = n.job.Marks.With(family.Table(name), table.Mark)
				}
				for _, command := range commands {
					n.run(command)
				}
				seen, err := n.kernel.Read(t.Context(), family)
				if err != nil {
					t.Fatal(err)
				}
				n.learned = seen.Tables
				section := protection.Extract(seen.Tables[rules.Filter], canary.IsMark)
				n.job.Generation = rules.Generation{}.With(family.Table(rules.Filter), section)
				if !slices.ContainsFunc(section.Opaque(rules.Section{}, nil), func(r rules.TextlessRule) bool {
					reason, _ := r.Rule.Opaque()
					return strings.Contains(reason, "not tried yet")
				}) {
					t.Fatal("the texts of all rules are known already")
				}
				test(n)
			})
		})
	}
}

// run executes a command of iptables-legacy, and returns its output.
func (n *untriedNode) run(command string) string {
	n.Helper()
	return nstest.Command(n.T, iptables.Program(iptables.Legacy, n.family, ""), append([]string{"-w", "5"}, strings.Fields(command)...)...)
}

// bytes returns the bytes of the rules by chain.
func (n *untriedNode) bytes() map[iptables.Place][]string {
	return iptables.RuleBytes(n.T, iptables.Legacy, n.family, n.learned)
}

// heal replays the rules and expects that all of them are proved.
func (n *untriedNode) heal() {
	n.Helper()
	result, err := n.replayer.Heal(n.Context(), n.job)
	if err != nil || result[n.family].Outcome != reload.Proved {
		n.Errorf("the replay is %s: %v, %v", result[n.family].Outcome, result[n.family].Err, err)
	}
	for name, table := range result[n.family].Tables {
		n.job.Marks = n.job.Marks.With(n.family.Table(name), table.Mark)
		for _, h := range table.Quarantined {
			n.Errorf("in quarantine: %s %s: %s", h.Chain, h.Rule.Label(), h.Reason)
		}
	}
}
