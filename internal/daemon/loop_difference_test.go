package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRestartFromADifference: a large generation changes, and canaryd writes only the
// difference a moment later. The next run loads it, and restores it after a flush.
func TestRestartFromADifference(t *testing.T) {
	for _, ends := range []string{"stopped", "killed"} {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			t.Run(ends+"/"+string(backend), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					dir, id := t.TempDir(), identity(backend)
					fake := loadedFake(t, backend)
					var lines []string
					for i := range 600 {
						chain := "KUBE-SVC-" + strings.Repeat("A", 12) + strings.Map(func(digit rune) rune { return digit - '0' + 'A' }, fmt.Sprintf("%04d", i))
						lines = append(lines, ":"+chain+" - [0:0]", fmt.Sprintf(`-A %s -m comment --comment "ns/service-%d:http, of which there are many" -j RETURN`, chain, i))
					}
					must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, lines...)))
					k := &killer{grave: make(chan struct{})}
					first := run(t, fake, setup{store: openStore(t, dir, id), kernel: stepping{fake, k.step}})
					t.Cleanup(func() { close(k.grave) })
					first.settled()
					first.after(time.Minute) // the first generation is on disk
					must(t, fake.RestoreNoflush(rules.IPv4, scenario.NewService))
					first.after(4 * time.Second)
					first.wantReady()
					generation := first.d.Status().Generation.ID
					text, err := os.ReadFile(filepath.Join(dir, "generations", generation+".json"))
					must(t, err)
					if !strings.Contains(string(text), `"base":`) || len(text) > 4<<10 {
						t.Errorf("the change is written as %d bytes, beginning with %.300s", len(text), text)
					}
					before := first.tables()
					if ends == "stopped" {
						first.stop()
						time.Sleep(time.Minute)
					} else {
						k.armed.Store(true)
						k.left.Store(1)
					}
					must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
					left := first.tables()
					if ends == "killed" {
						first.after(time.Second)
						if k.fell.Load() == nil {
							t.Fatal("the first run still lives")
						}
					}
					r := run(t, fake, setup{store: openStore(t, dir, id)})
					r.settled()
					r.wantReady()
					r.wantLog("Took up the stored generation")
					r.wantBack(before, left)
					if n := len(r.records(0)); n != 1 {
						t.Errorf("%d flush records, want 1", n)
					}
				})
			})
		}
	}
}
