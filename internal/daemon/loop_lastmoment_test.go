package daemon

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// young is the chain of a host port, with a name as the portmap plugin gives it.
const young = "CNI-DN-0a1b2c3d4e5f60718293a"

// youngPod writes a host port as the portmap plugin does, in both families.
func (r *rig) youngPod() {
	r.t.Helper()
	for _, f := range rules.Families() {
		must(r.t, r.fake.As(77, "portmap").RestoreNoflush(f, section(rules.Nat, ":"+young+" - [0:0]",
			"-A "+young+" -p tcp --dport 8088 -j RETURN", "-A CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j "+young)))
	}
}

// wantYoungPod fails unless the pod's rules are in force, once each, or none is, as stands says.
func (r *rig) wantYoungPod(when string, stands bool) {
	r.t.Helper()
	for _, f := range r.fake.Families() {
		r.wantYoungRules(when, f, stands, stands)
	}
}

// wantYoungRules is wantYoungPod for one family and each of the pod's two rules. One leads to its
// chain, and the other is in that chain.
func (r *rig) wantYoungRules(when string, f rules.Family, leads, inside bool) {
	r.t.Helper()
	for rule, stands := range map[string]bool{
		"-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 8088 -j " + young: leads,
		"-A " + young + " -p tcp -m tcp --dport 8088 -j RETURN":       inside,
	} {
		if n := strings.Count(r.fake.SaveTable(f, rules.Nat), rule); n > 1 || (n == 1) != stands {
			r.t.Errorf("%s: %v nat holds %d times %q, want it there: %t", when, f, n, rule, stands)
		}
	}
}

// TestTheLastMomentBeforeAFlush: an owner writes rules, and a flush follows before any read. On
// nft canaryd restores them with the others.
func TestTheLastMomentBeforeAFlush(t *testing.T) {
	for _, s := range scenario.All() {
		if !s.On(iptables.NFT) {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				if s.Prepare != nil {
					must(t, s.Prepare(t.Context(), r.programs()))
					r.after(20 * time.Second)
				}
				r.youngPod()
				must(t, s.Do(t.Context(), r.programs()))
				r.after(20 * time.Second)
				saved := strings.Contains(s.Command, "restore")
				r.wantYoungPod("after "+s.Command, !saved || len(s.Lost) > 0)
				r.wantReady()
			})
		})
	}
}

// TestTheLastMomentBetweenTwoFlushes: a process flushes a built-in chain, an owner writes rules,
// and a flush of the table follows. No read has come before, or one whose replay had no time. The
// owner's rules return with the others.
func TestTheLastMomentBetweenTwoFlushes(t *testing.T) {
	for _, chain := range []string{"PREROUTING", "POSTROUTING"} {
		for _, read := range []bool{false, true} {
			bubble(t, fmt.Sprintf("%s/read %t", chain, read), func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				flush := func(chain string) {
					for _, f := range rules.Families() {
						must(t, r.fake.As(79, "iptables").Flush(f, rules.Nat, chain))
						if read {
							r.fake.Before(f, 1<<31)
						}
						read = false
					}
				}
				flush(chain)
				r.youngPod()
				flush("")
				r.after(20 * time.Second)
				r.wantYoungPod("after the second flush", true)
				r.wantReady()
			})
		}
	}
}

// TestRemovedAtTheLastMoment: the portmap plugin removes a host port right before a flush of any
// kind. No read has come before, or one from which canaryd has not learned the removal yet. The
// rules stay away, in chains that keep others too. If a process that is no owner has removed one of
// them before any read, that may be half of the flush: it comes back.
func TestRemovedAtTheLastMoment(t *testing.T) {
	for _, s := range scenario.All() {
		if !s.On(iptables.NFT) || s.Prepare != nil || strings.Contains(s.Command, "restore") {
			continue
		}
		for _, comm := range []string{"portmap", "portmap, read", "agent"} {
			t.Run(s.Name+"/"+comm, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := start(t, iptables.NFT, setup{})
					r.youngPod()
					r.after(20 * time.Second)
					comm, read := strings.CutSuffix(comm, ", read")
					for _, f := range rules.Families() {
						by := r.fake.As(78, comm)
						must(t, by.RestoreNoflush(f, section(rules.Nat, "-D CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j "+young)))
						if comm == "portmap" {
							must(t, by.RestoreNoflush(f, section(rules.Nat, "-F "+young, "-X "+young)))
						}
					}
					if read {
						r.after(150 * time.Millisecond)
					}
					must(t, s.Do(t.Context(), r.programs()))
					r.after(20 * time.Second)
					for _, f := range rules.Families() {
						switch lost := s.Lost[f.Table(rules.Nat)]; {
						case comm == "portmap":
							r.wantYoungRules("after "+s.Command, f, false, false)
						case lost == scenario.Emptied || lost == scenario.TableDeleted:
							r.wantYoungRules("after "+s.Command, f, true, true)
						}
					}
					r.wantReady()
				})
			})
		}
	}
}

