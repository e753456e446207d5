package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestMassDeletionIsRecorded: one restore that deletes most of nat by name is taken for the owner's
// doing, with a record that names the process. A restore by kube-proxy itself has none.
func TestMassDeletionIsRecorded(t *testing.T) {
	for _, parent := range []string{"bash", "kube-proxy"} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			by := watch.Writer{PID: 4711, Comm: "iptables-restor", Command: "iptables-restore --noflush", Origin: watch.Origin{Ancestors: []string{parent, "init"}}}
			var r *rig
			fake := loadedFake(t, backend)
			fake.OnCommit(func(c nft.Commit) {
				if c.PID == by.PID {
					by.Time, by.Genid = time.Now(), c.Genid
					r.writers.Note(by)
				}
			})
			r = startOn(t, fake, setup{journal: t.TempDir()})
			r.after(20 * time.Second)
			var declared, jumps, deleted []string
			gone := func(name string) bool { return ofKubeProxy(name) && name != "KUBE-PROXY-CANARY" }
			for _, c := range r.tables()[rules.IPv4][rules.Nat].Chains {
				if gone(c.Name) {
					declared, deleted = append(declared, ":"+c.Name+" - [0:0]"), append(deleted, "-X "+c.Name)
				}
				for _, rule := range c.Rules {
					if rules.Builtin(rules.Nat, c.Name) && gone(rule.Target) {
						jumps = append(jumps, "-D "+c.Name+" "+rule.Spec)
					}
				}
			}
			if backend == iptables.Legacy {
				by.Time = time.Now()
				r.writers.Note(by)
			}
			must(t, fake.As(by.PID, by.Comm).RestoreNoflush(rules.IPv4, section(rules.Nat, slices.Concat(declared, jumps, deleted)...)))
			r.after(20 * time.Second)
			r.wantReady()
			if got := r.metrics("flush_events", "flushes_total"); len(got) > 0 {
				t.Errorf("it is counted as a flush: %v", got)
			}
			if parent == "kube-proxy" {
				r.wantNoFlush()
				return
			}
			record := r.oneRecord()
			if record.Kind != api.RemovedByOwner || record.Outcome != api.TakenForOwners || record.Culprit.PID != 4711 || record.Lost.Rules < 50 || record.Open() {
				t.Errorf("the record is %+v", record)
			}
			if kept := r.full("1").Flush; kept.ID != record.ID {
				t.Errorf("the journal says %+v", kept)
			}
			if said := strings.Join(r.accepted(), "\n"); !strings.Contains(said, "ipv4 nat lost ") {
				t.Errorf("the status says %q", said)
			}
		})
	}
}
