// Package faults tests the built canaryd when a loss meets another failure. That is a failure
// of the restoring program, the lock, the kernel's answers, file descriptors, or the disk.
//
// It also tests the next canaryd after a kill during a replay, after a flush without a canaryd,
// and with damaged files on disk.
package faults

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

func TestMain(m *testing.M) {
	nodetest.SideBySide()
	os.Exit(nodetest.Main(m))
}

// looks is the number of canaryd's polls during a fault. Between two polls is a whole interval,
// in which canaryd tries a replay several times.
const looks = 2

// answers is the number of requests to canaryd while a replay hangs.
const answers = 10

// A node is a node with a running canaryd.
type node struct {
	*nodetest.Node
	daemon    *nodetest.Process
	protected []string // at the start, and again at the end of each fault
}

func start(n *nodetest.Node, flags ...string) node {
	n.Helper()
	return node{n, n.Start(flags...), n.Protected()}
}

// A fault is a failure for a while.
type fault struct {
	name  string
	begin func() func() // begins the fault, and returns the function that ends it
	flush func()        // nil for iptables -F in every table
	while func()        // checks more before the fault ends; nil: nothing
	deaf  bool          // canaryd cannot answer meanwhile
	hangs bool          // a program of a replay hangs, and canaryd does not poll
	heals bool          // canaryd has another way, and heals during the fault
	// either: canaryd may heal during the fault, or not.
	either bool
}

// during flushes all tables during a fault. Meanwhile the daemon answers, is not ready, and
// reports no missing rule as restored. After the fault all rules are back.
func (n node) during(f fault) {
	n.Helper()
	records := len(n.Status().Flushes)
	before, said := n.Metrics(), len(n.daemon.Log())
	end := f.begin()
	left := n.flushAtOnce(f.flush)
	told := func() error {
		// A write may succeed although it reported a failure; the next try finds that out.
		if s := n.Status(); len(s.Flushes) != records+1 || s.Flushes[0].Outcome == "failed" {
			return fmt.Errorf("flush records %+v", s.Flushes)
		}
		return nodetest.Ready()
	}
	switch {
	case f.either:
		n.neverWrong(f, before)
	case f.heals:
		n.Until(f.name+": the rules to be back while it lasts", told)
		n.Same(f.name+": protected rules while it lasts", n.protected, n.Protected())
	default:
		n.missing(f, before, said)
	}
	if f.while != nil {
		f.while()
	}
	end()
	n.Until(f.name+": the rules to be back", told)
	protected, foreign := n.Divided()
	n.Same(f.name+": protected rules", n.protected, protected)
	n.Same(f.name+": foreign rules", left, foreign)
	if got := n.Metrics()["rules_absent_seconds{}"] - before["rules_absent_seconds{}"]; got != 1 {
		n.Errorf("%s: %v losses have ended, want 1", f.name, got)
	}
}

// flushAtOnce flushes while canaryd is stopped, so that many commands are one flush. It returns
// the remaining rules of others. canaryd may hold the lock.
func (n node) flushAtOnce(flush func()) []string {
	n.Helper()
	if flush == nil {
		flush = n.FlushUnlocked
	}
	n.daemon.Suspend()
	flush()
	left := n.Foreign()
	n.daemon.Signal(syscall.SIGCONT)
	return left
}

// some returns a condition that holds when a number is not 0.
func some(number func() float64) func() error {
	return func() error {
		if number() == 0 {
			return errors.New("it is 0")
		}
		return nil
	}
}

// notReady returns an error if the daemon says that every table is intact.
func notReady() error {
	if nodetest.Ready() == nil {
		return errors.New("it is called ready")
	}
	return nil
}

// neverWrong checks during the fault that the status does not call the node healthy too early.
func (n node) neverWrong(f fault, before map[string]float64) {
	n.Helper()
	const flushes = "flush_events_total{}"
	n.Stays(looks, f.name+": that the node is not called whole before it is", func() error {
		if n.Metrics()[flushes] > before[flushes] && nodetest.Ready() == nil {
			n.Same(f.name+": protected rules of a node that is called whole", n.protected, n.Protected())
		}
		return nil
	})
}

// missing checks during the fault that no face calls the node healthy.
func (n node) missing(f fault, before map[string]float64, said int) {
	n.Helper()
	if f.deaf {
		n.Until(f.name+": it to be logged", func() error {
			if log := n.daemon.Log()[said:]; !strings.Contains(log, "too many open files") {
				return fmt.Errorf("the log goes on with %q", log)
			}
			return nil
		})
		if slices.Equal(n.protected, n.Protected()) {
			n.Errorf("%s: nothing is missing", f.name)
		}
		return
	}
	n.Until(f.name+": it to show", notReady)
	still := func() error {
		if err := notReady(); err != nil {
			return err
		}
		if _, err := nodetest.Fetch("/healthz"); err != nil {
			return fmt.Errorf("the loop stands still: %w", err)
		}
		return nil
	}
	if f.hangs {
		n.Until("a program to hang", hanging)
		for range answers {
			n.Must(still())
		}
	} else {
		n.Stays(looks, f.name+": that the node is not called whole", still)
	}
	if got := n.Metrics()["rules_absent_seconds{}"] - before["rules_absent_seconds{}"]; got != 0 {
		n.Errorf("%s: something counts as back", f.name)
	}
	if slices.Equal(n.protected, n.Protected()) {
		n.Errorf("%s: nothing is missing", f.name)
	}
}
