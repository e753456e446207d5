package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTwoFlushers: two programs flush within the settle time, while an owner never rests.
// Each is named for the tables that it took something from, and the owner for none.
func TestTwoFlushers(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		daemonProcess := n.Start()
		ctx, stop := context.WithCancel(n.Context())
		defer stop()
		busy := exec.CommandContext(ctx, "sh", "-c", `while :; do
			printf '*mangle\n:KUBE-SVC-BUSY - [0:0]\n-A KUBE-SVC-BUSY -j RETURN\nCOMMIT\n' | iptables-nft-restore -n
			printf '*nat\n:BUSY - [0:0]\n-A BUSY -j RETURN\nCOMMIT\n' | ip6tables-nft-restore -n
			sleep 0.01
		done`)
		var said strings.Builder
		busy.Stdout, busy.Stderr = &said, &said
		n.Must(busy.Start())
		n.Within(5*time.Second, "the owner writes", func() error {
			if n.Save()[rules.IPv4][rules.Mangle].Chain("KUBE-SVC-BUSY") == nil {
				return fmt.Errorf("it has not written yet: %s", said.String())
			}
			return nil
		})

		flush := exec.CommandContext(n.Context(), "iptables-nft", "-t", "nat", "-F")
		if code, _, stderr := n.Exec(flush); code != 0 {
			n.Fatalf("%s: %s", flush, stderr)
		}
		n.Healed(1)
		wantTakers(n, map[string]string{"ipv4 nat": "iptables-nft"})

		both := exec.CommandContext(n.Context(), "sh", "-c", "iptables-nft -t nat -F; nft flush ruleset")
		if code, _, stderr := n.Exec(both); code != 0 {
			n.Fatalf("%s: %s", both, stderr)
		}
		n.Healed(2)
		stop()
		_ = busy.Wait() // it was killed
		wantTakers(n, map[string]string{
			"ipv4 nat": "iptables-nft nft", "ipv4 filter": "nft", "ipv4 mangle": "nft",
			"ipv6 nat": "nft", "ipv6 filter": "nft", "ipv6 mangle": "nft",
		})
		if text, _ := n.Want(0, "status"); !strings.Contains(text, " iptables-nft, nft ") {
			n.Errorf("the list does not name both:\n%s", text)
		}
		daemonProcess.Stop()
	})
}

// wantTakers fails unless the newest record says who took from which table, by name.
func wantTakers(n *nodetest.Node, want map[string]string) {
	n.Helper()
	record := flushJSON(n, "1").Flush
	got := map[string]string{}
	for _, t := range record.Lost.Tables {
		var names []string
		for _, pid := range t.By {
			i := slices.IndexFunc(record.Culprits, func(c daemon.Culprit) bool { return c.PID == pid })
			if i < 0 {
				n.Fatalf("pid %d is not among the culprits %+v", pid, record.Culprits)
			}
			names = append(names, record.Culprits[i].Comm)
		}
		got[fmt.Sprintf("%s %s", t.Family, t.Table)] = strings.Join(names, " ")
	}
	for table, names := range want {
		if got[table] != names {
			n.Errorf("%s was taken from by %q, want %q; writers: %+v", table, got[table], names, record.Writers)
		}
	}
}
