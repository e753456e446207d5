package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestMassDeletionIsRecorded: one restore deletes most of nat by name. It counts as the owner's
// doing, with a record that names the process. A restore by kube-proxy itself has no record. An
// owner of other rules is not the owner of these.
func TestMassDeletionIsRecorded(t *testing.T) {
	for _, parent := range []string{"bash", "kube-proxy", "k3s-agent", "fail2ban-server", "crio", "kube-router", "flanneld", "dockerd"} {
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
			if parent == "kube-proxy" || parent == "k3s-agent" {
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

// TestMassDeletionInANativeTableIsRecorded: one commit deletes most of a native table by name.
// It counts as the owner's doing, and record, journal and status name the process. Neither a
// deletion by the owner itself nor a small one has a record.
func TestMassDeletionInANativeTableIsRecorded(t *testing.T) {
	mine, calico := tableid.IPv4.Table("mine"), tableid.IPv4.Table("calico")
	extra := func(chain string) bool { return strings.HasPrefix(chain, "extra") }
	elements := func(n int) func(*fakeNative, tableid.TableID) {
		return func(k *fakeNative, id tableid.TableID) { k.removeNamed(id, nil, nil, map[string]int{"ips": n}) }
	}
	for _, test := range []struct {
		name   string
		delete func(*fakeNative, tableid.TableID)
		lost   api.Lost // the zero value: no record
		said   string
	}{
		{"elements", elements(25), api.Lost{Elements: 25}, "ips lost 25 elements, 5 left"},
		{"all elements", elements(30), api.Lost{Elements: 30}, "ips lost 30 elements, 0 left"},
		{"a few elements", elements(14), api.Lost{}, ""},
		{"rules", func(k *fakeNative, id tableid.TableID) { k.removeNamed(id, nil, map[string]int{"services": 28}, nil) },
			api.Lost{Rules: 28}, "lost 28 rules, 23 left"},
		{"chains", func(k *fakeNative, id tableid.TableID) { k.removeNamed(id, extra, map[string]int{"services": 8}, nil) },
			api.Lost{Chains: 4, Rules: 28}, "lost 28 rules, 23 left"},
		{"chains and elements", func(k *fakeNative, id tableid.TableID) {
			k.removeNamed(id, extra, map[string]int{"services": 8}, map[string]int{"ips": 28})
		}, api.Lost{Chains: 4, Rules: 28, Elements: 28}, "lost 28 rules, 23 left"},
	} {
		for _, id := range []tableid.TableID{mine, calico} {
			t.Run(test.name+" of "+id.Name, func(t *testing.T) {
				table := tableOf(id, strings.Split(strings.Repeat("r", 30), "")...)
				for i := range 4 {
					name := fmt.Sprint("extra", i)
					table.Chains = append(table.Chains, native.Chain{Name: name, Rules: tableOf(id, "1", "2", "3", "4", "5").Chains[1].Rules})
				}
				table.Sets = []native.Set{{Name: "ips", Elements: make([]native.Element, 30)}}
				for i := range table.Sets[0].Elements {
					table.Sets[0].Elements[i] = native.Element{byte(i)}
				}
				k := newFakeNative(table)
				if k.origin.Ancestors = []string{"bash", "sshd"}; id == calico {
					k.origin.Ancestors = []string{"calico-node"}
				}
				nativeNode(t, setup{guarded: k, journal: t.TempDir()}, func(t *testing.T, r *rig, k *fakeNative) {
					p, end := r.reported()
					defer end()
					r.after(20 * time.Second)
					test.delete(k, id)
					r.after(20 * time.Second)
					r.wantReady()
					if got := r.metrics("flush_events", "flushes_total"); len(got) > 0 {
						t.Errorf("it is counted as a flush: %v", got)
					}
					if id == calico || test.said == "" {
						r.wantNoFlush()
						p.want(t, "its owner's deletion")
						return
					}
					record := r.oneRecord()
					type told struct {
						Kind    canary.Verdict
						Outcome api.Outcome
						Lost    api.Lost
						PID     uint32
						Tables  []string
					}
					want := told{api.RemovedByOwner, api.TakenForOwners, test.lost, 4242, []string{id.NFT()}}
					got := told{record.Kind, record.Outcome, record.Lost, record.Culprit.PID, record.NativeNames()}
					if d := cmp.Diff(want, got); d != "" {
						t.Errorf("the record (-want +got)\n%s", d)
					}
					if d := cmp.Diff(id.Family.NFT(), record.Native[0].Family); d != "" {
						t.Errorf("the table's family (-want +got)\n%s", d)
					}
					p.want(t, "the deletion", "flush 1 final true: accepted")
					if kept := r.full("1").Flush; kept.ID != record.ID {
						t.Errorf("the journal says %+v", kept)
					}
					if said := strings.Join(r.accepted(), "\n"); !strings.Contains(said, "table ip mine "+test.said) {
						t.Errorf("the status says %q, want %q", said, test.said)
					}
				})
			})
		}
	}
}
