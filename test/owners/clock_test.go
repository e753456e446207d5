package owners

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestClockSetWhileDown: how old a stored generation is, is measured by a clock that
// no program can set. That a jump does not matter to the running loop is shown in
// internal/daemon: the machine's clock is not for tests to set.
func TestClockSetWhileDown(t *testing.T) {
	for _, test := range []struct {
		name    string
		by      time.Duration
		down    time.Duration
		maximum string
		want    counts
		ready   func() error
		log     string
	}{
		{
			name: "set forward: what is young is replayed, once", by: 24 * time.Hour, maximum: "--max-stored-age=10m",
			want: oneFlush, ready: nodetest.Ready, log: "The rules are back",
		},
		{
			name: "set back: what is old is not replayed", by: -24 * time.Hour, down: 4 * time.Second, maximum: "--max-stored-age=2s",
			want: counts{Tables: 4, Records: 1}, ready: waitsForDecision, log: "too old to be replayed unasked",
		},
	} {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			t.Run(test.name+"/"+string(backend), func(t *testing.T) {
				nodetest.On(t, backend, func(n *nodetest.Node) {
					n.Load()
					n.Start().Stop()
					setClock(n, test.by)
					time.Sleep(test.down)
					n.Flush()
					d := n.Launch(test.maximum) // there may be nothing to learn
					n.Until("canaryd to have looked", test.ready)
					time.Sleep(moment)
					got := count(n)
					if diff := cmp.Diff(test.want, got); diff != "" {
						n.Errorf("replays and flushes (-want +got):\n%s", diff)
					}
					d.WantLog(test.log)
					n.Logf("seen: %s", got)
					d.Stop()
				})
			})
		}
	}
}

// waitsForDecision returns nil once canaryd says that what was lost waits.
func waitsForDecision() error {
	if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "canaryd dismiss") {
		return fmt.Errorf("readiness: %w", err)
	}
	return nil
}

// setClock makes what canaryd stored look as if the clock on the wall had been
// set since.
func setClock(n *nodetest.Node, by time.Duration) {
	n.Helper()
	const path = "/run/state/state.json"
	text, err := os.ReadFile(path)
	n.Must(err)
	var state map[string]json.RawMessage
	n.Must(json.Unmarshal(text, &state))
	var confirmed time.Time
	n.Must(json.Unmarshal(state["confirmed"], &confirmed))
	state["confirmed"], err = json.Marshal(confirmed.Add(-by))
	n.Must(err)
	delete(state, "sum") // of the text before
	text, err = json.Marshal(state)
	n.Must(err)
	n.Must(os.WriteFile(path, text, 0o600))
}
