package kernels

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestDetect: detect names the backend with the node's rules. The kernel may have loaded no
// module yet.
func TestDetect(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Want(0, "detect")
		n.Load()
		stdout, stderr := n.Want(0, "detect")
		if !strings.Contains(stdout, "\nbackend  "+string(n.Programs.With)+"\n") {
			n.Errorf("canaryd detect printed\n%s", stdout)
		}
		if stderr != "" {
			n.Errorf("canaryd detect warns on a kernel that is tried: %s", stderr)
		}
	})
}

// of386 is canaryd as a program of 386, in machines of amd64.
const of386 = "/canaryd-386"

// TestOf386: a program of 386 guards iptables-nft. It says at once that it cannot read tables
// of iptables-legacy, and names the remedy.
func TestOf386(t *testing.T) {
	t.Run("nft", func(t *testing.T) { nodetest.On(t, iptables.NFT, guardedBy386) })
}

func guardedBy386(n *nodetest.Node) {
	n.Load()
	want := func(code int, words string, args ...string) {
		n.Helper()
		got, stdout, stderr := n.Exec(exec.CommandContext(n.Context(), of386, args...))
		if got != code || !strings.Contains(stdout+stderr, words) {
			n.Errorf("canaryd %s ended with %d and printed %s%s, want %d and %q", strings.Join(args, " "), got, stdout, stderr, code, words)
		}
	}
	want(0, "\nbackend  nft\n", "detect")
	nstest.Command(n.T, "iptables-legacy", "-A", "INPUT", "-j", "ACCEPT")
	const refused = "reading table filter of ipv4: a 386 program reads other structures of x_tables than its kernel writes"
	want(2, refused, "detect")
	want(2, refused, "check", "--state-dir=/run/state")
	want(2, "or --backend=nft", "check", "--state-dir=/run/state", "--backend=legacy")
}

// TestFlushes: rules are flushed in three ways, and are back and proved.
func TestFlushes(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.Start()
		protected := n.Protected()
		for i, flush := range []func(){
			n.Flush,
			func() { n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Nat, "PREROUTING")) },
			func() { everything(n) },
		} {
			flush()
			back(n, protected, i+1)
		}
	})
}

// everything is the third way: nft flush ruleset, or iptables-restore of empty tables.
func everything(n *nodetest.Node) {
	n.Helper()
	if n.Programs.With == iptables.NFT {
		n.Must(n.Programs.FlushRuleset(n.Context()))
		return
	}
	for _, family := range rules.Families() {
		n.Must(n.Programs.Restore(n.Context(), family, "*nat\nCOMMIT\n*mangle\nCOMMIT\n*filter\nCOMMIT\n"))
	}
}

// back waits until the protected rules are back and canaryd says so. At least that number of
// flushes must be recorded, all of them proved.
func back(n *nodetest.Node, protected []string, records int) {
	n.Helper()
	n.Until("the rules to be back", func() error {
		s := n.Status()
		if !s.Healthy || len(s.Flushes) < records {
			return fmt.Errorf("healthy %t, %d flush records, want %d", s.Healthy, len(s.Flushes), records)
		}
		for _, r := range s.Flushes {
			if r.Outcome != "proved" && r.Outcome != "raced" {
				return fmt.Errorf("the flush record %s ended %s", r.ID, r.Outcome)
			}
		}
		if !slices.Equal(n.Protected(), protected) {
			return errors.New("other rules")
		}
		return nodetest.Ready()
	})
	n.Same("protected rules", protected, n.Protected())
}

// TestRestart: rules are flushed while canaryd is down, and are back when it runs again.
func TestRestart(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		first := n.Start()
		protected, id := n.Protected(), n.Status().Generation.ID
		first.Stop()
		n.Same("protected rules after SIGTERM", protected, n.Protected())
		second := n.Start()
		second.WantLog("Took up the stored generation", id)
		if s := n.Status(); len(s.Flushes) != 0 {
			n.Errorf("a restart made %d flush records", len(s.Flushes))
		}
		second.Stop()
		n.Flush()
		n.Start()
		back(n, protected, 1)
	})
}

