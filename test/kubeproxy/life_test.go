package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A life is a node with canaryd and a changing kube-proxy, next to undisturbed kube-proxies of
// both modes.
type life struct {
	*nodetest.Node
	kind  kind
	town  *town
	space *space
	proxy *proxy
	calm  map[string]*proxy // by mode
	hand  *hand
	seen  int // records that were checked
	lines []string
}

// TestLife: kube-proxy is restarted, killed, cleaned up and started in the other mode. canaryd
// takes none of that for a flush, and restores only rules with an owner.
func TestLife(t *testing.T) {
	onKinds(t, func(n *nodetest.Node, k kind) {
		all := newSpaces(n.T, k.backend, "node", "calm-iptables", "calm-nftables")
		a := newAPI()
		l := &life{Node: n, kind: k, space: all[0], town: newTown(a, rand.New(rand.NewPCG(seed(n.T), 3)), 12),
			hand: &hand{}}
		a.serve(n.T, all...)
		l.calm = map[string]*proxy{inIPTables: startProxy(n.T, all[1], inIPTables), inNFTables: startProxy(n.T, all[2], inNFTables)}
		l.proxy = startProxy(n.T, all[0], k.mode)
		guardNode(n)
		other := map[string]string{inIPTables: inNFTables, inNFTables: inIPTables}[k.mode]
		for _, step := range []struct {
			name string
			do   func()
		}{
			{"restart", l.restart},
			{"killed, and 20 s without it", l.without},
			{"--cleanup", l.cleanup},
			{"started in the other mode", func() { l.change(other) }},
			{"back", func() { l.change(k.mode) }},
			{"--cleanup of both", l.cleanup},
		} {
			start := time.Now()
			step.do()
			records, false := l.records()
			l.lines = append(l.lines, fmt.Sprintf("  %-28s %5.1f s, %d flush records, %d of no flush", step.name, time.Since(start).Seconds(), records, false))
		}
		report(n.T, append([]string{"kube-proxy's own life: " + k.name}, l.lines...)...)
	})
}

// stir makes some changes, so that old rules are wrong.
func (l *life) stir() {
	for range 10 {
		l.town.change()
	}
}

// records returns the number of new records, and how many of them are about no flush.
func (l *life) records() (all, falsely int) {
	l.Helper()
	records := l.Status().Flushes
	for _, r := range records[:len(records)-l.seen] {
		if l.hand.during(r.Time, r.Time.Add(time.Duration(r.NoticedSeconds*float64(time.Second)))) == nil {
			falsely++
			l.Errorf("a record of a flush that was none: %+v", r)
		}
	}
	all, l.seen = len(records)-l.seen, len(records)
	return all, falsely
}

// flush takes all rules, of iptables and of native tables.
func (l *life) flush() {
	l.Helper()
	start := time.Now()
	for _, one := range scenario.All() {
		if one.Name == "flush-delete-all" {
			l.Must(one.Do(l.Context(), l.space.programs))
		}
	}
	_, err := l.space.run(l.Context(), "flush ruleset\n", "nft", "-f", "-")
	l.Must(err)
	l.hand.blows = append(l.hand.blows, blow{"everything", start, time.Now()})
}

// equal waits until the node has the rules of a mode as an undisturbed kube-proxy has them, and
// none of the other mode.
func (l *life) equal(mode string) {
	l.Helper()
	testkit.Until(l.T, "the rules of "+mode+" mode", func() error {
		err := l.differs(mode)
		if err != nil && mode == inNFTables {
			l.town.synced(l.T, l.proxy, l.calm[mode])
		}
		return err
	})
}

// differs returns the errors in the node's rules, which must be those of a mode and none of the
// other.
func (l *life) differs(mode string) error {
	l.Helper()
	for m, calm := range l.calm {
		want := content{}
		if m == mode {
			want = l.read(calm.space, m)
		}
		if d := compare(want, l.read(l.space, m)); !d.none() {
			return errors.New(m + " mode: " + d.String())
		}
	}
	return nil
}

// read returns the rules of a mode, without KUBE-FIREWALL. kubelet writes that too, and
// kube-proxy --cleanup leaves it, which changes the place of its jumps.
func (l *life) read(s *space, mode string) content {
	l.Helper()
	got, err := s.read(context.WithoutCancel(l.Context()), mode)
	l.Must(err)
	for where, lines := range got {
		if mode != inIPTables {
			break
		}
		lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasSuffix(line, "-j KUBE-FIREWALL") })
		builtin := strings.HasSuffix(where, "PUT") // INPUT and OUTPUT have these jumps
		if got[where] = lines; strings.HasSuffix(where, " filter KUBE-FIREWALL") || builtin && len(lines) == 0 {
			delete(got, where)
		}
	}
	return got
}

// stays fails the test if the rules change while canaryd polls three times.
func (l *life) stays(what string, want content) {
	l.Helper()
	l.Stays(3, what+", that rules stay", func() error {
		if d := compare(want, l.read(l.space, l.proxy.mode)); !d.none() {
			return errors.New(d.String())
		}
		return nil
	})
}

func (l *life) restart() {
	l.equal(l.kind.mode)
	l.proxy.end(syscall.SIGTERM)
	l.stir()
	l.proxy = startProxy(l.T, l.space, l.kind.mode)
	l.equal(l.kind.mode)
	if records, _ := l.records(); records > 0 {
		l.Errorf("a restart of kube-proxy made %d flush records", records)
	}
}

// without: a killed kube-proxy corrects nothing, so the rules that canaryd restores must be
// right.
func (l *life) without() {
	l.proxy.end(syscall.SIGKILL)
	l.Polled(4) // until its last removal is learned
	before := l.read(l.space, l.kind.mode)
	for range 3 {
		l.flush()
		testkit.Until(l.T, "the rules of before", func() error {
			if d := compare(before, l.read(l.space, l.kind.mode)); !d.none() {
				return errors.New(d.String())
			}
			return nodetest.Ready()
		})
		l.stays("without a kube-proxy", before)
		l.Polled(3)
	}
	l.stir()
	l.proxy = startProxy(l.T, l.space, l.kind.mode)
	l.equal(l.kind.mode)
}

// cleanup: rules that kube-proxy removed stay removed.
func (l *life) cleanup() {
	l.proxy.end(syscall.SIGTERM)
	cleanUp(l.T, l.space)
	if err := l.differs("no"); err != nil {
		l.Fatalf("kube-proxy --cleanup left something: %v", err)
	}
	for _, polls := range []int{0, 3} { // before a removal is learned, and after that
		l.Polled(polls)
		if l.Programs.With == iptables.Legacy {
			l.Looked() // without notifications only a look separates the cleanup from the flush
		}
		l.flush()
		l.Stays(2, "that a flush after kube-proxy --cleanup brings nothing back", func() error { return l.differs("no") })
	}
}

// change starts kube-proxy in a mode, and flushes everything.
func (l *life) change(mode string) {
	l.proxy.end(syscall.SIGTERM)
	l.stir()
	l.proxy = startProxy(l.T, l.space, mode)
	l.equal(mode)
	l.Polled(4) // until its last write is learned
	l.Until("canaryd to be ready", nodetest.Ready)
	before := l.read(l.space, mode)
	l.flush()
	testkit.Until(l.T, "the rules of "+mode+" mode after a flush", func() error { return l.differs(mode) })
	l.stays("after a flush in another mode", before)
}
