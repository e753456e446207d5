package iptables

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

const canary = "KUBE-CANARYD-CANARY"

func TestProbePresence(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		places := []Place{{Table: rules.Mangle, Chain: canary}, {Table: rules.Nat, Chain: canary}, {Table: rules.Filter, Chain: canary}, {Table: rules.Filter, Chain: "INPUT"}, {Table: rules.Filter, Chain: "MIXED"}}
		want := map[Place]Holding{}
		check := func(step string) {
			t.Helper()
			if diff := cmp.Diff(want, mustProbe(t, k, family, places...).Holdings); diff != "" {
				t.Errorf("%s (-want +got):\n%s", step, diff)
			}
		}
		before := tablesOf(t, backend)
		for _, place := range places {
			want[place] = Holding{Presence: NoTable}
		}
		check("nothing there")
		mustStamp(t, k, family)
		mustRead(t, k, family)
		if diff := cmp.Diff(before, tablesOf(t, backend)); diff != "" {
			t.Errorf("looking created tables (-before +after):\n%s", diff)
		}

		iptablesCommand(t, backend, family, "-t nat -N "+canary)
		iptablesCommand(t, backend, family, "-t filter -A INPUT -p tcp -m comment --comment canaryd-witness")
		iptablesCommand(t, backend, family, "-t filter -A INPUT -m comment --comment foreign -j ACCEPT")
		want[places[1]] = Holding{Presence: Present}
		want[places[2]] = Holding{Presence: NoChain}
		want[places[3]] = Holding{Presence: Present, Rules: 2, Comments: []string{"canaryd-witness"}}
		want[places[4]] = Holding{Presence: NoChain}
		check("an empty chain, a missing one, a built-in one")

		iptablesCommand(t, backend, family, "-t nat -A "+canary+" -m comment --comment canaryd-1234")
		iptablesCommand(t, backend, family, "-N MIXED")
		for _, target := range []string{"-j LOG", "-j MARK --set-mark 3", "-j REJECT", "-j RETURN", "-g OTHER", "-j OTHER"} {
			if strings.HasSuffix(target, "-g OTHER") {
				iptablesCommand(t, backend, family, "-N OTHER")
			}
			iptablesCommand(t, backend, family, "-t filter -A MIXED -m comment --comment no "+strings.Replace(target, "MARK --set-mark 3", "NFLOG", 1))
		}
		iptablesCommand(t, backend, family, "-A MIXED -p tcp")
		iptablesCommand(t, backend, family, "-A MIXED -m limit --limit 5/s -m comment --comment last")
		want[places[1]] = Holding{Presence: Present, Rules: 1, Comments: []string{"canaryd-1234"}}
		want[places[4]] = Holding{Presence: Present, Rules: 8, Comments: []string{"last"}}
		check("comments")

		iptablesCommand(t, backend, family, "-t nat -F")
		want[places[1]] = Holding{Presence: Present}
		check("flushed")
	})
}

func TestDigestSeesWhatTheStampMisses(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		iptablesCommand(t, backend, family, "-t filter -N X")
		iptablesCommand(t, backend, family, "-t filter -A X -p tcp --dport 80 -j ACCEPT")
		iptablesCommand(t, backend, family, "-t filter -A OUTPUT -j X")
		stamp, probed := mustStamp(t, k, family), mustProbe(t, k, family)

		// Traffic changes nothing but counters.
		if again := mustProbe(t, k, family); again.Digest != probed.Digest {
			t.Errorf("the digest moved from %#x to %#x though nobody wrote", probed.Digest, again.Digest)
		}
		sendTraffic(t, family)
		if again := mustProbe(t, k, family); again.Digest != probed.Digest {
			t.Errorf("the digest moved from %#x to %#x though only packets were counted", probed.Digest, again.Digest)
		}

		iptablesCommand(t, backend, family, "-t filter -R X 1 -p tcp --dport 81 -j ACCEPT")
		replaced := mustStamp(t, k, family)
		if moved := replaced != stamp; moved != stamp.Exact {
			t.Errorf("a replaced rule moved the stamp: %t, want %t", moved, stamp.Exact)
		}
		if stamp.Exact != (backend == NFT) {
			t.Errorf("Exact is %t", stamp.Exact)
		}
		if got := mustProbe(t, k, family); got.Digest == probed.Digest {
			t.Error("a replaced rule did not move the digest")
		}
		iptablesCommand(t, backend, family, "-t filter -A X -j ACCEPT")
		if mustStamp(t, k, family) == replaced {
			t.Error("a new rule did not move the stamp")
		}
	})
}

func sendTraffic(t *testing.T, family rules.Family) {
	t.Helper()
	target := "127.0.0.1"
	if family == rules.IPv6 {
		target = "::1"
	}
	nstest.Command(t, "bash", "-c", "for i in 1 2 3; do echo x > /dev/udp/"+target+"/9 || true; done")
}

func TestRead(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		k := openKernel(t, Config{Backend: backend})
		empty := mustRead(t, k, family)
		if len(empty.Tables) != 0 || len(empty.Unreadable) != 0 {
			t.Errorf("an empty namespace reads as %v, %v", empty.Tables, empty.Unreadable)
		}
		iptablesCommand(t, backend, family, "-t nat -N X")
		iptablesCommand(t, backend, family, "-t nat -A X -p tcp --dport 80 -j ACCEPT")
		got := mustRead(t, k, family)
		want := []rules.Rule{{Spec: "-p tcp -m tcp --dport 80 -j ACCEPT", Target: "ACCEPT"}}
		if diff := cmp.Diff(want, got.Tables[rules.Nat].Chain("X").Rules); diff != "" {
			t.Errorf("rules (-want +got):\n%s", diff)
		}
		if now := mustProbe(t, k, family); now.Digest != got.Digest {
			t.Errorf("the snapshot's digest is %#x, a probe's right after it %#x", got.Digest, now.Digest)
		}
	})
}

