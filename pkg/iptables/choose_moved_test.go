package iptables

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestMoved: events that may change the choice move the evidence. Looking for
// them creates no table and executes nothing.
func TestMoved(t *testing.T) {
	onBoth(t, func(t *testing.T, ours Backend, family rules.Family) {
		other := ours.Other()
		nstest.NeedProgram(t, program(other, family, ""))
		k := openKernel(t, Config{Backend: ours})
		last := k.Evidence()
		moved := func() bool {
			t.Helper()
			before := tablesOf(t, NFT) + tablesOf(t, Legacy)
			var moved bool
			err := without(t, func() (err error) { moved, err = k.Moved(t.Context(), last); return err }, nstest.LackExec())
			if err != nil {
				t.Fatal(err)
			}
			if after := tablesOf(t, NFT) + tablesOf(t, Legacy); after != before {
				t.Errorf("looking created tables: %s, before %s", after, before)
			}
			return moved
		}
		gather := func() {
			t.Helper()
			var err error
			if last, err = k.GatherEvidence(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for _, step := range []struct {
			name string
			do   []string // "ours" and "other" are programs
			want bool
			// The evidence afterwards, although ours was forced.
			mixed   bool
			against bool
		}{
			{"nothing", nil, false, false, false},
			{"our first rules", []string{"ours -A INPUT"}, true, false, false},
			{"nothing since", nil, false, false, false},
			{"a table of the other's, a hint chain in it", []string{"other -t mangle -N KUBE-IPTABLES-HINT"}, true, false, true},
			{"our own rules, beside a hint only", []string{"ours -A INPUT"}, false, false, true},
			{"a rule of the other's", []string{"other -A INPUT"}, true, true, true},
			{"our own rules", []string{"ours -A INPUT"}, false, true, true},
			{"nothing again", nil, false, true, true},
			{"the other's last rule", []string{"other -F", "other -t mangle -X"}, true, false, false},
			{"both flushed", []string{"ours -F"}, true, false, false},
			{"the other's rules beside nothing", []string{"other -A INPUT"}, true, false, true},
			{"our first rules beside them", []string{"ours -A INPUT", "ours -A INPUT", "ours -A INPUT"}, true, true, false},
			{"our next ones", []string{"ours -A INPUT"}, true, true, false},
			{"our hint chain", []string{"ours -t mangle -N KUBE-IPTABLES-HINT"}, true, true, false},
			{"our rules beside our hint chain", []string{"ours -A INPUT"}, false, true, false},
		} {
			for _, line := range step.do {
				backend, line := ours, strings.TrimPrefix(line, "ours ")
				if rest, ok := strings.CutPrefix(line, "other "); ok {
					backend, line = other, rest
				}
				iptablesCommand(t, backend, family, line)
			}
			if got := moved(); got != step.want {
				t.Errorf("%s: moved %t, want %t", step.name, got, step.want)
			}
			gather()
			if last.Backend != ours || last.Mixed != step.mixed || strings.Contains(last.Reason, "against") != step.against {
				t.Errorf("%s: %s, mixed %t, %q; want %s, %t, against the evidence %t", step.name, last.Backend, last.Mixed, last.Reason, ours, step.mixed, step.against)
			}
		}
	})
}

// TestMovedUnknown: an unreadable backend is an error, and moves nothing.
func TestMovedUnknown(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: NFT})
		err := without(t, func() error {
			dropNetAdmin(t)
			moved, err := k.Moved(t.Context(), k.Evidence())
			if moved {
				t.Error("it moved though it cannot be read")
			}
			return err
		})
		if !errors.Is(err, nft.ErrPermission) {
			t.Errorf("got %v, want ErrPermission", err)
		}
	})
}

// TestMovedCosts: a look at the other backend costs next to nothing, however much
// that holds. Only the processor's time counts: waits depend on x_tables' mutex,
// which all network namespaces share.
func TestMovedCosts(t *testing.T) {
	onBoth(t, func(t *testing.T, ours Backend, family rules.Family) {
		other, many := ours.Other(), testkit.Size(6_000, 20_000)
		nstest.NeedProgram(t, program(other, family, ""))
		nstest.Command(t, "sh", "-ec", strings.ReplaceAll(manyRules(other, many), "PRE", familyPrefix(family)))
		k := openKernel(t, Config{Backend: ours})
		look := processorTime(t, func() error {
			moved, err := k.Moved(t.Context(), k.Evidence())
			if moved {
				return errors.New("it moved though nobody wrote")
			}
			return err
		})
		all := processorTime(t, func() error { _, err := k.GatherEvidence(t.Context()); return err })
		t.Logf("moved %s, all %s, with %d rules in %s %v", look, all, many, other, family)
		// Measured: a twentieth to a thirtieth.
		if look*10 > all && !testkit.Raced {
			t.Errorf("a look takes %s, all of the evidence %s: want a tenth at most", look, all)
		}
	})
}

// processorTime returns this process's computing time during do. It takes the
// least of some runs, because other goroutines compute too.
func processorTime(t *testing.T, do func() error) time.Duration {
	t.Helper()
	now := func() time.Duration {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now); err != nil {
			t.Fatal(err)
		}
		return time.Duration(now.Nano())
	}
	least := time.Duration(math.MaxInt64)
	for range 5 {
		before := now()
		if err := do(); err != nil {
			t.Fatal(err)
		}
		least = min(least, now()-before)
	}
	return least
}

// TestReasonIsRenewed: canaryd starts before kubelet and kube-proxy. When they
// have written, it must name the evidence that decides by then.
func TestReasonIsRenewed(t *testing.T) {
	onBoth(t, func(t *testing.T, ours Backend, family rules.Family) {
		first := "iptables' tables hold no rules, and nft is the default"
		if ours == Legacy { // legacy is chosen only if it holds something
			iptablesCommand(t, ours, family, "-t nat -A OUTPUT")
			first = "legacy holds more rules: legacy 1, nft 0"
		}
		k := openKernel(t, Config{Families: []rules.Family{family}})
		last := k.Evidence()
		if last.Backend != ours || last.Reason != first {
			t.Fatalf("at the start it is %s: %s", last.Backend, last.Reason)
		}
		rulesAre := map[Backend]string{NFT: "nft holds more rules: nft 1, legacy 0", Legacy: "legacy holds more rules: legacy 2, nft 0"}
		for _, step := range []struct{ command, reason string }{
			{"-A INPUT", rulesAre[ours]},
			{"-t mangle -N KUBE-IPTABLES-HINT", "kubelet's hint chain is in " + string(ours) + " only"},
		} {
			iptablesCommand(t, ours, family, step.command)
			moved, err := k.Moved(t.Context(), last)
			if err != nil || !moved {
				t.Fatalf("after %q it moved: %t, %v", step.command, moved, err)
			}
			if last, err = k.GatherEvidence(t.Context()); err != nil {
				t.Fatal(err)
			}
			if last.Reason != step.reason {
				t.Errorf("after %q the reason is %q, want %q", step.command, last.Reason, step.reason)
			}
		}
	})
}
