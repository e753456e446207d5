package e2e

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const guardNative = "--protect=kube,cni,nft:ip:kube-proxy,nft:inet:*"

// onNative runs body on a node with iptables' rules of Kubernetes, and
// kube-proxy's native table of 100 services.
func onNative(t *testing.T, body func(n *nodetest.Node)) { onNativeNextTo(t, iptables.NFT, body) }

func onNativeNextTo(t *testing.T, backend iptables.Backend, body func(n *nodetest.Node)) {
	nodetest.On(t, backend, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft")
		n.Load()
		n.LoadNative(100)
		body(n)
	})
}

// listed returns nft's list of kube-proxy's table.
func listed(n *nodetest.Node) string {
	n.Helper()
	var own strings.Builder
	for table := range strings.SplitSeq(nstest.Command(n.T, "nft", "-s", "list", "ruleset"), "\n}\n") {
		if strings.HasPrefix(table, "table ip kube-proxy ") {
			own.WriteString(table)
		}
	}
	return own.String()
}

// wantNative waits until the table is as it was, the node ready, and so many records are there.
func wantNative(n *nodetest.Node, want string, records int) {
	n.Helper()
	n.Until("kube-proxy's native table", func() error {
		if got := listed(n); got != want {
			return fmt.Errorf("it has %d bytes of nft's text, want %d", len(got), len(want))
		}
		if got := nativeRecords(n); got != records {
			return fmt.Errorf("%d records of native tables, want %d", got, records)
		}
		return nodetest.Ready()
	})
}

// nativeRecords counts the records that name kube-proxy's native table.
func nativeRecords(n *nodetest.Node) int {
	n.Helper()
	_, stdout, _ := n.Canaryd("status", "-o", "json")
	return strings.Count(stdout, `"table": "ip kube-proxy",
          "kind":`)
}

// subscriptions counts the sockets of this network namespace that receive commits
// to nf_tables.
func subscriptions(n *nodetest.Node) int {
	n.Helper()
	text, err := os.ReadFile("/proc/thread-self/net/netlink")
	n.Must(err)
	found := 0
	for line := range strings.Lines(string(text)) {
		// sk Eth Pid Groups ...: NETLINK_NETFILTER is 12, and NFNLGRP_NFTABLES the group 7.
		words := strings.Fields(line)
		if len(words) > 3 && words[1] == "12" && words[3] == fmt.Sprintf("%08x", 1<<6) {
			found++
		}
	}
	return found
}

// unready returns an error unless the node is unready for that reason.
func unready(why string) error {
	if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), why) {
		return fmt.Errorf("readiness: %w, want %s", err, why)
	}
	return nil
}

// TestNativeNextToLegacy: on a node with iptables-legacy canaryd receives
// commits, and plants a witness, once a table of the default presets exists. Then
// both watchers run. A flush of native tables takes nothing from iptables, and a
// flush of iptables nothing from native tables.
func TestNativeNextToLegacy(t *testing.T) {
	onNativeNextTo(t, iptables.Legacy, func(n *nodetest.Node) {
		table := listed(n) + "\n}\n"
		nstest.Command(n.T, "nft", "delete", "table", "ip", "kube-proxy")
		n.Start()
		witness := func() bool {
			return strings.Contains(nstest.Command(n.T, "nft", "list", "tables"), "canaryd-witness")
		}
		if heard := subscriptions(n); heard != 0 || witness() {
			n.Errorf("%d sockets hear of commits although there is nothing to guard; a witness stands: %t", heard, witness())
		}
		if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "NATIVE TABLE") {
			n.Errorf("canaryd status prints\n%s", stdout)
		}
		nstest.CommandInput(n.T, table, "nft", "-f", "-")
		want, protected := listed(n), n.Protected()
		n.Until("guarding kube-proxy's native table", func() error {
			if heard := subscriptions(n); heard == 0 || !witness() {
				return fmt.Errorf("%d sockets hear of commits", heard)
			}
			return nodetest.Ready()
		})

		flusher := exec.CommandContext(n.Context(), "nft", "-i") // it lasts until its command line is read
		commands, err := flusher.StdinPipe()
		n.Must(err)
		n.Must(flusher.Start())
		_, err = io.WriteString(commands, "flush ruleset\n")
		n.Must(err)
		wantNative(n, want, 1)
		n.Same("protected rules after a flush of native tables", protected, n.Protected())
		if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, "nft -i") {
			n.Errorf("the record does not name nft:\n%s", stdout)
		}
		n.Must(commands.Close())
		n.Must(flusher.Wait())
		n.Flush()
		n.Healed(2)
		n.Same("protected rules after a flush of iptables' tables", protected, n.Protected())
		wantNative(n, want, 1)
	})
}
