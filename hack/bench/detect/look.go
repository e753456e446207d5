package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Looks compares, in the same minute, the cost of a look at all tables of both families with
// the cost of executing iptables.
type Looks struct {
	Tick Cost `json:"tick"` // without a hint: Stamp, which has not moved
	Hint Cost `json:"hint"` // after a write: Stamp, then Probe of all marks
	Exec Cost `json:"exec"` // go-iptables' ChainExists for each canary
}

// A Cost is the cost of one look, in microseconds.
type Cost struct {
	Wall Spread `json:"wallMicroseconds"`
	CPU  Spread `json:"cpuMicroseconds"`
}

// A looker takes looks of each kind.
type looker struct {
	kernel *iptables.Kernel
	marks  canary.Marks
	exec   map[rules.Family]*goiptables.IPTables
}

func newLooker(ctx context.Context, n *node, backend iptables.Backend) (*looker, error) {
	marks, err := n.marks()
	if err != nil {
		return nil, err
	}
	l := &looker{marks: marks, exec: map[rules.Family]*goiptables.IPTables{}}
	for f, protocol := range map[rules.Family]goiptables.Protocol{rules.IPv4: goiptables.ProtocolIPv4, rules.IPv6: goiptables.ProtocolIPv6} {
		prefix := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[f]
		// The child takes otherLock, because the real lock would wake the daemon.
		if l.exec[f], err = goiptables.New(goiptables.IPFamily(protocol), goiptables.Path(prefix+string(backend))); err != nil {
			return nil, err
		}
	}
	l.kernel, err = iptables.Open(ctx, iptables.Config{Backend: backend, LockFile: lockFile})
	return l, err
}

// tick is a look without a hint: if the stamps have not moved, it reads nothing else. On legacy
// that is valid for 30 s, and then the tables are walked.
func (l *looker) tick(ctx context.Context) error {
	for _, f := range rules.Families() {
		if _, err := l.kernel.Stamp(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// hint is a look after a write, with its verdicts.
func (l *looker) hint(ctx context.Context) error {
	for _, f := range rules.Families() {
		if _, err := l.kernel.Stamp(ctx, f); err != nil {
			return err
		}
		seen, err := l.kernel.Probe(ctx, f, l.marks.Places(f, canary.DefaultChain))
		if err != nil {
			return err
		}
		if !l.marks.Standing(f, canary.DefaultChain, seen) {
			return fmt.Errorf("the marks of %s do not stand: %v", f, l.marks.Verdicts(f, canary.DefaultChain, seen))
		}
	}
	return nil
}

// execute acts like kube-proxy's Monitor for its one canary, for each table of each family.
func (l *looker) execute(context.Context) error {
	for _, f := range rules.Families() {
		for _, t := range protect.Always() {
			there, err := l.exec[f].ChainExists(string(t), canary.DefaultChain)
			if err != nil {
				return err
			}
			if !there {
				return errors.New("ChainExists does not find the canary")
			}
		}
	}
	return nil
}

// compare measures rounds of each kind of look, interleaved.
func (l *looker) compare(ctx context.Context, rounds int) (Looks, error) {
	kinds := []struct {
		look func(context.Context) error
		// repeat is how many times a round repeats a quick look, so that the cost and the
		// resolution of the clocks do not matter.
		repeat    int
		wall, cpu []time.Duration
	}{{look: l.tick, repeat: 20}, {look: l.hint, repeat: 5}, {look: l.execute, repeat: 1}}
	for range rounds {
		for i := range kinds {
			k := &kinds[i]
			wall, cpu, err := cost(ctx, k.look, k.repeat)
			if err != nil {
				return Looks{}, err
			}
			k.wall, k.cpu = append(k.wall, wall), append(k.cpu, cpu)
		}
	}
	of := func(i int) Cost { return Cost{spread(kinds[i].wall), spread(kinds[i].cpu)} }
	return Looks{of(0), of(1), of(2)}, ctx.Err()
}

// cost returns the mean wall time and CPU time of repeat looks, children included.
func cost(ctx context.Context, look func(context.Context) error, repeat int) (wall, cpu time.Duration, err error) {
	before, err := usage()
	if err != nil {
		return 0, 0, err
	}
	start := time.Now()
	for range repeat {
		if err := look(ctx); err != nil {
			return 0, 0, err
		}
	}
	wall = time.Since(start)
	after, err := usage()
	return wall / time.Duration(repeat), (after - before) / time.Duration(repeat), err
}

func usage() (time.Duration, error) {
	own, err := cpuOf(0)
	if err != nil {
		return 0, err
	}
	children, err := childrenCPU()
	return own + children, err
}