// table is a native table with the same kinds of content as kube-proxy's. Its base chain for
// services has two rules, because the flush of a single rule may be its deletion by handle.
const table = `
table ip service {
	map ports {
		type inet_proto . inet_service : verdict
		elements = { tcp . 80 : goto web, udp . 53 : goto dns }
	}
	set denied {
		type ipv4_addr
		flags interval
		elements = { 10.1.0.0/16, 192.0.2.7 }
	}
	chain web { tcp dport 80 counter dnat to 10.0.0.1:8080; }
	chain dns { dnat to 10.0.0.2; }
	chain prerouting {
		type nat hook prerouting priority -100; policy accept;
		ip daddr 192.0.2.7 counter return
		fib daddr type local meta l4proto . th dport vmap @ports
	}
	chain input {
		type filter hook input priority 0; policy accept;
		ip saddr @denied ct state new drop
	}
}
`

// TestNative: canaryd guards a native table that --protect names, also while it is down.
func TestNative(t *testing.T) {
	const guard = "--protect=kube,cni,nft:ip:service"
	for _, c := range []struct {
		name string
		body func(n *nodetest.Node, want string)
	}{
		{"flushes", func(n *nodetest.Node, want string) {
			n.Start(guard)
			for _, flush := range []string{"flush ruleset", "flush chain ip service prerouting", "flush table ip service"} {
				nstest.CommandInput(n.T, flush+"\n", "nft", "-f", "-")
				nativeBack(n, want)
			}
		}},
		{"restart", func(n *nodetest.Node, want string) {
			n.Start(guard).Stop()
			nstest.CommandInput(n.T, "flush ruleset\n", "nft", "-f", "-")
			n.Start(guard)
			nativeBack(n, want)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				n.Load()
				nstest.CommandInput(n.T, table, "nft", "-f", "-")
				c.body(n, listed(n))
			})
		})
	}
}

// listed returns nft's listing of the table.
func listed(n *nodetest.Node) string {
	n.Helper()
	return nstest.Command(n.T, "nft", "-s", "list", "table", "ip", "service")
}

// nativeBack waits until the table is as it was, and canaryd says so.
func nativeBack(n *nodetest.Node, want string) {
	n.Helper()
	n.Until("the native table to be back", func() error {
		code, stdout, stderr := n.Exec(exec.CommandContext(n.Context(), "nft", "-s", "list", "table", "ip", "service"))
		if code != 0 || stdout != want {
			return fmt.Errorf("nft ended with %d and printed %s%s", code, stdout, stderr)
		}
		return nodetest.Ready()
	})
}

// TestStandby: from Linux 5.12 a process can own a table, and the standby has its copies, also
// after a flush. On an older kernel the status has the reason for its absence, and the rules
// come back without it.
func TestStandby(t *testing.T) {
	t.Run("nft", func(t *testing.T) {
		nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
			n.Load()
			n.Start("--standby=on")
			protected := n.Protected()
			standbyIsKnown(n)
			everything(n)
			back(n, protected, 1)
			standbyIsKnown(n)
		})
	})
}

// standbyIsKnown waits until the standby has the state that this kernel allows.
func standbyIsKnown(n *nodetest.Node) {
	n.Helper()
	want := "armed"
	if !kernelIsFrom(n, 5, 12) {
		want = "unavailable"
	}
	n.Until("the standby to be "+want, func() error {
		for family, s := range n.Status().Standby {
			if s.State != want || want == "unavailable" && s.Reason == "" {
				return fmt.Errorf("that of %s is %s: %s", family, s.State, s.Reason)
			}
		}
		return nil
	})
}

// kernelIsFrom reports whether the kernel has at least that version.
func kernelIsFrom(n *nodetest.Node, major, minor int) bool {
	n.Helper()
	var name unix.Utsname
	n.Must(unix.Uname(&name))
	var has [2]int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &has[0], &has[1])
	n.Must(err)
	return has[0] > major || has[0] == major && has[1] >= minor
}
