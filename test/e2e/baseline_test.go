package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// poison is a rule that another process writes into a chain of kube-proxy's.
const poison = "-A KUBE-FORWARD -s 203.0.113.7/32 -m comment --comment SECRET -j ACCEPT"

// sinceBaseline is what canaryd baseline -o json prints.
type sinceBaseline struct {
	Baseline *struct {
		Generation    string
		AppearedRules int
		Error         string
	}
	Changes []struct {
		Chain    string
		Appeared int
		Rules    []string
	}
}

func askBaseline(n *nodetest.Node, code int, flags ...string) sinceBaseline {
	n.Helper()
	stdout, _ := n.Want(code, "baseline", append([]string{"-o", "json"}, flags...)...)
	var s sinceBaseline
	n.Must(json.Unmarshal([]byte(stdout), &s))
	return s
}

// TestPoisonedGeneration: a rule that another process wrote into a protected chain is learned, and
// put back after a flush. It came after the baseline: status, record, and the preview of a
// restore say so, also after a restart and without a daemon.
func TestPoisonedGeneration(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		if b := askBaseline(n, 0).Baseline; b != nil {
			n.Errorf("without one: %+v", b)
		}
		n.Want(0, "baseline", "--confirm")
		clean := askBaseline(n, 0)
		if clean.Baseline == nil || clean.Baseline.Generation != n.Status().Generation.ID || len(clean.Changes) != 0 {
			n.Errorf("confirmed: %+v", clean)
		}
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*filter\n"+poison+"\nCOMMIT\n"))
		learned := ""
		n.Until("what was written to be learned and on disk", func() error {
			code, _, _ := n.Canaryd("baseline")
			if learned = n.Status().Generation.ID; code != 1 || !slices.Contains(n.Stored(), learned) {
				return fmt.Errorf("canaryd baseline exits with %d, %s is not among %q", code, learned, n.Stored())
			}
			return nil
		})
		shows := func(when string) {
			n.Helper()
			s := askBaseline(n, 1)
			if s.Baseline.AppearedRules != 1 || len(s.Changes) != 1 || s.Changes[0].Chain != "KUBE-FORWARD" || len(s.Changes[0].Rules) != 1 || s.Changes[0].Rules[0] != poison {
				n.Errorf("%s: %+v", when, s)
			}
			for command, code := range map[string]int{"baseline": 1, "status": 0} {
				stdout, _ := n.Want(code, command)
				if !strings.Contains(stdout, "generation "+clean.Baseline.Generation) || !strings.Contains(stdout, "1 rule appeared since in 1 chain") {
					n.Errorf("%s: canaryd %s says:\n%s", when, command, stdout)
				}
			}
			if stdout, _ := n.Want(1, "baseline"); !strings.Contains(stdout, "\n+"+poison+"\n") {
				n.Errorf("%s: canaryd baseline shows:\n%s", when, stdout)
			}
		}
		shows("learned")
		records := 0
		flushed := func(when string) {
			n.Helper()
			n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
			records++
			n.Healed(records)
			if text, err := n.Programs.Save(n.Context(), rules.IPv4); err != nil || !strings.Contains(text, poison) {
				n.Errorf("%s: what was learned is not put back: %v", when, err)
			}
			stdout, _ := n.Want(0, "status", "--flush=1")
			if !strings.Contains(stdout, "of these, 1 rule is not in the baseline that was confirmed at ") || !strings.Contains(stdout, ": ipv4 filter KUBE-FORWARD 1\n") {
				n.Errorf("%s: the record says:\n%s", when, stdout)
			}
			for _, path := range []string{"/api/v1/status", "/", "/metrics"} {
				if text := n.Get(path); strings.Contains(text, "203.0.113.7") || strings.Contains(text, "SECRET") {
					n.Errorf("%s: %s shows the rule:\n%s", when, path, text)
				}
			}
		}
		flushed("a flush")

		d.Stop()
		marked := func(when string) {
			n.Helper()
			stdout, _ := n.Want(0, "restore", "--dry-run", "--generation="+learned)
			if !strings.Contains(stdout, "NOT IN THE BASELINE") || strings.Count(stdout, "not in the baseline: +") != 1 || !strings.Contains(stdout, "\nnot in the baseline: +"+poison+"\n") {
				n.Errorf("%s: the preview shows:\n%s", when, stdout)
			}
		}
		spare := strings.Replace(poison, "-A ", "-D ", 1)
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*filter\n"+spare+"\nCOMMIT\n"))
		marked("without a daemon")
		d = n.Start()
		records = 0
		n.Until("the deletion to be learned", func() error {
			if code, stdout, _ := n.Canaryd("baseline"); code != 0 {
				return fmt.Errorf("exit code %d:\n%s", code, stdout)
			}
			return nil
		})
		marked("through the daemon")
		n.Want(0, "restore", "--generation="+learned)
		shows("restored after a restart")
		n.Must(scenario.Wipe(n.Context(), n.Programs, rules.IPv4))
		records++
		n.Healed(records)
		shows("after a wipe")

		if stdout, _ := n.Want(0, "baseline", "--confirm", "--generation="+n.Status().Generation.ID); !strings.Contains(stdout, "takes the place of") {
			n.Errorf("confirmed again:\n%s", stdout)
		}
		n.Want(0, "baseline")
		n.Want(0, "baseline", "--forget")
		if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "baseline") {
			n.Errorf("status after it was forgotten:\n%s", stdout)
		}
		n.Want(2, "baseline", "--confirm", "--generation=0123456789ab")
		n.Want(2, "baseline", "--confirm", "--forget")
		n.Want(2, "baseline", "--generation="+learned)
		d.Stop()
		n.Want(2, "baseline")
	})
}
