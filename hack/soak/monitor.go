package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// proxyCanary is the chain that kube-proxy watches.
const proxyCanary = "KUBE-PROXY-CANARY"

// watched are the tables with that chain; the monitor polls the first.
var watched = [...]rules.TableName{rules.Mangle, rules.Nat, rules.Filter}

// A monitor acts like Monitor in kube-proxy's iptables runner (k8s.io/kubernetes
// pkg/util/iptables, 1.36). It plants an empty chain in three tables and checks mangle's at
// each poll. When that is gone, it waits until the others are gone, too, and kube-proxy writes
// all of its rules again. All times are shortened by the same factor; the real ones are 30 s
// between checks, and then 5 s in steps of 0.2 s. Host ports are not kube-proxy's, so they stay
// lost.
type monitor struct {
	lab    *lab
	cancel context.CancelFunc
	done   sync.WaitGroup
	err    error // once done
}

func startMonitor(ctx context.Context, l *lab) *monitor {
	ctx, cancel := context.WithCancel(ctx)
	m := &monitor{lab: l, cancel: cancel}
	m.plant(ctx)
	m.done.Go(func() { m.run(ctx) })
	return m
}

func (m *monitor) run(ctx context.Context) {
	poll := m.lab.Poll
	for {
		for m.stands(ctx, watched[0]) {
			if sleep(ctx, poll) != nil {
				return
			}
		}
		for start := time.Now(); time.Since(start) < poll/6 && (m.stands(ctx, watched[1]) || m.stands(ctx, watched[2])); {
			if sleep(ctx, poll/150) != nil {
				return
			}
		}
		m.lab.owner.Lock()
		m.plant(ctx)
		err := m.sync(ctx)
		m.lab.owner.Unlock()
		if err != nil && ctx.Err() == nil {
			m.err = err
			return
		}
		if sleep(ctx, poll) != nil {
			return
		}
	}
}

// stands executes the command of kube-proxy's ChainExists.
func (m *monitor) stands(ctx context.Context, t rules.TableName) bool {
	return m.iptables(ctx, t, "-S", proxyCanary, "1") == nil
}

func (m *monitor) plant(ctx context.Context) {
	for _, t := range watched {
		_ = m.iptables(ctx, t, "-N", proxyCanary) // an error means that it exists
	}
}

func (m *monitor) iptables(ctx context.Context, t rules.TableName, args ...string) error {
	words := append([]string{"-w", "5", "-t", string(t)}, args...)
	return exec.CommandContext(ctx, "iptables-"+string(m.lab.Backend), words...).Run()
}

// sync writes all of kube-proxy's chains, and its missing jumps.
func (m *monitor) sync(ctx context.Context) error {
	now, err := scenario.Tables(ctx, m.lab.programs, rules.IPv4)
	if err != nil {
		return err
	}
	missing, err := m.lab.MissingJumps(now)
	if err != nil {
		return err
	}
	text, err := m.lab.Sync(nil)
	if err != nil {
		return err
	}
	return m.lab.programs.RestoreNoflush(ctx, rules.IPv4, text+missing)
}

func (m *monitor) learn(_ context.Context, write func() error) error { return write() }

func (m *monitor) settled(context.Context) error { return nil }

// heals gives the monitor the time of two polls.
func (m *monitor) heals(ctx context.Context) error { return sleep(ctx, 2*m.lab.Poll) }

// startOver loads all rules again, including host ports, so that the next flush finds them
// complete.
func (m *monitor) startOver(ctx context.Context) error {
	w := &m.lab.windows[len(m.lab.windows)-1]
	w.To, w.Cut = clock(), true
	m.lab.owner.Lock()
	defer m.lab.owner.Unlock()
	if err := scenario.Wipe(ctx, m.lab.programs, rules.IPv4); err != nil {
		return fmt.Errorf("starting over: %w", err)
	}
	m.plant(ctx)
	if err := m.lab.load(ctx); err != nil {
		return fmt.Errorf("starting over: %w", err)
	}
	return sleep(ctx, time.Second)
}

// forgetUnanswered makes conntrack forget the flows of this namespace that had no answer.
// conntrack keeps untranslated ones for two minutes, and a connection that gets the port of one
// (1 in 100 did) has no answer either. canaryd ends them itself, kube-proxy does not.
func forgetUnanswered() error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return fmt.Errorf("opening conntrack: %w", err)
	}
	defer conn.Close()
	// From linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h. A deletion takes a
	// status since Linux 5.18.
	const (
		ctDelete      = 2
		ctaStatus     = 3
		ctaStatusMask = 26
		seenReply     = 1 << 1
	)
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.BigEndian
	e.Uint32(ctaStatus, 0)
	e.Uint32(ctaStatusMask, seenReply)
	attributes, err := e.Encode()
	if err != nil {
		return err
	}
	_, err = conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_CTNETLINK<<8 | ctDelete, Flags: netlink.Request | netlink.Acknowledge},
		Data:   append([]byte{unix.AF_UNSPEC, 0, 0, 0}, attributes...), // struct nfgenmsg
	})
	if err != nil {
		return fmt.Errorf("deleting conntrack's flows without an answer: %w", err)
	}
	return nil
}

func (m *monitor) stop() (time.Duration, error) {
	m.cancel()
	m.done.Wait()
	if m.err != nil && !strings.Contains(m.err.Error(), "killed") {
		return 0, fmt.Errorf("the monitor: %w", m.err)
	}
	return 0, nil
}