// TestFirstHalfOfAFlush: a script deletes a rule of a chain, and empties the table a moment later,
// when canaryd has read the first step. That step is no owner's decision: the rule returns. An
// owner's step lasts, and so do a replaced rule and any step after a longer time.
func TestFirstHalfOfAFlush(t *testing.T) {
	const leads = "CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j " + young
	for name, line := range map[string]string{"a rule deleted": "-D " + leads, "a rule replaced": "-R " + young + " 1 -j ACCEPT"} {
		for _, comm := range []string{"agent", "portmap"} {
			for _, pause := range []time.Duration{captureSoon + 5*time.Millisecond, captureQuiet - 5*time.Millisecond, time.Second} {
				bubble(t, fmt.Sprintf("%s by %s/%v", name, comm, pause), func(t *testing.T) {
					r := start(t, iptables.NFT, setup{})
					r.youngPod()
					r.after(20 * time.Second)
					for _, f := range rules.Families() {
						must(t, r.fake.As(78, comm).RestoreNoflush(f, section(rules.Nat, line)))
					}
					r.after(pause)
					for _, f := range rules.Families() {
						must(t, r.fake.As(79, "iptables").Flush(f, rules.Nat, ""))
					}
					r.after(20 * time.Second)
					deleted := line[1] == 'D'
					for _, f := range rules.Families() {
						r.wantYoungRules("after the flush", f, !deleted || comm == "agent" && pause < captureQuiet, deleted)
					}
					r.wantReady()
				})
			}
		}
	}
}

// TestRemovedByAnOwnersName: a script with the name of a CNI plugin removes a rule, and then
// flushes the table. The rule comes back: its removal was half of the flush.
func TestRemovedByAnOwnersName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		r.youngPod()
		r.after(20 * time.Second)
		for _, lines := range []string{"-D CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j " + young, "-F"} {
			for _, f := range rules.Families() {
				must(t, r.fake.As(78, "portmap").RestoreNoflush(f, section(rules.Nat, lines)))
			}
		}
		r.after(20 * time.Second)
		r.wantYoungPod("after a script called portmap", true)
		r.wantReady()
	})
}

// TestTheLastMomentIsNotHalfAFlush: a flush has several commands. canaryd does not learn the
// states between them.
func TestTheLastMomentIsNotHalfAFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		want := r.d.Status().Generation
		for _, f := range rules.Families() {
			for _, table := range []rules.TableName{rules.Mangle, rules.Filter, rules.Nat} {
				must(t, r.fake.Flush(f, table, ""))
				r.after(5 * time.Millisecond)
				must(t, r.fake.DeleteChains(f, table))
			}
		}
		r.after(20 * time.Second)
		r.wantReady()
		if got := r.d.Status().Generation; got.ID != want.ID {
			t.Errorf("the generation is %+v, want %+v", got, want)
		}
	})
}

// TestTheLastMomentInAPause: rules are written right before a flush. The end of a pause
// restores them, and observe mode keeps them in the generation.
func TestTheLastMomentInAPause(t *testing.T) {
	for _, mode := range []api.Mode{api.Heal, api.Observe} {
		t.Run(string(mode), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{mode: mode})
				rulesBefore := r.d.Status().Generation.Rules
				if mode == api.Heal {
					must(t, r.d.pauseFor(t, time.Minute))
				}
				r.youngPod()
				must(t, r.fake.FlushRuleset())
				r.settled()
				r.wantYoungPod("in the pause", false)
				if mode == api.Observe {
					if record := r.oneRecord(); record.Outcome != api.WaitingObserve {
						t.Errorf("the record is %+v", record)
					}
					if got := r.d.Status().Generation.Rules; got != rulesBefore+4 {
						t.Errorf("the generation has %d rules, want %d and the pod's four", got, rulesBefore)
					}
					return
				}
				r.after(2 * time.Minute)
				r.wantYoungPod("after the pause", true)
			})
		})
	}
}

// TestTheLastMomentThatWasMissed: if the kernel dropped notifications, canaryd uses the last
// read.
func TestTheLastMomentThatWasMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		r.youngPod()
		must(t, r.fake.FlushRuleset())
		r.fake.ForgetTakings()
		r.settled()
		r.wantYoungPod("after the flush", false)
		r.wantReady()
	})
}

