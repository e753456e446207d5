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

// The kernel refuses the bytes of one rule. On both backends all other rules must
// be back. One of them jumps by its bytes to a chain that was removed.
func TestBytesThatAreRefusedCostThemselves(t *testing.T) {
	iptables.OnBoth(t, func(t *testing.T, backend iptables.Backend, family rules.Family) {
		program := iptables.Program(backend, family, "")
		odd := func(chain string, args ...string) {
			t.Helper()
			nstest.Command(t, program, append([]string{"-w", "5", "-A", chain, "-m", "comment", "--comment", "line\nbreak"}, args...)...)
		}
		for _, line := range []string{"-N P-GOAL", "-A P-GOAL -p udp -j DROP", "-N P-MINE", "-A P-MINE -p tcp -j P-GOAL"} {
			nstest.Command(t, program, append([]string{"-w", "5"}, strings.Fields(line)...)...)
		}
		odd("P-MINE", "-p", "icmp", "-j", "P-GOAL")
		odd("P-MINE", "-p", "udp", "-j", "RETURN")
		nstest.Command(t, program, "-w", "5", "-A", "INPUT", "-j", "P-MINE")

		k := iptables.OpenKernel(t, iptables.Config{Backend: backend, Families: []rules.Family{family}})
		read := func() rules.Ruleset {
			t.Helper()
			session, err := k.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer session.Close()
			snapshot, err := session.Read(t.Context(), family)
			if err != nil {
				t.Fatal(err)
			}
			return snapshot.Tables
		}
		selector, err := protect.NewSelector([]string{"P-*"})
		if err != nil {
			t.Fatal(err)
		}
		section := selector.Protection().Extract(read()[rules.Filter], canary.IsMark)
		at := slices.IndexFunc(section.Chains, func(c rules.Chain) bool { return c.Name == "P-MINE" })
		mine := slices.Clone(section.Chains[at].Rules)
		entry, goal, _, ok := mine[2].Bytes()
		if !ok || !mine[1].HasBytes() {
			t.Fatalf("these have no bytes: %v", mine)
		}
		bad := []byte(strings.Replace(string(entry), "comment", "nosuch!", 1))
		mine[2] = rules.OpaqueBytes(bad, goal, "RETURN", "spoiled")
		section.Chains = slices.Clone(section.Chains)
		section.Chains[at].Rules = mine

		id := family.Table(rules.Filter)
		job := reload.Job{Families: []rules.Family{family}, Generation: rules.Generation{id: section}}
		replayer := reload.Replayer{Kernel: k, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: selector.Protects}}
		result, err := replayer.Plant(t.Context(), job)
		if err != nil {
			t.Fatal(err)
		}
		job.Marks = job.Marks.With(id, result[family].Tables[rules.Filter].Mark)
		nstest.Command(t, program, "-w", "5", "-F")
		nstest.Command(t, program, "-w", "5", "-X")
		result, err = replayer.Heal(t.Context(), job)
		if err != nil {
			t.Fatal(err)
		}
		healed := result[family].Tables[rules.Filter]
		t.Logf("%s: %v", result[family].Outcome, result[family].Err)
		if !healed.Proved || len(healed.Quarantined) != 1 || healed.Quarantined[0].Rule != mine[2] {
			t.Errorf("proved %t, in quarantine: %+v", healed.Proved, healed.Quarantined)
		}
		if diff := cmp.Diff(mine[:2], read()[rules.Filter].Chain("P-MINE").Rules); diff != "" {
			t.Errorf("P-MINE (-want +got):\n%s", diff)
		}
	})
}
