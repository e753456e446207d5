package e2e

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
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
	n.Within(nodetest.StartsIn, fmt.Sprintf("the tables %q", want), func() error {
		if got := keepers(n); got != want {
			return errors.New(got)
		}
		return nil
	})
}

// wantKeeperState waits for a line of `canaryd status`, and for the gauge of IPv4.
func wantKeeperState(n *nodetest.Node, line, state string) {
	n.Helper()
	n.Within(nodetest.StartsIn, "the keeper to be "+state, func() error {
		_, stdout, _ := n.Canaryd("status")
		if !strings.Contains(stdout, line) {
			return errors.New(stdout)
		}
		for _, s := range []string{"kept", "idle", "unavailable", "off"} {
			value, there := n.Metrics()[fmt.Sprintf("keeper{family=%q,state=%q}", "ipv4", s)]
			if !there || (value == 1) != (s == state) {
				return fmt.Errorf("canaryd_keeper of state %s is %v (%t)", s, value, there)
			}
		}
		return nil
	})
}

// TestKeeperComesAndGoes: with canaryd's process, however that ends, and with the rules that
// translate; a flusher cannot take it, and cleanup does.
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

// TestKeeperIsNotWanted: by its flag, in observe mode and where nothing translates there is
// no table, also after a while.
func TestKeeperIsNotWanted(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4,
			"*filter\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP\nCOMMIT\n"+
				"*nat\n:KUBE-MARK-MASQ - [0:0]\n-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\nCOMMIT\n"))
		check := func(d *nodetest.Process, line, state string) {
			n.Helper()
			wantKeeperState(n, line, state)
			if got := keepers(n); got != "" {
				n.Errorf("there is %s", got)
			}
			d.Stop()
		}
		check(n.Start(), "\nkeeper ipv4 idle, ipv6 idle\n", "idle")
		n.Load()
		check(n.Start("--keeper=off"), "\nkeeper ipv4 off, ipv6 off\n", "off")
		check(n.Start("--mode=observe"), "\nkeeper ipv4 off, ipv6 off\n", "off")
	})
}

// TestKeeperFollowsTheRules: it comes with the first rule that translates, and goes once it
// is learned that the last one is gone.
func TestKeeperFollowsTheRules(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		masquerade := " KUBE-POSTROUTING -j MASQUERADE\nCOMMIT\n"
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4,
			"*nat\n:KUBE-POSTROUTING - [0:0]\n-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -s 10.0.0.9 -j RETURN\nCOMMIT\n"))
		n.Start()
		wantKeeperState(n, "\nkeeper ipv4 idle, ipv6 idle\n", "idle")
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-A"+masquerade))
		wantKeepers(n, "table ip canaryd-keeper")
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-D"+masquerade))
		wantKeepers(n, "")
		wantKeeperState(n, "\nkeeper ipv4 idle, ipv6 idle\n", "idle")
	})
}

// TestKeeperNameIsTaken: the log has it once, flushes are healed as ever, and the keeper comes
// when the name is free.
func TestKeeperNameIsTaken(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		nstest.Command(n.T, "nft", "add", "table", "ip", iptables.KeeperTable)
		protected := n.Protected()
		d := n.Start()
		wantKeeperState(n, "keeper ipv4 unavailable (another process has a table named canaryd-keeper", "unavailable")
		n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, ""))
		n.Healed(1)
		n.Same("protected rules", protected, n.Protected())
		time.Sleep(3 * time.Second)
		if got := strings.Count(d.Log(), "may break established connections"); got != 1 {
			n.Errorf("the log has it %d times:\n%s", got, d.Log())
		}
		nstest.Command(n.T, "nft", "delete", "table", "ip", iptables.KeeperTable)
		wantKeepers(n, bothKeepers)
		wantKeeperState(n, "\nkeeper ipv4 kept, ipv6 kept\n", "kept")
	})
}

// TestKeeperIsNobodysRule: detect and iptables' programs see nothing of it, and it makes canaryd
// look, read and write no more than without.
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
		rendered := render()
		n.Same("detect next to a daemon", strings.Split(before, "\n"), strings.Split(detect(), "\n"))
		d.Stop()
		n.Start()
		wantKeepers(n, bothKeepers)
		n.Same("detect next to a keeper", strings.Split(before, "\n"), strings.Split(detect(), "\n"))
		if got := render(); got != rendered {
			n.Errorf("render prints otherwise next to a keeper:\n%s\nbefore:\n%s", got, rendered)
		}
		time.Sleep(time.Second) // what the start asked for is done
		hints := nodetest.Sum(n.Metrics(), "hints_total", `source="nft"`)
		time.Sleep(2500 * time.Millisecond)
		metrics := n.Metrics()
		if more := nodetest.Sum(metrics, "hints_total", `source="nft"`) - hints; more != 0 {
			n.Errorf("%v commits on a quiet node", more)
		}
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

// wantNoWarnings runs what people run, of both families, and fails if it fails or warns.
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
