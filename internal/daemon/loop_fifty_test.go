package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestNoReplayPilesUp: replays fail for various reasons, and canaryd tries often. No rule and
// no mark is doubled in the end.
func TestNoReplayPilesUp(t *testing.T) {
	const jump = "-m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES"
	faults := map[string]func(r *rig){
		"it lies":                      func(r *rig) { r.fake.Lie(-1) },
		"it swallows a jump":           func(r *rig) { r.fake.Swallow(jump) },
		"a jump reads as another":      func(r *rig) { r.fake.Misread(jump, "-p tcp -j KUBE-SERVICES") },
		"a jump reads as a plain rule": func(r *rig) { r.fake.Misread(jump, "-p tcp -j ACCEPT") },
		"a jump and a rule read as others": func(r *rig) {
			r.fake.Misread(jump, "-j ACCEPT")
			r.fake.Swallow("-j KUBE-FORWARD")
		},
		"each proof fails": func(r *rig) {
			r.fake.BeforeRestore(func() {
				r.fake.FailReads(errors.New("out of memory"))
				time.AfterFunc(time.Second, func() { r.fake.FailReads(nil) })
			})
		},
		"a table cannot be read": func(r *rig) { r.fake.DropTableFromReads(rules.IPv4, rules.Nat, errors.New("incompatible")) },
		"it is flushed in each restore": func(r *rig) {
			r.fake.BeforeRestore(func() { must(r.t, r.fake.As(77, "flusher").Bypassing().Flush(rules.IPv4, rules.Nat, "")) })
		},
		"another process writes in each restore": func(r *rig) {
			n := 0
			r.fake.BeforeRestore(func() {
				n++
				must(r.t, r.fake.As(77, "owner").Bypassing().RestoreNoflush(rules.IPv4, fmt.Sprintf("*nat\n:corp - [0:0]\n-A corp -m mark --mark %d -j RETURN\nCOMMIT\n", n)))
			})
		},
	}
	for _, reason := range iptables.Reasons() {
		faults["it is refused: "+string(reason)] = func(r *rig) { r.fake.FailRestores(-1, reason) }
	}
	for k := range protect.Always() {
		faults[fmt.Sprintf("table %d is refused", k+1)] = func(r *rig) {
			r.fake.BeforeRestore(func() { r.fake.PartialCommit(k + 1) })
		}
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := run(t, ipvsFake(t, backend), setup{})
				r.settled()
				before := countRules(r.fake.Save(rules.IPv4))
				fault(r)
				for _, table := range protect.Always() {
					must(t, r.fake.As(76, "flusher").Bypassing().Flush(rules.IPv4, table, ""))
				}
				for tries := r.fake.Begins(); r.fake.Begins()-tries < testkit.Size(12, 50); {
					r.after(time.Minute)
					r.hints.Give(watch.SourceLock)
					if r.d.Status().LossSince.IsZero() { // the fault makes no table lost
						must(t, r.fake.As(76, "flusher").Bypassing().Flush(rules.IPv4, rules.Filter, ""))
					}
				}
				for line, n := range countRules(r.fake.Save(rules.IPv4)) {
					if n > max(before[line], 1) {
						t.Errorf("%d times, and %d before: %s", n, before[line], line)
					}
				}
			})
		})
	}
}

// countRules counts the rules of a save, and canaryd's marks by their chains.
func countRules(text string) map[string]int {
	counts := map[string]int{}
	table := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "*") {
			table = line
		}
		if before, _, own := strings.Cut(line, "--comment \"canaryd-"); own {
			line = before
		}
		if strings.HasPrefix(line, "-A ") && !strings.HasPrefix(line, "-A corp ") {
			counts[table+" "+line]++
		}
	}
	return counts
}
