package iptables_test

import (
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

// On legacy a flush may come before the first read under the lock tries the text of a new rule. The
// rule comes back by its bytes then, and the replay is proved. Its text is tried later.
func TestARuleThatIsFlushedBeforeItsTrial(t *testing.T) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				run := func(args ...string) {
					nstest.Command(t, iptables.Program(iptables.Legacy, family, ""), append([]string{"-w", "5"}, args...)...)
				}
				k := iptables.OpenKernel(t, iptables.Config{Backend: iptables.Legacy, Families: []rules.Family{family}, Trials: true})
				selector, err := protect.NewSelector([]string{"MINE"})
				if err != nil {
					t.Fatal(err)
				}
				protection := selector.Protection()
				replayer := reload.Replayer{Kernel: k, Canary: canary.DefaultChain, Protection: protection}
				job := reload.Job{Families: []rules.Family{family}}
				planted, err := replayer.Plant(t.Context(), job)
				if err != nil {
					t.Fatal(err)
				}
				for name, table := range planted[family].Tables {
					job.Marks = job.Marks.With(family.Table(name), table.Mark)
				}
				run("-N", "MINE")
				run("-N", "OTHER")
				run("-A", "MINE", "-p", "tcp", "-j", "RETURN")
				run("-A", "MINE", "-m", "limit", "--limit", "5/min", "-j", "ACCEPT")
				run("-A", "MINE", "-m", "quota", "--quota", "7", "-j", "DROP")
				run("-A", "MINE", "-m", "limit", "--limit", "6/min", "-j", "OTHER")
				run("-A", "MINE", "-j", "DROP")
				seen, err := k.Read(t.Context(), family)
				if err != nil {
					t.Fatal(err)
				}
				job.Generation = rules.Generation{}.With(family.Table(rules.Filter), protection.Extract(seen.Tables[rules.Filter], canary.IsMark))
				learned, _ := job.Generation[family.Table(rules.Filter)].Chain("MINE")
				if reason, opaque := learned.Rules[1].Opaque(); !opaque || !strings.Contains(reason, "not tried yet") {
					t.Fatalf("the rule was tried already: %q", learned.Rules[1].Spec)
				}
				before := iptables.RuleBytes(t, iptables.Legacy, family, seen.Tables)

				run("-F")
				// Another owner writes one of the same bytes: its text is tried before the write.
				run("-A", "OTHER", "-m", "limit", "--limit", "5/min", "-j", "ACCEPT")
				result, err := replayer.Heal(t.Context(), job)
				if err != nil || result[family].Outcome != reload.Proved {
					t.Errorf("the replay is %s: %v, %v", result[family].Outcome, result[family].Err, err)
				}
				for name, table := range result[family].Tables {
					job.Marks = job.Marks.With(family.Table(name), table.Mark)
					for _, h := range table.Quarantined {
						t.Errorf("in quarantine: %s %s: %s", h.Chain, h.Rule.Label(), h.Reason)
					}
				}
				place := iptables.Place{Table: rules.Filter, Chain: "MINE"}
				if diff := cmp.Diff(before[place], iptables.RuleBytes(t, iptables.Legacy, family, seen.Tables)[place]); diff != "" {
					t.Errorf("MINE (-before +now):\n%s", diff)
				}

				session, err := k.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				later, err := session.Read(t.Context(), family)
				if err != nil {
					t.Fatal(err)
				}
				if err := session.Close(); err != nil {
					t.Fatal(err)
				}
				if r := later.Tables[rules.Filter].Chain("MINE").Rules[1]; r.Spec != "-m limit --limit 5/min -j ACCEPT" {
					t.Errorf("the text of the next read under the lock is %q", r.Spec)
				}
			})
		})
	}
}
