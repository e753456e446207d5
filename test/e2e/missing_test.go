package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// statusOf returns the whole status.
func statusOf(n *nodetest.Node) (s api.Status) {
	n.Helper()
	n.Must(json.Unmarshal([]byte(n.Get("/api/v1/status")), &s))
	return s
}

// TestJumpDeletedOnABusyNode: next to an owner that never rests, a process
// deletes a jump by name. The jump counts as missing from the deletion on, and is
// back after the grace.
func TestJumpDeletedOnABusyNode(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		const grace = 4 * time.Second
		n.Load()
		protected, jump := n.Protected(), ""
		for _, r := range n.Save()[rules.IPv4][rules.Nat].Chain("PREROUTING").Rules {
			if r.Target == "KUBE-SERVICES" {
				jump = r.Spec
			}
		}
		d := n.Start("--jump-grace=" + grace.String())
		ctx, stop := n.Context(), make(chan struct{})
		var owner sync.WaitGroup
		owner.Go(func() {
			pause := time.NewTicker(300 * time.Millisecond)
			defer pause.Stop()
			for i := 1; ; i++ {
				select {
				case <-stop:
					return
				case <-pause.C:
				}
				line := fmt.Sprintf("*nat\n:KUBE-SVC-CHURNCHURNCHURN2 - [0:0]\n-F KUBE-SVC-CHURNCHURNCHURN2\n-A KUBE-SVC-CHURNCHURNCHURN2 -p tcp -m tcp --dport %d -j RETURN\nCOMMIT\n", i)
				if err := n.Programs.RestoreNoflush(ctx, rules.IPv4, line); err != nil {
					n.Errorf("the owner's write: %v", err)
				}
			}
		})
		began := time.Now()
		n.Must(n.Programs.RestoreNoflush(ctx, rules.IPv4, "*nat\n-D PREROUTING "+jump+"\nCOMMIT\n"))
		deleted := time.Now()
		var seen time.Time
		n.Until("the verdict", func() error {
			s := statusOf(n)
			if len(s.Flushes) != 1 || s.Flushes[0].Outcome != api.WaitingOwner || s.Families[rules.IPv4][rules.Nat] != canary.JumpsMissing || s.Healthy {
				return fmt.Errorf("%s: %v, %+v", s.Headline, s.Families, s.Flushes)
			}
			first := began
			if waiting := s.Flushes[0]; waiting.Bound() { // the commit that deleted it is still unknown
				first = waiting.LastInForce
			}
			if since := s.LossSince; since.Before(first) || since.After(time.Now()) {
				n.Errorf("missing since %s, in force until %s, deleted between %s and %s", since, first, began, deleted)
			}
			seen = time.Now()
			return nil
		})
		stdout, _ := n.Want(1, "status")
		for _, text := range []string{"ipv4 nat is jumps_missing; canaryd leaves that to its owner until ", "waiting: its owner"} {
			if !strings.Contains(stdout, text) {
				n.Errorf("status lacks %q:\n%s", text, stdout)
			}
		}
		n.Until("the jump", func() error {
			if s := statusOf(n); !s.Healthy || len(s.Flushes) != 1 {
				return fmt.Errorf("%s, %+v", s.Headline, s.Flushes)
			}
			return nil
		})
		close(stop)
		owner.Wait()
		back := time.Since(began)
		n.Must(n.Programs.RestoreNoflush(ctx, rules.IPv4, "*nat\n-F KUBE-SVC-CHURNCHURNCHURN2\n-X KUBE-SVC-CHURNCHURNCHURN2\nCOMMIT\n"))
		n.Same("protected rules", protected, n.Protected())
		record := statusOf(n).Flushes[0]
		absent := api.Seconds(record.AbsentSeconds)
		bound := statusOf(n).Backend.Name == iptables.Legacy
		if absent < grace-deleted.Sub(began) || !bound && absent > back || record.AbsentAtMost != bound || record.Kind != canary.JumpsMissing {
			n.Errorf("absent for %s, at most: %t; it was so for %s at most: %+v", absent, record.AbsentAtMost, back, record)
		}
		if record.Time.Before(began) || record.Time.After(seen) || record.NoticedSeconds < 0 || api.Seconds(record.NoticedSeconds) > seen.Sub(began) {
			n.Errorf("the record begins at %s and was noticed after %gs, deleted between %s and %s", record.Time, record.NoticedSeconds, began, deleted)
		}
		d.Stop()
	})
}
