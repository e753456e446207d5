package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestFlusherHoldsTheLock: a flusher has emptied nat and goes on to hold the xtables lock. Its
// record exists at once, says what the replay waits for, and ends when the lock is free.
func TestFlusherHoldsTheLock(t *testing.T) {
	nodetest.On(t, iptables.Legacy, func(n *nodetest.Node) {
		n.Load()
		process := n.Start()
		slow := exec.CommandContext(n.Context(), "sh", "-c", "(printf '*nat\nCOMMIT\n*mangle\n'; read -r done; echo COMMIT) | exec iptables-legacy-restore")
		free, err := slow.StdinPipe()
		n.Must(err)
		n.Must(slow.Start())
		var record api.Flush
		n.Until("the record of a flush that is not read yet", func() error {
			var s api.Status
			n.Must(json.Unmarshal([]byte(n.Get("/api/v1/status")), &s))
			if len(s.Flushes) == 0 || s.Flushes[0].Outcome != api.WaitingLock {
				return fmt.Errorf("the records are %+v", s.Flushes)
			}
			record = s.Flushes[0]
			return nil
		})
		if !strings.Contains(record.LockedBy, " (iptables-legacy") {
			n.Errorf("the lock is held by %q", record.LockedBy)
		}
		if text, _ := n.Want(1, "status"); strings.Contains(text, "no flush was seen") || !strings.Contains(text, "waiting: the lock, held by pid ") {
			n.Errorf("canaryd status prints\n%s", text)
		}
		if text, _ := n.Want(0, "status", "--flush", record.ID); !strings.Contains(text, "lost not known yet") {
			n.Errorf("canaryd status --flush %s prints\n%s", record.ID, text)
		}
		process.WantLog("Rules are being flushed", record.ID)
		n.Must(free.Close())
		if err := slow.Wait(); err != nil {
			n.Error(err)
		}
		if ended := n.Healed(1); ended.ID != record.ID || ended.Lost.Rules == 0 {
			n.Errorf("the record is %+v", ended)
		}
		n.Until("its page", func() error {
			if strings.Contains(n.Get("/"), "waiting: the lock") {
				return errors.New("it still waits")
			}
			return nil
		})
		process.Stop()
	})
}