// TestTheLastMomentOfASavedFile: in a pause a saved file restores the rules of a deleted pod,
// and a flush takes them. canaryd does not restore them with the rest.
func TestTheLastMomentOfASavedFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		r.youngPod()
		r.after(20 * time.Second)
		saved := map[rules.Family]string{}
		for _, f := range rules.Families() {
			saved[f] = r.fake.Save(f)
			must(t, r.fake.As(77, "portmap").RestoreNoflush(f, section(rules.Nat, "-D CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j "+young,
				"-F "+young, "-X "+young)))
		}
		r.after(30 * time.Second)
		must(t, r.d.pauseFor(t, time.Minute))
		for _, f := range rules.Families() {
			must(t, r.fake.Restore(f, saved[f]))
		}
		r.after(time.Second)
		r.wantYoungPod("by the file", true)
		must(t, r.fake.FlushRuleset())
		r.after(2 * time.Minute)
		r.wantYoungPod("after the pause", false)
		r.wantReady()
	})
}

// TestTheLastMomentWhileLearningIsStopped: in observe mode a loss stops the learning of a table
// until its owner has restored the rules. canaryd learns nothing that another process writes
// there meanwhile, also if a second flush follows at once.
func TestTheLastMomentWhileLearningIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{mode: api.Observe})
		want := r.d.Status().Generation.ID
		flush := func() {
			for _, f := range rules.Families() {
				must(t, r.fake.Flush(f, rules.Nat, ""))
			}
		}
		flush()
		r.settled()
		r.youngPod()
		flush()
		r.settled()
		if got := r.d.Status().Generation.ID; got != want {
			t.Errorf("the generation is %s, want %s as before the first flush", got, want)
		}
	})
}

// anEarlierMoment shows a state from before the last read.
type anEarlierMoment struct {
	*iptablestest.Fake
	armed *bool
	old   map[rules.TableName][]iptables.Snapshot
}

func (k anEarlierMoment) Before(f rules.Family, _ uint64) map[rules.TableName][]iptables.Snapshot {
	if !*k.armed || f != rules.IPv4 {
		return nil
	}
	return k.old
}

// TestTheLastMomentIsNoOlderThanARead: a read shows that a rule is gone. canaryd does not learn
// the rule from an older state, also while a chain that shrank before that state waits.
func TestTheLastMomentIsNoOlderThanARead(t *testing.T) {
	for _, waits := range []bool{false, true} {
		t.Run(fmt.Sprint(waits), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake, armed, old := loadedFake(t, iptables.NFT), false, map[rules.TableName][]iptables.Snapshot{}
				r := startOn(t, fake, setup{kernel: anEarlierMoment{fake, &armed, old}})
				r.youngPod()
				r.after(20 * time.Second)
				write := func(lines ...string) {
					for _, f := range rules.Families() {
						must(t, r.fake.As(77, "portmap").RestoreNoflush(f, section(rules.Nat, lines...)))
					}
					r.after(100 * time.Millisecond) // a read shows it, and the marks are still the same
				}
				if waits {
					write("-F " + young)
				}
				snapshot, err := fake.Read(t.Context(), rules.IPv4)
				must(t, err)
				old[rules.Nat] = []iptables.Snapshot{snapshot}
				write("-D CNI-HOSTPORT-DNAT -p tcp --dport 8088 -j " + young)
				armed = true
				must(t, fake.FlushRuleset())
				r.settled()
				if text := r.fake.SaveTable(rules.IPv4, rules.Nat); strings.Contains(text, "-j "+young) {
					t.Errorf("a rule is back that its owner had removed:\n%s", text)
				}
				r.wantReady()
			})
		})
	}
}

// TestTheLastMomentWhileAReplayIsProved: a flush begins with a table without rules. canaryd
// restores its marks, and the flusher takes the next table before the proof. canaryd also
// restores the rules that were written right before the flush.
func TestTheLastMomentWhileAReplayIsProved(t *testing.T) {
	for _, step := range []string{"begin", "restore", "restored", "closed"} {
		t.Run(step, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake, armed := loadedFake(t, iptables.NFT), false
				r := startOn(t, fake, setup{kernel: stepping{fake, func(what string, _ iptables.Session) {
					if armed && what == step {
						armed = false
						must(t, fake.Flush(rules.IPv4, rules.Nat, ""))
					}
				}}})
				r.youngPod()
				armed = true
				must(t, fake.Flush(rules.IPv4, rules.Mangle, ""))
				r.after(20 * time.Second)
				if armed {
					t.Fatal("nothing was written")
				}
				r.wantYoungPod("after the flush", true)
				r.wantReady()
			})
		})
	}
}
