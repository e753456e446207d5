package e2e

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTwoFlushers: two programs flush within the settle time. The record must
// name each for the tables from which it took something.
func TestTwoFlushers(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		process := n.Start("--settle=2s") // a busy machine may take so long to start nft
		both := exec.CommandContext(n.Context(), "sh", "-c", "iptables-nft -t nat -F; nft flush ruleset")
		if code, _, stderr := n.Exec(both); code != 0 {
			n.Fatalf("%s: %s", both, stderr)
		}
		n.Healed(1)
		wantTakers(n, map[string]string{
			"ipv4 nat": "iptables-nft nft", "ipv4 filter": "nft", "ipv4 mangle": "nft",
			"ipv6 nat": "nft", "ipv6 filter": "nft", "ipv6 mangle": "nft",
		})
		if text, _ := n.Want(0, "status"); !strings.Contains(text, " nft, iptables-nft ") {
			n.Errorf("the list does not name both:\n%s", text)
		}
		process.Stop()
	})
}

// TestFlushBesideABusyOwner: an owner never rests. It must not be blamed for the
// flusher's losses, neither in its own tables nor in the flushed table.
func TestFlushBesideABusyOwner(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		process := n.Start()
		ctx, stop := context.WithCancel(n.Context())
		defer stop()
		owner := exec.CommandContext(ctx, "sh", "-c", `while :; do
			printf '*mangle\n:BUSY - [0:0]\n-A BUSY -j RETURN\nCOMMIT\n*nat\n:BUSY - [0:0]\n-A BUSY -j RETURN\nCOMMIT\n' | iptables-nft-restore -n
			sleep 0.01
		done`)
		n.Must(owner.Start())
		n.Until("the owner writes", func() error {
			if n.Save()[rules.IPv4][rules.Mangle].Chain("BUSY") == nil {
				return errors.New("it has not written yet")
			}
			return nil
		})
		flush := exec.CommandContext(n.Context(), "iptables-nft", "-t", "nat", "-F")
		if code, _, stderr := n.Exec(flush); code != 0 {
			n.Fatalf("%s: %s", flush, stderr)
		}
		n.Healed(1)
		stop()
		_ = owner.Wait() // it was killed
		wantTakers(n, map[string]string{"ipv4 nat": "iptables-nft"})
		process.Stop()
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
			i := slices.IndexFunc(record.Culprits, func(c api.Culprit) bool { return c.PID == pid })
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
