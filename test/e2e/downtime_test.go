package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestFullFlushWhileDown: SIGTERM leaves everything in place. A flush may leave
// no evidence of the backend in use; then the state names it at once. The status
// shows the time of absence as a bound.
func TestFullFlushWhileDown(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		protected, foreign := n.Protected(), n.Foreign()
		first := n.Start()
		marks := n.Marks()
		if got := len(marks); got < 6*2+4 {
			n.Errorf("%d marks, want a canary with its rule in 6 tables, and witnesses:\n%s", got, strings.Join(marks, "\n"))
		}
		first.Stop()
		n.Same("protected rules after SIGTERM", protected, n.Protected())
		n.Same("foreign rules after SIGTERM", foreign, n.Foreign())
		n.Same("marks after SIGTERM", marks, n.Marks())
		ended := time.Now()
		for _, f := range rules.Families() {
			n.Must(scenario.Wipe(n.Context(), n.Programs, f))
		}
		wiped := time.Now()
		d := n.Start("--backend=auto")
		if record := n.Healed(1); record.Outcome != "proved" && record.Outcome != "raced" {
			n.Errorf("the record is %+v", record)
		}
		down := time.Since(ended)
		d.WantLog("Starting", fmt.Sprintf("canaryd guarded %s before in this boot", n.Programs.With))
		if strings.Contains(d.Log(), "waiting a moment for who decides") {
			n.Error("the start waited for evidence although the state names the backend")
		}
		n.Same("protected rules", protected, n.Protected())
		var s struct {
			Flushes []struct {
				AbsentSeconds float64
				AbsentAtMost  bool
				LastInForce   time.Time
			}
		}
		n.Must(json.Unmarshal([]byte(n.Get("/api/v1/status")), &s))
		// The last look may precede the end of the run by a poll, and on legacy
		// by the time between two walks.
		if f := s.Flushes[0]; !f.AbsentAtMost || f.LastInForce.After(wiped) || f.AbsentSeconds > down.Seconds()+35 {
			n.Errorf("absent for %+v, after %s", f, down)
		}
		d.Stop()

		// An operator may accept a loss.
		n.Flush()
		d = n.Launch("--max-stored-age=1ms")
		n.Until("canaryd to ask for a decision", func() error {
			if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "canaryd dismiss") {
				return fmt.Errorf("readiness: %w", err)
			}
			return nil
		})
		stdout, _ := n.Want(0, "dismiss")
		if !strings.Contains(stdout, "is accepted") {
			n.Errorf("canaryd dismiss printed %q", stdout)
		}
		if stdout, _ = n.Want(1, "status"); !strings.Contains(stdout, "nothing is protected") {
			n.Errorf("after a loss of everything was accepted, status printed %q", stdout)
		}
		d.Stop()
		n.Want(0, "check")
	})
}

// TestStoppedProcess: while canaryd is stopped, the kernel's messages wait. Then
// the time of absence is a bound, and never shorter than the real time.
func TestStoppedProcess(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		n.LoadNative(100)
		process := n.Start(guardNative)
		n.Polled(2) // it then knows the time of its last look
		process.Suspend()
		n.Flush()
		nstest.Command(n.T, "nft", "flush", "table", "ip", "kube-proxy")
		flushed := time.Now()
		nstest.Command(n.T, "sleep", "3") // as long as an operator's debugger may stop it
		process.Signal(syscall.SIGCONT)
		n.Healed(1)
		n.Until("kube-proxy's native table", func() error {
			if nativeRecords(n) == 0 {
				return errors.New("it has no record")
			}
			return nodetest.Ready()
		})
		for i := range n.Status().Flushes {
			f := flushJSON(n, fmt.Sprint(i+1)).Flush
			absent := api.Seconds(f.AbsentSeconds)
			if back := f.LastInForce.Add(absent); !f.AbsentAtMost || !f.Stalled || absent < back.Sub(flushed) || f.LastInForce.After(flushed) {
				n.Errorf("flushed at %s; the record says %s since %s, a bound: %t, stood still: %t", flushed, absent, f.LastInForce, f.AbsentAtMost, f.Stalled)
			}
		}
		if text, _ := n.Want(0, "status", "--flush", "1"); !strings.Contains(text, "noticed after at most ") || !strings.Contains(text, "canaryd was stalled when it happened") {
			n.Errorf("canaryd status --flush 1 prints\n%s", text)
		}
		process.Stop()
	})
}
