package limits

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestHugeFiles: files in the state folder are larger than any of canaryd's. canaryd does not
// read them into memory, says so, learns the present rules, and heals.
func TestHugeFiles(t *testing.T) {
	const huge = 600 << 20
	for _, story := range []struct {
		name string
		file string // in the state folder
		says string // in the log
		// waits: the file may have a loss that needs a decision.
		waits bool
	}{
		{"state", "state.json", "state.json is too large", false},
		{"generation", "generations/*.json", ".json is too large", false},
		{"journal", "journal.jsonl", "", false},
		{"ipsets", "sets.json", "sets.json is too large", false},
		{"owners", "owners.json", "owners.json is too large", false},
		{"pending loss", "pending.json", "pending.json is too large", true},
	} {
		t.Run(story.name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				n.Load()
				d := n.Start()
				d.Stop()
				path := filepath.Join("/run/state", story.file)
				if found, err := filepath.Glob(path); err == nil && len(found) > 0 {
					path = found[0]
				}
				file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
				n.Must(err)
				info, err := file.Stat()
				n.Must(err)
				_, err = file.WriteAt([]byte(strings.Repeat(" ", 1<<10)), info.Size()) // JSON so far
				n.Must(err)
				n.Must(file.Truncate(huge)) // a hole, without disk space
				n.Must(file.Close())

				if d = n.Launch(); story.waits {
					n.Until("canaryd to ask for a decision", func() error {
						if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), "canaryd dismiss") {
							return fmt.Errorf("readiness: %w", err)
						}
						return nil
					})
					n.Want(0, "dismiss")
				}
				n.Until("canaryd to be ready", nodetest.Ready)
				n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
				n.Healed(1)
				n.Want(0, "status")
				if story.says != "" {
					d.WantLog(story.says)
				}
				within(n, d, "with a file of 600 MiB")
				d.Stop()
			})
		})
	}
}

// TestManyRecords: the journal has 10,000 flush records. The status shows the newest 100, the
// files stay within 8 MiB, and canaryd heals and records a flush as ever.
func TestManyRecords(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		d := n.Start()
		n.Flush()
		n.Healed(1)
		d.Stop()
		const path, many = "/run/state/journal.jsonl", 10_000
		text, err := os.ReadFile(path)
		n.Must(err)
		var entry struct {
			ID     string          `json:"id"`
			Record map[string]any  `json:"record"`
			Detail json.RawMessage `json:"detail,omitempty"`
		}
		n.Must(json.Unmarshal([]byte(strings.SplitN(string(text), "\n", 2)[0]), &entry))
		entry.Detail = nil
		for name, value := range entry.Record { // 100 lists of chains would be an hour's flushes
			if text, err := json.Marshal(value); err == nil && len(text) > 60 {
				delete(entry.Record, name)
			}
		}
		file, err := os.Create(path)
		n.Must(err)
		for i := range many {
			entry.ID = fmt.Sprintf("%013x", i)
			entry.Record["id"] = entry.ID
			n.Must(json.NewEncoder(file).Encode(entry))
		}
		info, err := file.Stat()
		n.Must(err)
		n.Must(file.Close())

		d = n.Start()
		records := n.WholeStatus().Flushes
		n.Logf("%d records in %d MiB, of which the status shows %d", many, info.Size()>>20, len(records))
		if len(records) != 100 {
			n.Errorf("the status has %d flush records, want 100", len(records))
		}
		n.Logf("ipv6 nat was back %s after its flush", othersAreRepaired(n).Round(time.Millisecond))
		newest := n.Healed(1)
		n.Until("the record on disk", func() error {
			if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), `"`+newest.ID+`"`) {
				return fmt.Errorf("flush %s is not in it: %v", newest.ID, err)
			}
			return nil
		})
		within(n, d, "with 10,000 records")
		d.Stop()
	})
}
