package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// keepers returns the lines of `nft list tables` that name a keeper's table.
func keepers(n *nodetest.Node) string {
	n.Helper()
	var found []string
	for line := range strings.Lines(nstest.Command(n.T, "nft", "list", "tables")) {
		if strings.Contains(line, iptables.KeeperTable) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	slices.Sort(found)
	return strings.Join(found, ", ")
}

const bothKeepers = "table ip canaryd-keeper, table ip6 canaryd-keeper"

func wantKeepers(n *nodetest.Node, want string) {
	n.Helper()
	n.Until(fmt.Sprintf("the tables %q", want), func() error {
		if got := keepers(n); got != want {
			return errors.New(got)
		}
		return nil
	})
}

// wantKeeperState waits for a line of `canaryd status`, and for the gauge of IPv4.
func wantKeeperState(n *nodetest.Node, line, state string) {
	n.Helper()
	n.Until("the keeper to be "+state, func() error {
		_, stdout, _ := n.Canaryd("status")
		if !strings.Contains(stdout, line) {
			return errors.New(stdout)
		}
		for _, s := range []string{"kept", "idle", "unavailable", "off"} {
			value := n.Metrics()[fmt.Sprintf("keeper{family=%q,state=%q}", "ipv4", s)]
			if (value == 1) != (s == state) {
				return fmt.Errorf("canaryd_keeper of state %s is %v", s, value)
			}
		}
		return nil
	})
}

// TestKeeperComesAndGoes: the keeper lives as long as canaryd's process, however
// that ends, and needs rules that translate. No flusher can delete it, but
// cleanup does.
func TestKeeperComesAndGoes(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		wantKeepers(n, bothKeepers)
		wantKeeperState(n, "\nkeeper ipv4 kept, ipv6 kept\n", "kept")
		nstest.Command(n.T, "nft", "flush", "ruleset")
		wantKeepers(n, bothKeepers)
		if n.Programs.With == iptables.NFT {
			n.Healed(1)
		}
		for range 3 {
			d.Kill()
			wantKeepers(n, "")
			d = n.Start()
			wantKeepers(n, bothKeepers)
		}
		d.Stop()
		wantKeepers(n, "")
		d = n.Start()
		wantKeepers(n, bothKeepers)
		if log := d.Log(); strings.Contains(log, "may break established connections") {
			n.Errorf("after a restart the log complains:\n%s", log)
		}
		n.Want(0, "cleanup")
		wantKeepers(n, "")
		wantKeeperState(n, "\nkeeper ipv4 off, ipv6 off\n", "off")
		d.Stop()
	})
}

// TestKeeperIsNobodysRule: detect and iptables' programs must not see it.
func TestKeeperIsNobodysRule(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		detect := func() string {
			n.Helper()
			stdout, _ := n.Want(0, "detect")
			return stdout
		}
		render := func() string {
			n.Helper()
			stdout, _ := n.Want(0, "render", "--ip-family=ipv4")
			return stdout
		}
		before := detect()
		d := n.Start("--keeper=off")
		wantKeeperState(n, "\nkeeper ipv4 off, ipv6 off\n", "off")
		wantKeepers(n, "")
		rendered := render()
		n.Same("detect next to a daemon", strings.Split(before, "\n"), strings.Split(detect(), "\n"))
		d.Stop()
		n.Start()
		wantKeepers(n, bothKeepers)
		n.Same("detect next to a keeper", strings.Split(before, "\n"), strings.Split(detect(), "\n"))
		if got := render(); got != rendered {
			n.Errorf("render prints otherwise next to a keeper:\n%s\nbefore:\n%s", got, rendered)
		}
		metrics := n.Metrics()
		if metrics["mixed_backends{}"] != 0 || metrics["backend_mismatch{}"] != 0 || nodetest.Sum(metrics, "flush_events_total") != 0 {
			n.Errorf("mixed %v, mismatch %v", metrics["mixed_backends{}"], metrics["backend_mismatch{}"])
		}
		wantNoWarnings(n)
		n.Healed(1)
		for _, r := range n.Status().Flushes {
			if strings.Contains(r.Culprit.Comm, "canaryd") {
				n.Errorf("a record blames canaryd: %+v", r)
			}
		}
		wantKeepers(n, bothKeepers)
	})
}

// wantNoWarnings runs people's commands for both families, and fails if one fails or warns.
func wantNoWarnings(n *nodetest.Node) {
	n.Helper()
	for _, program := range []string{"iptables-", "ip6tables-"} {
		program += string(n.Programs.With)
		for _, line := range []string{"-save", " -S", " -t nat -S", " -t nat -L -n", " -t nat -F"} {
			words := strings.Fields(program + line)
			if code, _, stderr := n.Exec(exec.CommandContext(n.Context(), words[0], words[1:]...)); code != 0 || stderr != "" {
				n.Errorf("%s: exit code %d, %s", program+line, code, stderr)
			}
		}
	}
}
