package daemon

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// addPod does the same as portmap's ADD, in both families, and removePod the same as its DEL. A
// DEL has no error for missing rules.
func (r *rig) addPod(name string) {
	r.t.Helper()
	for _, f := range rules.Families() {
		must(r.t, r.fake.RestoreNoflush(f, section(rules.Nat, ":"+podChain(name)+" - [0:0]",
			"-A "+podChain(name)+" -p tcp -m tcp --dport 2000 -j RETURN", "-A CNI-HOSTPORT-DNAT "+podJump(name))))
	}
}

func (r *rig) removePod(name string) {
	for _, f := range rules.Families() {
		_ = r.fake.RestoreNoflush(f, section(rules.Nat, "-D CNI-HOSTPORT-DNAT "+podJump(name)))
		_ = r.fake.RestoreNoflush(f, section(rules.Nat, "-F "+podChain(name), "-X "+podChain(name)))
	}
}

func podJump(name string) string {
	return fmt.Sprintf(`-p tcp -m comment --comment "dnat name: %s" -j %s`, name, podChain(name))
}

// podChain returns a name that ends in a hash, as those of portmap's chains.
func podChain(name string) string { return fmt.Sprintf("CNI-DN-%021x", name) }

// ofOwners returns a family's rules in protected chains, and the jumps to them.
func (r *rig) ofOwners(f rules.Family) map[string][]string {
	r.t.Helper()
	found := map[string][]string{}
	for name, table := range r.tables()[f] {
		for _, c := range table.Chains {
			place := fmt.Sprintf("%s %s", name, c.Name)
			whole := r.d.cfg.Protection.Chain(c.Name) && c.Name != canary.DefaultChain
			if whole {
				found[place] = []string{}
			}
			for _, rule := range c.Rules {
				if whole || r.d.cfg.Protection.Chain(rule.Target) {
					found[place] = append(found[place], rule.Spec)
				}
			}
		}
	}
	return found
}

// TestASavedFileIsFlushedBeforeItIsReplaced: a process restores a file from before one pod was
// added and another one removed. Another process flushes these rules before canaryd has
// replaced them. The rules that the file lacked are lost, and not their owner's removal. Rules
// that only the file had do not stay.
func TestASavedFileIsFlushedBeforeItIsReplaced(t *testing.T) {
	const between = 12 * time.Millisecond // canaryd notices, and the flusher is not quiet
	type world struct {
		*rig
		saved map[rules.Family]string
	}
	restore := func(w world, f rules.Family) { must(w.t, w.fake.Restore(f, w.saved[f])) }
	flush := func(w world, f rules.Family) { must(w.t, w.fake.Flush(f, rules.Nat, "")) }
	flushAll := func(w world, f rules.Family) {
		for _, table := range protect.Always() {
			must(w.t, w.fake.Flush(f, table, ""))
		}
	}
	for _, test := range []struct {
		name  string
		story []func(world, rules.Family)
	}{
		{"restored", []func(world, rules.Family){restore}},
		{"restored, flushed", []func(world, rules.Family){restore, flush}},
		{"restored, all flushed", []func(world, rules.Family){restore, flushAll}},
		{"flushed, restored, flushed", []func(world, rules.Family){flush, restore, flush}},
		{"restored, flushed, restored, flushed", []func(world, rules.Family){restore, flush, restore, flushAll}},
	} {
		for _, families := range [][]rules.Family{{rules.IPv4}, rules.Families()} {
			t.Run(fmt.Sprintf("%s, %v", test.name, families), func(t *testing.T) {
				oneBackend(t, func(t *testing.T, backend iptables.Backend) {
					r := start(t, backend, setup{})
					r.addPod("gone")
					r.settled()
					w := world{r, map[rules.Family]string{}}
					for _, f := range rules.Families() {
						w.saved[f] = r.fake.Save(f)
					}
					r.removePod("gone")
					r.addPod("young")
					r.after(5 * time.Second)
					r.wantReady()
					before := map[rules.Family]map[string][]string{}
					for _, f := range rules.Families() {
						before[f] = r.ofOwners(f)
					}
					for _, do := range test.story {
						for _, f := range families {
							do(w, f)
							r.after(between)
						}
					}
					r.after(10 * time.Second)
					r.wantReady()
					for _, f := range rules.Families() {
						if diff := cmp.Diff(before[f], r.ofOwners(f)); diff != "" {
							t.Errorf("%s (-want +got):\n%s", f, diff)
						}
					}
				})
			})
		}
	}
}

// TestAPodThatIsRemovedFromASavedFile: canaryd saw a pod's chain in the restored table, and
// then its owner removed the pod. A later flush does not bring it back.
func TestAPodThatIsRemovedFromASavedFile(t *testing.T) {
	for _, seen := range []bool{false, true} { // also if canaryd looks again before the flush
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := start(t, backend, setup{})
			r.addPod("old")
			r.settled()
			saved := r.fake.Save(rules.IPv4)
			r.addPod("young")
			r.after(5 * time.Second)
			must(t, r.fake.Restore(rules.IPv4, saved))
			r.after(12 * time.Millisecond)
			r.removePod("old")
			if seen {
				r.after(12 * time.Millisecond)
			}
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
			r.after(10 * time.Second)
			r.wantReady()
			saved = r.fake.SaveTable(rules.IPv4, rules.Nat)
			if strings.Contains(saved, podChain("old")) || !strings.Contains(saved, podJump("young")) {
				t.Errorf("want the younger pod's host port and nothing of the older one:\n%s", saved)
			}
		})
	}
}

// TestASavedFileLosesWhatItLacks: the record of a saved file counts the rules that the file
// lacks, and not the chains that it has in other words. A file with the rules in another order
// is a flush too.
func TestASavedFileLosesWhatItLacks(t *testing.T) {
	const chain = "KUBE-SERVICES"
	for _, test := range []struct {
		name string
		// write returns the owner's lines after the file was saved.
		write func(was []string) []string
		want  int // lost rules
	}{
		{"two rules", func([]string) []string {
			return []string{"-A " + chain + " -d 10.9.9.1/32 -j RETURN", "-A " + chain + " -d 10.9.9.2/32 -j RETURN"}
		}, 2},
		{"the order", func(was []string) []string {
			last := was[len(was)-1]
			return []string{"-D " + chain + " " + last, "-I " + chain + " " + last}
		}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				saved := r.fake.SaveTable(rules.IPv4, rules.Nat)
				r.write(rules.Nat, test.write(r.chain(rules.IPv4, rules.Nat, chain))...)
				r.after(20 * time.Second) // until the marks are renewed
				before := r.chain(rules.IPv4, rules.Nat, chain)
				must(t, r.fake.Restore(rules.IPv4, saved))
				r.settled()
				if diff := cmp.Diff(before, r.chain(rules.IPv4, rules.Nat, chain)); diff != "" {
					t.Errorf("%s after the replay (-want +got):\n%s", chain, diff)
				}
				got := r.d.Status().Flushes[0]
				if got.Kind != canary.Replaced || got.Lost.Rules != test.want || got.Lost.Chains == 0 {
					t.Errorf("%s lost %d rules in %d chains, want %d: %+v", got.Kind, got.Lost.Rules, got.Lost.Chains, test.want, got.Lost.Tables)
				}
				if m := r.metrics("flush_events"); m["flush_events_total"] != 1 {
					t.Errorf("%v, want one flush", m)
				}
			})
		})
	}
}
