package e2e

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
)

const guardNative = "--protect=kube,cni,nft:ip:kube-proxy,nft:inet:*"

// onNative is a node with iptables' rules of Kubernetes, and kube-proxy's native table of 100
// services.
func onNative(t *testing.T, body func(n *nodetest.Node)) { onNativeNextTo(t, iptables.NFT, body) }

func onNativeNextTo(t *testing.T, backend iptables.Backend, body func(n *nodetest.Node)) {
	nodetest.On(t, backend, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "nft")
		n.Load()
		n.LoadNative(100)
		body(n)
	})
}

// listed is what nft lists of kube-proxy's table.
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

// TestNativeFlushes: each way to flush a native table is noticed and everything is back, also that
// of a file with an old copy of it.
func TestNativeFlushes(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		n.Start(guardNative)
		want, protected := listed(n), n.Protected()
		old := strings.Replace(want, "dnat to 10.", "dnat to 11.", 1) + "\n}\n"
		for i, flush := range []string{
			"flush ruleset",
			"flush ruleset ip",
			"flush table ip kube-proxy",
			"flush chain ip kube-proxy nat-prerouting",
			"flush chain ip kube-proxy services",
			"flush map ip kube-proxy service-ips",
			"flush set ip kube-proxy cluster-ips",
			"flush ruleset\n" + old,
		} {
			nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
			wantNative(n, want, i+1)
			lost := map[string]string{"flush chain ip kube-proxy services": "\n-rule services ip daddr . meta l4proto . th dport vmap @service-ips\n", "flush set ip kube-proxy cluster-ips": "\n-element cluster-ips 172.30."}[flush]
			if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, lost) || lost != "" && strings.Contains(stdout, "\n-chain ") {
				n.Errorf("after %s the record does not say what was lost, and nothing else:\n%s", flush, stdout)
			}
		}
		nstest.Command(n.T, "nft", "flush", "table", "ip", "kube-proxy") // two flushers at once
		nstest.Command(n.T, "nft", "flush", "ruleset")
		n.Until("kube-proxy's native table", func() error {
			if listed(n) != want || !slices.Equal(n.Protected(), protected) {
				return errors.New("it is not as it was, or iptables' rules are not")
			}
			return nodetest.Ready()
		})
		stdout, _ := n.Want(0, "status")
		if !strings.Contains(stdout, "\nip kube-proxy  intact ") || !strings.Contains(stdout, "nft (pid ") {
			n.Errorf("canaryd status prints\n%s", stdout)
		}
		if line, _ := n.Want(0, "check", "-o", "line"); !strings.HasPrefix(line, "intact: ") {
			n.Errorf("canaryd check prints %q", line)
		}
		metrics := n.Metrics()
		if metrics[`flushes_total{family="ip",kind="table_deleted",table="ip kube-proxy"}`] < 2 || metrics[`native_table_in_force{family="ip",table="ip kube-proxy"}`] != 1 {
			n.Errorf("the metrics say %v", metrics)
		}
		if page := n.Get("/"); !strings.Contains(page, "ip kube-proxy") {
			n.Errorf("the page does not name the table")
		}
	})
}

// TestNativeOwner: what an owner does is learned and is no flush; a table that is deleted alone, or
// dormant, is reported and left so.
func TestNativeOwner(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		n.Start(guardNative)
		nstest.CommandInput(n.T, "table inet netavark { chain POSTROUTING { type nat hook postrouting priority srcnat; ip saddr 10.88.0.0/16 masquerade; }; }\n", "nft", "-f", "-")
		nstest.CommandInput(n.T, "add table ip kube-proxy\ndelete table ip kube-proxy\n"+listed(n)+"\n}\n", "nft", "-f", "-")
		nstest.Command(n.T, "nft", "add", "element", "ip", "kube-proxy", "cluster-ips", "{ 172.30.99.99 }")
		n.Until("learning the element", func() error {
			if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, " 222\n") {
				return fmt.Errorf("canaryd status prints\n%s", stdout)
			}
			return nil
		})
		want := listed(n)
		wantNative(n, want, 0)
		nstest.Command(n.T, "nft", "flush", "ruleset")
		wantNative(n, want, 1)
		if !strings.Contains(want, "172.30.99.99") || !strings.Contains(nstest.Command(n.T, "nft", "list", "tables"), "table inet netavark") {
			n.Errorf("what owners wrote is not back")
		}

		nstest.Command(n.T, "nft", "add table ip kube-proxy { flags dormant; }")
		n.Until("a report", func() error { return unready("table ip kube-proxy is disabled") })
		nstest.Command(n.T, "nft", "add", "table", "ip", "kube-proxy")
		wantNative(n, want, 2)

		nstest.Command(n.T, "nft", "delete", "table", "ip", "kube-proxy")
		n.Until("a report", func() error { return unready("table ip kube-proxy is deleted_by_owner_or_unknown") })
		n.Want(1, "check") // it looks
		if listed(n) != "" {
			n.Errorf("a table that was deleted alone was put back")
		}
		if stdout, _ := n.Want(0, "restore", "--dry-run"); !strings.Contains(stdout, "ip kube-proxy  141 chains, 189 rules, ") || listed(n) != "" {
			n.Errorf("canaryd restore --dry-run prints\n%s", stdout)
		}
		if stdout, _ := n.Want(0, "restore"); !strings.Contains(stdout, "proved") {
			n.Errorf("canaryd restore prints\n%s", stdout)
		}
		wantNative(n, want, 3)

		nstest.Command(n.T, "nft", "delete", "table", "ip", "kube-proxy")
		n.Until("a report", func() error { return unready("table ip kube-proxy is deleted_by_owner_or_unknown") })
		n.Want(0, "dismiss")
		wantNative(n, "", 4)
	})
}

