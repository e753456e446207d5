package e2e

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestNativeRemovedRightBefore: what an owner removed and wrote right before a flush stays so:
// nothing of what is put back is stale.
func TestNativeRemovedRightBefore(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		n.Start(guardNative)
		change := "delete element ip kube-proxy cluster-ips { 172.30.0.72 }\nadd element ip kube-proxy cluster-ips { 172.30.99.99 }\n" +
			"flush chain ip kube-proxy firewall-check\n"
		undo := "add element ip kube-proxy cluster-ips { 172.30.0.72 }\ndelete element ip kube-proxy cluster-ips { 172.30.99.99 }\n" +
			"add rule ip kube-proxy firewall-check ip daddr . meta l4proto . th dport vmap @firewall-ips\n"
		before := listed(n)
		nstest.CommandInput(n.T, change, "nft", "-f", "-")
		want := listed(n)
		nstest.CommandInput(n.T, undo, "nft", "-f", "-")
		if back := listed(n); back != before || back == want {
			n.Fatalf("the change is not undone, or is none")
		}
		n.Want(0, "check") // which learns that
		for i, flush := range []string{"flush ruleset", "flush table ip kube-proxy", "flush map ip kube-proxy service-ips"} {
			nstest.CommandInput(n.T, change, "nft", "-f", "-")
			nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
			wantNative(n, want, i+1)
			nstest.CommandInput(n.T, undo, "nft", "-f", "-")
			n.Want(0, "check")
		}
	})
}

// TestNativeFalseFlushes: what is no flush is none: nothing is recorded and nothing written.
func TestNativeFalseFlushes(t *testing.T) {
	const mine = `table inet mine {
		counter hits { }
		set seen { type ipv4_addr; flags dynamic,timeout; timeout 1h; }
		chain sub { counter name hits accept; }
		chain out { type filter hook output priority 0; update @seen { ip daddr counter }; jump sub; }
	}
	`
	onNative(t, func(n *nodetest.Node) {
		nstest.CommandInput(n.T, mine, "nft", "-f", "-")
		n.Start(guardNative)
		for _, owner := range []struct{ name, script string }{
			{"an owner's file", "table inet mine\ndelete table inet mine\n" + mine},
			{"an owner's file that flushes", "table inet mine\nflush table inet mine\n" + strings.Replace(mine, "jump sub", "goto sub", 1)},
			{"a chain with another name", "rename chain inet mine sub sub2\n"},
			{"counters reset", "reset counters\n"},
			{"elements deleted one by one", "add element inet mine seen { 10.0.0.1 }\n"},
			{"elements deleted", "delete element inet mine seen { 10.0.0.1 }\n"},
		} {
			nstest.CommandInput(n.T, owner.script, "nft", "-f", "-")
			nstest.Command(n.T, "bash", "-c", "echo > /dev/udp/127.0.0.1/9") // packets add elements
			want := nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "mine")
			n.Want(0, "check") // it looks
			if got := nstest.Command(n.T, "nft", "-s", "list", "table", "inet", "mine"); got != want {
				n.Errorf("%s: something was written:\n%s", owner.name, got)
			}
			if status, _ := n.Want(0, "status", "-o", "json"); strings.Contains(status, `"table": "inet mine",
          "kind":`) {
				n.Errorf("%s is in a record", owner.name)
			}
		}
		nstest.Command(n.T, "nft", "add table inet mine { flags dormant; }") // an outage, which ends by itself
		nstest.Command(n.T, "nft", "add table inet mine")
		want := nstest.Command(n.T, "nft", "-s", "-a", "list", "table", "inet", "mine")
		n.Want(0, "check")
		n.Until("a node that is ready", nodetest.Ready)
		if got := nstest.Command(n.T, "nft", "-s", "-a", "list", "table", "inet", "mine"); got != want {
			n.Errorf("dormant and back: something was written:\n%s", got)
		}
	})
}

// TestNativeKilled: canaryd is killed at some moment of a replay. The next one finds a table that
// is whole or not there, and puts it back from the file, which only its owner may read.
func TestNativeKilled(t *testing.T) {
	onNative(t, func(n *nodetest.Node) {
		d := n.Start(guardNative)
		want := listed(n)
		whole := 0
		for _, delay := range []time.Duration{0, 22, 35, 70} {
			n.Until("the table to be on disk", func() error {
				if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, "; the present one") {
					return errors.New(stdout)
				}
				return nil
			})
			nstest.Command(n.T, "nft", "flush", "ruleset")
			time.Sleep(delay * time.Millisecond)
			d.Kill()
			switch got := listed(n); got {
			case want:
				whole++
			case "":
			default:
				n.Errorf("killed %s after a flush the table is half there, %d bytes of %d", delay*time.Millisecond, len(got), len(want))
			}
			d = n.Launch(guardNative)
			n.Until("kube-proxy's native table", func() error {
				if got := listed(n); got != want {
					return fmt.Errorf("it has %d bytes of nft's text, want %d", len(got), len(want))
				}
				return nodetest.Ready()
			})
		}
		n.Logf("of 4 killed runs %d had put the table back", whole)
		info, err := os.Stat("/run/state/native.json")
		n.Must(err)
		if info.Mode() != 0o600 {
			n.Errorf("the file has mode %v", info.Mode())
		}
		d.Stop()
	})
}
