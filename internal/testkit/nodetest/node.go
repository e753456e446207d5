// Package nodetest gives each test a node of its own. A node is a network namespace with the
// rules of a Kubernetes node, in which the built canaryd runs.
//
// TestMain calls [Main], which builds canaryd. A test calls [In], [On] or [OnBoth], which pass a
// [Node] to it. The Node's methods run canaryd and other programs, and end the test on a failure.
package nodetest

import (
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Node is a network namespace of its own in which canaryd is tested.
type Node struct {
	*testing.T
	Programs scenario.Programs
	Families []rules.Family // the families that Save reads
	Env      []string       // further environment variables of the daemon
	Under    []string       // a command that starts the daemon; empty: none
	Protects func(chain string) bool

	logs   int
	newest atomic.Pointer[Process] // the daemon that was started last
}

// OnBoth runs body for each backend, in a node of its own.
func OnBoth(t *testing.T, body func(n *Node)) {
	t.Parallel()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { On(t, backend, body) })
	}
}

// On runs body in a node of its own, in parallel with other tests.
func On(t *testing.T, backend iptables.Backend, body func(n *Node)) {
	t.Parallel()
	In(t, backend, body)
}

// In runs body in a node of its own.
func In(t *testing.T, backend iptables.Backend, body func(n *Node)) {
	t.Helper()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
		selector, err := protect.NewSelector(scenario.Protect)
		if err != nil {
			t.Fatal(err)
		}
		body(&Node{T: t, Programs: scenario.Programs{With: backend}, Families: rules.Families(), Protects: selector.Protects})
	})
}

// Must fails the test if there is an error.
func (n *Node) Must(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// Load writes the rules of a Kubernetes node.
func (n *Node) Load() {
	n.Helper()
	n.Must(scenario.Load(n.Context(), n.Programs, rules.Families()...))
}

// Flush runs iptables -F on every table of both families.
func (n *Node) Flush() {
	n.Helper()
	for _, f := range rules.Families() {
		for _, t := range protect.Always() {
			n.Must(n.Programs.Flush(n.Context(), f, t, ""))
		}
	}
}

// FlushUnlocked flushes every table of both families with a program that uses another lock than
// all others, one command for each family.
func (n *Node) FlushUnlocked() {
	n.Helper()
	programs, text := n.Programs, ""
	programs.Lock = "/run/another.lock"
	for _, t := range protect.Always() {
		text += "*" + string(t) + "\n-F\nCOMMIT\n"
	}
	for _, f := range rules.Families() {
		n.Must(programs.RestoreNoflush(n.Context(), f, text))
	}
}

// HoldLock starts a process that holds the xtables lock for that time, or until it is killed.
func (n *Node) HoldLock(long time.Duration) *exec.Cmd {
	n.Helper()
	// With --no-fork flock becomes sleep, and is ended with it.
	holder := exec.CommandContext(n.Context(), "flock", "--no-fork", "/run/xtables.lock", "sleep", fmt.Sprint(long.Seconds()))
	n.Must(holder.Start())
	n.Until("flock to hold the lock", func() error {
		fd, err := unix.Open("/run/xtables.lock", unix.O_RDONLY, 0)
		n.Must(err)
		defer unix.Close(fd)
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return errors.New("it is free")
		}
		return nil
	})
	return holder
}

// Save returns the content of all tables, without counters.
func (n *Node) Save() map[rules.Family]rules.Ruleset {
	n.Helper()
	all := map[rules.Family]rules.Ruleset{}
	for _, f := range n.Families {
		set, err := scenario.Tables(n.Context(), n.Programs, f)
		n.Must(err)
		all[f] = set
	}
	return all
}

// Lines returns one line for each wanted chain and rule, chains by name and rules in their order.
func (n *Node) Lines(wantChain func(t rules.TableName, name string) bool, wantRule func(rules.Rule) bool) []string {
	n.Helper()
	return lines(n.Save(), wantChain, wantRule)
}

func lines(saved map[rules.Family]rules.Ruleset, wantChain func(t rules.TableName, name string) bool, wantRule func(rules.Rule) bool) []string {
	var lines []string
	for f, set := range saved {
		for t, table := range set {
			for _, c := range table.Chains {
				builtin := rules.Builtin(t, c.Name)
				if !builtin && !wantChain(t, c.Name) {
					continue
				}
				where := fmt.Sprintf("%s %s %s", f, t, c.Name)
				if !builtin {
					lines = append(lines, where)
				}
				i := 0
				for _, r := range c.Rules {
					if !builtin || wantRule(r) {
						lines = append(lines, fmt.Sprintf("%s %04d %s", where, i, r.Spec))
						i++
					}
				}
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// Protected returns the protected chains, their rules, and the jumps into them.
func (n *Node) Protected() []string {
	n.Helper()
	protected, _ := n.Divided()
	return protected
}

// Foreign returns the chains and rules that are neither protected nor a canary.
func (n *Node) Foreign() []string {
	n.Helper()
	_, foreign := n.Divided()
	return foreign
}

// Divided returns the lists of Protected and Foreign from one listing.
func (n *Node) Divided() (protected, foreign []string) {
	n.Helper()
	saved := n.Save()
	return lines(saved,
			func(_ rules.TableName, name string) bool { return n.Protects(name) },
			func(r rules.Rule) bool { return n.Protects(r.Target) }),
		lines(saved,
			func(_ rules.TableName, name string) bool {
				return !n.Protects(name) && !strings.HasSuffix(name, "-CANARY")
			},
			func(r rules.Rule) bool { return !n.Protects(r.Target) && !canary.IsMark(r) })
}

// Marks returns canaryd's own chains and rules.
func (n *Node) Marks() []string {
	n.Helper()
	return n.Lines(isCanary, canary.IsMark)
}

func isCanary(_ rules.TableName, name string) bool { return name == canary.DefaultChain }

// marks returns canaryd's own chains and rules of a family.
func marks(f rules.Family, set rules.Ruleset) []string {
	return lines(map[rules.Family]rules.Ruleset{f: set}, isCanary, canary.IsMark)
}

// Same fails the test, without ending it, if the lists differ.
func (n *Node) Same(what string, want, got []string) {
	n.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		n.Errorf("%s (-want +got):\n%s", what, diff)
	}
}
