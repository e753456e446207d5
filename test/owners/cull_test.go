package owners

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestBadLinesAreFoundOnTheKernel: rules that the kernel refuses for a reason that
// nobody looks for (here a set, with nobody to look) are left out, and 2,000
// others go in.
func TestBadLinesAreFoundOnTheKernel(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		const many = 2000
		bad := map[int]bool{3: true, 1500: true}
		text := "*filter\n:KUBE-FORWARD - [0:0]\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A FORWARD -j KUBE-FORWARD\n"
		var held []string
		for i := range many {
			spec := fmt.Sprintf("-s 10.1.%d.%d/32 -j DROP", i/256, i%256)
			if bad[i] {
				spec = fmt.Sprintf("-s 10.1.%d.%d/32 -m set --match-set gone src -j DROP", i/256, i%256)
				held = append(held, spec)
			}
			text += "-A KUBE-FORWARD " + spec + "\n"
		}
		n.Must(exec.CommandContext(n.Context(), "ipset", "create", "gone", "hash:ip").Run())
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text+"COMMIT\n"))

		kernel, err := iptables.Open(n.Context(), iptables.Config{Backend: n.Programs.With, Families: []rules.Family{rules.IPv4}})
		n.Must(err)
		n.Cleanup(func() { n.Must(kernel.Close()) })
		replayer := reload.Replayer{Kernel: kernel, Canary: canary.DefaultChain, Protects: n.Protects}
		job := reload.Job{Families: kernel.Families(), Generation: rules.Generation{}}
		take := func(result reload.Result, err error, want reload.Outcome) reload.FamilyResult {
			n.Helper()
			n.Must(err)
			fr := result[rules.IPv4]
			if fr.Outcome != want {
				n.Fatalf("it is %s, want %s: %v", fr.Outcome, want, fr.Err)
			}
			for table, tr := range fr.Tables {
				job.Marks = job.Marks.With(rules.IPv4, table, tr.Mark)
				if tr.Replayed {
					job.Quarantine = job.Quarantine.With(rules.IPv4, table, tr.Quarantined)
				}
			}
			return fr
		}
		planted, err := replayer.Plant(n.Context(), job)
		fr := take(planted, err, reload.Proved)
		for table, tr := range fr.Tables {
			job.Generation = job.Generation.With(rules.IPv4, table, tr.Section)
		}
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
		n.Must(exec.CommandContext(n.Context(), "ipset", "destroy", "gone").Run())
		healed, err := replayer.Heal(n.Context(), job)
		fr = take(healed, err, reload.Partial)
		var got []string
		for _, h := range job.Quarantine[rules.IPv4][rules.Filter] {
			got = append(got, h.Rule.Spec)
		}
		if d := cmp.Diff(held, got); d != "" {
			n.Errorf("held back (-want +got):\n%s", d)
		}
		saved, err := n.Programs.Save(n.Context(), rules.IPv4)
		n.Must(err)
		if count := strings.Count(saved, "-A KUBE-FORWARD "); count != many-len(bad) || strings.Contains(saved, "TRIAL") {
			n.Errorf("%d rules of %d are back, and a chain of trials: %t", count, many, strings.Contains(saved, "TRIAL"))
		}
		n.Logf("found in %s: %v", fr.Took, fr.Err)

		n.Must(exec.CommandContext(n.Context(), "ipset", "create", "gone", "hash:ip").Run())
		returned, err := replayer.Readmit(n.Context(), job)
		take(returned, err, reload.Proved)
		if saved, err = n.Programs.Save(n.Context(), rules.IPv4); err != nil || strings.Count(saved, "-A KUBE-FORWARD ") != many {
			n.Errorf("they did not come back: %v", err)
		}
	})
}
