package kubeproxy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	contract "github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// busyFor is the time of changes to services, 20 a second, with each setting of --standby.
	busyFor = 30 * time.Second
	// sidesSlots is the number of services without CANARYD_KUBEPROXY_SERVICES.
	sidesSlots = 200
	// eagerSlots is the greatest number of services with a comparison of both nodes. From 1,000
	// endpoints on kube-proxy leaves chains of former services for a later full sync
	// (iptables/proxier.go).
	eagerSlots = 250
)

// manySlots returns the number of services for TestStandby.
func manySlots(t *testing.T) int {
	t.Helper()
	text := os.Getenv("CANARYD_KUBEPROXY_SERVICES")
	if text == "" {
		return sidesSlots
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A sides is a node with canaryd next to a node without. Both kube-proxies do the same at the
// same time, so a busy machine costs both the same.
type sides struct {
	*nodetest.Node
	kind       kind
	town       *town
	node, bare *proxy
	lines      []string
}

// TestStandby: with a standby no more syncs of kube-proxy fail than without canaryd. No ipset
// stays in use for longer than its owner wants. The copy follows, and in the end both nodes
// have the same rules. The test prints how much longer syncs take, which depends on the
// machine.
func TestStandby(t *testing.T) {
	onKinds(t, func(n *nodetest.Node, k kind) {
		if k.backend == iptables.Legacy {
			return // the copy is of nf_tables' rules
		}
		number := seed(n.T)
		n.Logf("CANARYD_KUBEPROXY_SEED=%d", number)
		all := newSpaces(n.T, k.backend, "node", "bare")
		a := newAPI()
		s := &sides{Node: n, kind: k, town: newTown(a, rand.New(rand.NewPCG(number, 7)), manySlots(n.T))}
		a.serve(n.T, all...)
		s.node, s.bare = startProxy(n.T, all[0], k.mode), startProxy(n.T, all[1], k.mode)
		for _, standby := range []string{"off", "on"} {
			s.with(standby)
		}
		report(n.T, append([]string{fmt.Sprintf("kube-proxy next to the standby, %s (seed %d): %d services, 20 changes a second", k.name, number, manySlots(n.T)),
			fmt.Sprintf("  %-10s %-22s %-22s %-10s %s", "--standby", "mean sync next to it", "mean sync without", "more", "failed syncs next to it, without")}, s.lines...)...)
		if manySlots(n.T) <= eagerSlots {
			s.same()
		}
	})
}

// with changes services while canaryd runs with that standby.
func (s *sides) with(standby string) {
	s.Helper()
	p := s.Launch(guard, "--standby="+standby)
	s.Until("canaryd to be healthy, with its standby "+standby, func() error {
		if !p.Running() {
			s.Fatalf("canaryd ended at once: %v\n%s", p.Err(), p.Log())
		}
		if err := nodetest.Ready(); err != nil { // until then it may not answer
			return err
		}
		return s.armed(standby)
	})
	before := [2]samples{s.seen(s.node), s.seen(s.bare)}
	failed := [2]int{s.node.syncs().failed, s.bare.syncs().failed}
	s.change()
	after := [2]samples{s.seen(s.node), s.seen(s.bare)}
	mean := [2]time.Duration{meanSync(before[0], after[0]), meanSync(before[1], after[1])}
	failed = [2]int{s.node.syncs().failed - failed[0], s.bare.syncs().failed - failed[1]}
	s.lines = append(s.lines, fmt.Sprintf("  %-10s %-22s %-22s %-10s %d, %d", standby, mean[0].Round(100*time.Microsecond), mean[1].Round(100*time.Microsecond),
		fmt.Sprintf("%+.0f %%", 100*(mean[0].Seconds()/mean[1].Seconds()-1)), failed[0], failed[1]))
	if failed[0] > failed[1] {
		for _, c := range s.node.complaints() {
			s.Logf("kube-proxy: %s %.700s", c.at.Format("15:04:05.000"), c.text)
		}
		s.Errorf("--standby=%s: %d syncs failed next to canaryd, %d without it", standby, failed[0], failed[1])
	}
	if standby == "on" {
		s.Until("the standby to follow", func() error { return s.armed("on") })
		if s.kind.mode == inIPTables {
			s.destroysSet()
		}
	}
	var records []scenario.Record
	s.Until("canaryd to know that the jump is its owner's deletion", func() error {
		records = s.Status().Flushes
		for _, r := range records {
			if r.Outcome == string(contract.WaitingOwner) {
				return fmt.Errorf("record %s waits for its owner", r.ID)
			}
		}
		return nil
	})
	if len(records) > 0 {
		s.Errorf("without a flush there are %d records: %+v", len(records), records[0])
	}
	p.Stop()
}

// armed returns nil if the standby has the last learned rules of kube-proxy.
func (s *sides) armed(standby string) error {
	if standby == "off" {
		return nil
	}
	status, armed, said := s.Status(), 0, ""
	for _, family := range status.Standby {
		if s.kind.mode == inIPTables && family.State == "armed" {
			armed++
		}
	}
	for _, t := range status.Native {
		if s.kind.mode == inNFTables && t.Standby != nil {
			said += fmt.Sprintf(", table %s %+v", t.Table, *t.Standby)
			if t.Standby.State == "armed" {
				armed++
			}
		}
	}
	if armed != 2 {
		return fmt.Errorf("the standby of %d families is armed: %+v%s", armed, status.Standby, said)
	}
	return nil
}

// change changes services 20 times a second.
func (s *sides) change() {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for range testkit.During(s.T, busyFor, "how long services change") {
		s.town.change()
		<-tick.C
	}
}

// seen returns a kube-proxy's metrics.
func (s *sides) seen(p *proxy) samples {
	s.Helper()
	m, err := p.metrics()
	s.Must(err)
	return m
}

// meanSync returns the mean time of the syncs between two samples, of both families.
func meanSync(before, after samples) time.Duration {
	total := func(m samples, name string) (sum float64) {
		for key, value := range m {
			if key == name || strings.HasPrefix(key, name+"{") {
				sum += value
			}
		}
		return sum
	}
	const name = "sync_proxy_rules_duration_seconds"
	n := total(after, name+"_count") - total(before, name+"_count")
	return time.Duration((total(after, name+"_sum") - total(before, name+"_sum")) / n * float64(time.Second))
}

// destroysSet: a protected chain names an ipset while the standby follows. The set is free once
// its owner has removed the rule.
func (s *sides) destroysSet() {
	s.Helper()
	run := func(name string, args ...string) {
		s.Helper()
		_, err := s.node.space.run(s.Context(), "", name, args...)
		s.Must(err)
	}
	run("ipset", "create", "owned", "hash:ip")
	run("iptables", "-w", "-t", "nat", "-N", "KUBE-LOAD-BALANCER")
	run("iptables", "-w", "-t", "nat", "-A", "KUBE-LOAD-BALANCER", "-m", "set", "--match-set", "owned", "dst", "-j", "RETURN")
	run("iptables", "-w", "-t", "nat", "-A", "PREROUTING", "-j", "KUBE-LOAD-BALANCER")
	s.Until("the standby to have the chain", func() error {
		_, err := s.node.space.run(s.Context(), "", "nft", "list", "chain", "ip", "canaryd-standby", "KUBE-LOAD-BALANCER")
		return err
	})
	run("iptables", "-w", "-t", "nat", "-D", "PREROUTING", "-j", "KUBE-LOAD-BALANCER")
	run("iptables", "-w", "-t", "nat", "-F", "KUBE-LOAD-BALANCER")
	run("iptables", "-w", "-t", "nat", "-X", "KUBE-LOAD-BALANCER")
	run("ipset", "destroy", "owned")
}

// same waits until both nodes have the same rules.
func (s *sides) same() {
	s.Helper()
	testkit.Until(s.T, "the rules of both nodes to be the same", func() error {
		want, err := s.bare.space.read(s.Context(), s.kind.mode)
		s.Must(err)
		got, err := s.node.space.read(s.Context(), s.kind.mode)
		s.Must(err)
		d := compare(want, got)
		if d.none() {
			return nil
		}
		if s.kind.mode == inNFTables {
			s.town.synced(s.T, s.node, s.bare)
		}
		return errors.New(d.String())
	})
}