// One native rule makes iptables-nft-save leave out the whole table. For canaryd
// only that rule is opaque.
func TestReadNativeRuleIsOpaque(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		k := openKernel(t, Config{Backend: NFT})
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N X")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -A X -p tcp -j ACCEPT")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -N Y")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -A Y -p udp -j X")
		mustRead(t, k, rules.IPv4)
		nstest.Command(t, "nft", "add", "rule", "ip", "nat", "X", "ct", "state", "vmap", "{ new : accept }")
		nstest.Command(t, "nft", "add", "rule", "ip", "nat", "X", "jump", "Y")
		iptablesCommand(t, NFT, rules.IPv4, "-t nat -A Y -p icmp -j RETURN")
		got := mustRead(t, k, rules.IPv4)
		x, y := got.Tables[rules.Nat].Chain("X"), got.Tables[rules.Nat].Chain("Y")
		if len(got.Unreadable) > 0 || x == nil || len(x.Rules) != 3 || x.Rules[0].Spec != "-p tcp -j ACCEPT" {
			t.Fatalf("X is %v, unreadable %v", x, got.Unreadable)
		}
		for i, want := range []struct {
			target, label string
			bytes         bool
		}{{"", ": a rule with expression \"lookup\" cannot be written again as the kernel shows it", false}, {"Y", "-j Y", true}} {
			r := x.Rules[i+1]
			if _, opaque := r.Opaque(); !opaque || r.Target != want.target || !strings.HasSuffix(r.Label(), want.label) || r.HasBytes() != want.bytes {
				t.Errorf("rule %d is %q to %q", i+2, r.Label(), r.Target)
			}
		}
		if want := []rules.Rule{{Spec: "-p udp -j X", Target: "X"}, {Spec: "-p icmp -j RETURN", Target: "RETURN"}}; !slices.Equal(y.Rules, want) {
			t.Errorf("Y is %v", y.Rules)
		}
		// The probe does not need iptables to understand the table.
		probe := mustProbe(t, k, rules.IPv4, Place{Table: rules.Nat, Chain: "X"})
		if diff := cmp.Diff(Holding{Presence: Present, Rules: 3}, probe.Holdings[Place{Table: rules.Nat, Chain: "X"}]); diff != "" {
			t.Errorf("probe (-want +got):\n%s", diff)
		}
	})
}

// standIn replaces the family's programs.
func standIn(t *testing.T, k *Kernel, family rules.Family, script string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stand-in")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	tools := k.tools[family]
	tools.restore, tools.iptables = path, path
	k.tools[family] = tools
}

func TestSubscription(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "nft")
		k := openKernel(t, Config{Backend: NFT})
		s, err := k.Subscribe()
		if err != nil {
			t.Fatal(err)
		}
		before := mustStamp(t, k, rules.IPv4).Value
		script := "exec iptables-nft-restore --noflush -w 5"
		payload := "*filter\n:A - [0:0]\n-A A -j ACCEPT\n-A A -j DROP\nCOMMIT\n*nat\n:B - [0:0]\nCOMMIT\n"
		nstest.CommandInput(t, payload, "sh", "-c", script)
		iptablesCommand(t, NFT, rules.IPv6, "-F") // nothing to flush: no commit
		nstest.Command(t, "nft", "flush", "ruleset")
		var comms []string
		for i := range 3 {
			c, err := s.Receive()
			if err != nil {
				t.Fatal(err)
			}
			if want := uint32(before) + uint32(i) + 1; c.Genid != want {
				t.Errorf("commit %d has genid %d, want %d", i, c.Genid, want)
			}
			if c.PID == 0 {
				t.Errorf("commit %d has no pid", i)
			}
			comms = append(comms, c.Comm)
		}
		if diff := cmp.Diff([]string{"iptables-nft-re", "iptables-nft-re", "nft"}, comms); diff != "" {
			t.Errorf("writers (-want +got):\n%s", diff)
		}
		if now := mustStamp(t, k, rules.IPv4).Value; now != before+3 {
			t.Errorf("the genid moved by %d, want 3", now-before)
		}
		done := make(chan error)
		go func() { _, err := s.Receive(); done <- err }()
		testkit.Pass(t, 20*time.Millisecond, "that Close wakes a Receive that waits already")
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; err == nil || !strings.Contains(err.Error(), "use of closed") {
			t.Errorf("Receive after Close returns %v", err)
		}
	})
}

func TestAKernelIsOfItsFamilies(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: Legacy, Families: []rules.Family{rules.IPv6}})
		if diff := cmp.Diff([]rules.Family{rules.IPv6}, k.Families()); diff != "" {
			t.Errorf("families (-want +got):\n%s", diff)
		}
		if info := k.Info(); info.Backend != Legacy || info.Version == "" || !info.RandomFully {
			t.Errorf("info is %+v", info)
		}
		if _, err := k.Stamp(t.Context(), rules.IPv4); !errors.Is(err, ErrNoFamily) {
			t.Errorf("a family that was not asked for: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := k.Probe(ctx, rules.IPv6, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("a context that ended: %v", err)
		}
		if _, err := Open(t.Context(), Config{Backend: "xtables"}); err == nil {
			t.Error("an unknown backend is accepted")
		}
	})
}
