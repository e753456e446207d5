package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// choice is what the daemon says of its backend.
func choice(n *nodetest.Node) api.Backend {
	n.Helper()
	stdout, _ := n.Want(0, "status", "-o", "json")
	var s api.Status
	n.Must(json.Unmarshal([]byte(stdout), &s))
	return s.Backend
}

// TestAlternativesAreSwitched: kubelet and kube-proxy write to the other
// backend while canaryd runs. It is reported, and the guarded side stays guarded.
// On one backend only: it takes a minute, and what moves the evidence on the
// other one is tested at the kernel (pkg/iptables, TestMoved).
func TestAlternativesAreSwitched(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		ours, other := n.Programs.With, n.Programs.With.Other()
		nstest.NeedProgram(n.T, "iptables-"+string(other), "ip6tables-"+string(other))
		n.Must(scenario.Load(n.Context(), n.Programs, rules.IPv4))
		nstest.Command(n.T, "ip6tables-"+string(ours), "-t", "nat", "-N", "KUBE-SERVICES")
		d := n.Start("--backend=auto")
		if is := choice(n); is.Name != ours || is.Mixed || is.Mismatch {
			n.Errorf("at first: %+v", is)
		}
		// 460 rules on one side: more on the other, and kubelet's hint.
		n.Must(scenario.Load(n.Context(), scenario.Programs{With: other}, rules.Families()...))
		nstest.CommandInput(n.T, "*filter\n"+strings.Repeat("-A OUTPUT -j ACCEPT\n", 500)+"COMMIT\n", "iptables-"+string(other)+"-restore", "--noflush")
		before, moved := tables(n), time.Now()

		n.Within(2*time.Minute, "both backends to be reported", logs(d, "Both backends hold rules"))
		if is := choice(n); !is.Mixed || is.Mismatch {
			n.Errorf("after %s: %+v", time.Since(moved), is)
		}
		n.Within(2*time.Minute, "the mismatch to be reported", logs(d, "The other backend is in use by now"))
		took := time.Since(moved)
		n.Logf("reported after %s", took.Round(time.Second))
		if took < 30*time.Second {
			n.Errorf("reported after %s, want two looks 30 s apart", took)
		}
		d.WantLog("The other backend is in use by now", fmt.Sprintf(`evidence="%s"`, other), "--backend")
		if is := choice(n); is.Name != ours || !is.Mixed || !is.Mismatch || !strings.Contains(is.Reason, string(other)) {
			n.Errorf("then: %+v", is)
		}
		for _, name := range []string{"mixed_backends{}", "backend_mismatch{}"} {
			if got := n.Metrics()[name]; got != 1 {
				n.Errorf("%s is %v, want 1", name, got)
			}
		}
		table, _ := n.Want(0, "status")
		if !strings.Contains(table, "the other backend is in use by now") {
			n.Errorf("status says\n%s", table)
		}
		if after := tables(n); after != before {
			n.Errorf("looking created tables: %s, before %s", after, before)
		}
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Healed(1)
		d.Stop()
	})
}