// TestNativeByPreset: without a word canaryd guards the tables of the default presets, from the
// moment at which the first of them stands. Until then it is at no socket of notifications more,
// and no witness stands.
func TestNativeByPreset(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			onNativeNextTo(t, backend, func(n *nodetest.Node) {
				table := listed(n) + "\n}\n"
				nstest.Command(n.T, "nft", "delete", "table", "ip", "kube-proxy")
				n.Start()
				subscribed := subscriptions(n)
				if backend == iptables.Legacy && subscribed != 0 || backend == iptables.NFT && subscribed == 0 {
					n.Errorf("%s: %d sockets hear of commits", backend, subscribed)
				}
				if names := nstest.Command(n.T, "nft", "list", "tables"); strings.Contains(names, "canaryd-witness") {
					n.Errorf("a witness stands although there is nothing to guard:\n%s", names)
				}
				if stdout, _ := n.Want(0, "status"); strings.Contains(stdout, "NATIVE TABLE") {
					n.Errorf("canaryd status prints\n%s", stdout)
				}
				nstest.CommandInput(n.T, table, "nft", "-f", "-")
				want := listed(n)
				n.Until("guarding kube-proxy's native table", func() error {
					if !strings.Contains(nstest.Command(n.T, "nft", "list", "tables"), "canaryd-witness") {
						return errors.New("no witness stands")
					}
					return nodetest.Ready()
				})
				if now := subscriptions(n); now <= subscribed {
					n.Errorf("%s: %d sockets hear of commits, as before", backend, now)
				}
				nstest.Command(n.T, "nft", "flush", "ruleset")
				n.Until("kube-proxy's native table", func() error {
					if listed(n) != want {
						return errors.New("it is not as it was")
					}
					return nodetest.Ready()
				})
				if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, "ip kube-proxy") {
					n.Errorf("the record says\n%s", stdout)
				}
			})
		})
	}
}

// subscriptions counts the sockets of this network namespace that hear of commits to nf_tables.
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

// TestNativeRestoreAlone: without a daemon canaryd restore puts back what the last one stored.
func TestNativeRestoreAlone(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		d := n.Start()
		want := listed(n)
		wantNative(n, want, 0)
		d.Stop()
		for _, flush := range []string{"flush ruleset", "delete table ip kube-proxy", "flush table ip kube-proxy"} {
			nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
			n.Want(0, "restore")
			if listed(n) != want {
				n.Errorf("after %s the table is not as it was", flush)
			}
		}
		n.Start()
		wantNative(n, want, 0)
	})
}

// unready returns an error unless the node is not ready for that reason.
func unready(why string) error {
	if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), why) {
		return fmt.Errorf("readiness: %w, want %s", err, why)
	}
	return nil
}

// TestNativeNextToLegacy: on a node with iptables-legacy both watchers run. A flush of native
// tables takes nothing from iptables, and a flush of iptables nothing from native tables.
func TestNativeNextToLegacy(t *testing.T) {
	onNativeNextTo(t, iptables.Legacy, func(n *nodetest.Node) {
		n.Start(guardNative)
		want, protected := listed(n), n.Protected()
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

// A commit is what one transaction did to tables.
type commit struct{ Deleted, Made []string }

// commits returns what the transactions did that were heard of since, but those that made and
// deleted no table.
func commits(n *nodetest.Node, events *nft.Events) (all []commit) {
	n.Helper()
	var c commit
	n.Must(events.DrainAll(func(m nft.Notification) error {
		table := func() string {
			return m.Family.Table(nft.String(nft.AttrPath(m.Attrs, unix.NFTA_TABLE_NAME))).NFT()
		}
		switch m.Kind {
		case unix.NFT_MSG_NEWTABLE:
			c.Made = append(c.Made, table())
		case unix.NFT_MSG_DELTABLE:
			c.Deleted = append(c.Deleted, table())
		case unix.NFT_MSG_NEWGEN:
			if slices.Sort(c.Made); len(c.Made)+len(c.Deleted) > 0 {
				all = append(all, c)
			}
			c = commit{}
		}
		return nil
	}))
	return all
}

// TestNativeAndIPTablesTogether: `nft flush ruleset` takes iptables' tables and native ones by one
// transaction, and one puts all of them back, with the witness. There is one record of it.
func TestNativeAndIPTablesTogether(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		n.Start(guardNative)
		want, protected := listed(n), n.Protected()
		conn, err := nft.Dial()
		n.Must(err)
		defer conn.Close()
		events, err := nft.OpenEvents(conn.Genid, func(uint32, uint32) bool { return false })
		n.Must(err)
		defer events.Close()
		nstest.Command(n.T, "nft", "flush", "ruleset")
		wantNative(n, want, 1)
		n.Same("protected rules", protected, n.Protected())
		all := commits(n, events)
		if len(all) < 2 || len(all[0].Deleted) == 0 {
			n.Fatalf("the commits are %+v", all)
		}
		tables := []string{"ip canaryd-witness", "ip filter", "ip kube-proxy", "ip mangle", "ip nat", "ip6 filter", "ip6 mangle", "ip6 nat"}
		n.Same("tables of the first transaction after the flush", tables, all[1].Made)
		if _, stdout, _ := n.Canaryd("status", "-o", "json"); strings.Count(stdout, `"outcome": "proved"`) != 1 {
			n.Errorf("the status has another number of records than one:\n%s", stdout)
		}
		if stdout, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(stdout, "native table ip kube-proxy") || !strings.Contains(stdout, "nat") {
			n.Errorf("the record does not say all:\n%s", stdout)
		}
	})
}
