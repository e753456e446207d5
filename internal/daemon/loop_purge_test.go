package daemon

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// A deletion is a line of a purge.
type deletion struct {
	table  rules.TableName
	line   string
	mark   bool
	unread bool // its command ended before canaryd could read its line
}

// deletions returns the deletions of all rules of the node's IPv4 tables.
func (r *rig) deletions() (marks, others []deletion) {
	r.t.Helper()
	set := r.tables()[rules.IPv4]
	for _, name := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		for _, c := range set[name].Chains {
			for _, rule := range c.Rules {
				if canary.IsMark(rule) {
					marks = append(marks, deletion{table: name, line: "-D " + c.Name + " " + rule.Spec, mark: true})
				} else {
					others = append(others, deletion{table: name, line: "-D " + c.Name + " " + rule.Spec})
				}
			}
		}
	}
	return marks, others
}

// delete deletes rules one by one, with a command of iptables for each and a pause after it.
// Another process has started these commands.
func (r *rig) delete(by watch.Doer, pause time.Duration, list []deletion) {
	r.t.Helper()
	for _, d := range list {
		stamp, err := r.fake.Stamp(r.t.Context(), rules.IPv4)
		must(r.t, err)
		r.deleted++
		pid, genid := by.PID+r.deleted, uint32(stamp.Value)+1
		if r.fake.Info().Backend == iptables.Legacy {
			genid = 0
		}
		command := "iptables -w -t " + string(d.table) + " " + strings.ReplaceAll(d.line, `"`, "")
		if d.unread {
			command = ""
		}
		r.writers.Note(watch.Writer{Time: time.Now(), Genid: genid, PID: pid, Comm: "iptables", Command: command, By: by})
		_ = r.fake.As(pid, "iptables").RestoreNoflush(rules.IPv4, section(d.table, d.line))
		r.after(pause)
	}
}

var (
	puppet = watch.Doer{PID: 4711, Start: 1, Comm: "puppet", Command: "puppet agent"}
	person = watch.Doer{PID: 5711, Start: 2, Comm: "bash", Command: "-bash"}
	script = watch.Doer{PID: 6711, Start: 3, Comm: "bash", Command: "bash cleanup.sh"}
	proxy  = watch.Doer{PID: 7711, Start: 4, Comm: "kube-proxy", Command: "kube-proxy --cleanup"}
	gone   = watch.Doer{PID: 8711, Comm: "iptables"}
)

// TestAPurgeDeletesMarksByName: a process deletes rules and marks by name. All its deletions
// count as lost, however late it deletes the marks, and however slow it is. kube-proxy's
// removals and additions right before and after that stay.
func TestAPurgeDeletesMarksByName(t *testing.T) {
	for _, pause := range []time.Duration{0, 50 * time.Millisecond, 300 * time.Millisecond} {
		for _, place := range []float64{0, 0.5, 1} {
			t.Run(fmt.Sprintf("%s/%v", pause, place), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := start(t, iptables.NFT, setup{})
					owner := r.fake.As(900, "iptables-restor")
					must(t, owner.RestoreNoflush(rules.IPv4, scenario.NewService))
					r.after(time.Minute)
					must(t, owner.RestoreNoflush(rules.IPv4, removeService))
					r.after(3 * time.Second)
					marks, list := r.deletions()
					list = list[:60]
					before, foreign := r.tables(), r.tables()
					list = slices.Insert(list, int(place*float64(len(list))), marks...)
					r.delete(puppet, pause, list)
					for f, set := range r.tables() { // owners restore their unprotected rules
						foreign[f] = set
					}
					r.after(10 * time.Second)
					r.wantTables(before, foreign)
					r.wantReady()
					if n := len(r.records(0)); n == 0 || place == 0 && n > 1 {
						t.Errorf("%d flush records", n)
					}
					for _, record := range r.records(0) {
						if record.Culprit.PID < puppet.PID || record.Culprit.PID > puppet.PID+uint32(len(list)) {
							t.Errorf("the culprit is %+v", record.Culprit)
						}
					}
					must(t, owner.RestoreNoflush(rules.IPv4, scenario.NewService))
					r.after(time.Second)
					must(t, owner.RestoreNoflush(rules.IPv4, removeService))
					records := len(r.records(0))
					r.after(20 * time.Second)
					r.wantTables(before, foreign)
					if n := len(r.records(0)); n != records {
						t.Errorf("what kube-proxy removed made %d records", n-records)
					}
				})
			})
		}
	}
}

// TestWhoPurges: the deletion of a mark by name shows a purge by an agent or a script. It
// proves nothing about other processes' deletions. In doubt a deletion is a decision.
func TestWhoPurges(t *testing.T) {
	for _, tt := range []struct {
		name  string
		marks watch.Doer    // deletes a mark,
		rules [3]watch.Doer // and then these delete three rules
		line  string        // the mark's command; empty: it names the mark
		back  int           // the number of restored rules
		slow  bool          // the commands are seconds apart
	}{
		{"an agent", puppet, [3]watch.Doer{puppet, puppet, puppet}, "", 3, false},
		{"an agent, and a script", puppet, [3]watch.Doer{script, script, script}, "", 0, false},
		{"an agent, and an owner", puppet, [3]watch.Doer{proxy, proxy, proxy}, "", 0, false},
		{"an agent, and another one that was gone", puppet, [3]watch.Doer{gone, gone, gone}, "", 0, false},
		{"an agent, with a command that was gone", puppet, [3]watch.Doer{puppet, gone, puppet}, "", 3, false},
		{"a command that was gone, between an agent and an owner", puppet, [3]watch.Doer{puppet, gone, proxy}, "", 1, false},
		{"a busy node: an agent, with a command that was gone", puppet, [3]watch.Doer{puppet, gone, puppet}, "", 3, true},
		{"a busy node: a command that was gone, between an agent and an owner", puppet, [3]watch.Doer{puppet, gone, proxy}, "", 1, true},
		{"a script, and an owner", script, [3]watch.Doer{proxy, proxy, proxy}, "", 0, false},
		{"a person", person, [3]watch.Doer{person, person, person}, "", 0, false},
		{"an owner", proxy, [3]watch.Doer{proxy, proxy, proxy}, "", 0, false},
		{"a process that was gone", gone, [3]watch.Doer{gone, gone, gone}, "", 0, false},
		{"a flush of the mark's chain", puppet, [3]watch.Doer{puppet, puppet, puppet}, "iptables -t nat -F PREROUTING", 0, false},
		{"a flush of the table", puppet, [3]watch.Doer{puppet, puppet, puppet}, "iptables -t nat -F", 0, false},
		{"a deletion by number", puppet, [3]watch.Doer{puppet, puppet, puppet}, "iptables -t nat -D PREROUTING 1", 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				r.after(time.Minute)
				before := r.tables()
				marks, list := r.deletions()
				i := slices.IndexFunc(marks, func(d deletion) bool { return strings.HasPrefix(d.line, "-D PREROUTING") })
				stamp, err := r.fake.Stamp(t.Context(), rules.IPv4)
				must(t, err)
				if tt.line != "" {
					r.writers.Note(watch.Writer{Time: time.Now(), Genid: uint32(stamp.Value) + 1, PID: 1, Comm: "iptables", Command: tt.line, By: tt.marks})
				}
				r.delete(tt.marks, 2*time.Second, marks[i:i+1])
				r.wantTables(before, before)
				list = slices.DeleteFunc(list, func(d deletion) bool {
					return !strings.HasPrefix(d.line, "-D KUBE-SVC-") || !strings.Contains(d.line, "-j KUBE-MARK-MASQ")
				})
				pause := 100 * time.Millisecond
				if tt.slow {
					pause = 1500 * time.Millisecond
				}
				for i, by := range tt.rules {
					r.delete(by, pause, list[i:i+1])
				}
				back := func() (n int) {
					for _, d := range list[:3] {
						words := strings.SplitN(d.line, " ", 3)
						if slices.Contains(r.chain(rules.IPv4, d.table, words[1]), words[2]) {
							n++
						}
					}
					return n
				}
				r.after(time.Minute)
				if n := back(); n != tt.back {
					t.Errorf("%d of 3 rules are back, want %d", n, tt.back)
				}
				after := r.tables()
				must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Nat, "-F KUBE-SERVICES", "-F PREROUTING", "-F OUTPUT")))
				r.after(10 * time.Second)
				r.wantTables(after, r.tables()) // unprotected rules stay deleted
			})
		})
	}
}

// TestAPurgeWhoseCommandsAreUnread: on a busy node a command may end before canaryd can read
// its line. The kernel reports that it deleted one mark and nothing else. A script may do that
// once, by number.
func TestAPurgeWhoseCommandsAreUnread(t *testing.T) {
	for _, tt := range []struct {
		name string
		by   []watch.Doer // each deletes a mark
		back bool
	}{
		{"one mark", []watch.Doer{puppet}, false},
		{"two marks", []watch.Doer{puppet, puppet}, true},
		{"two marks, by two scripts", []watch.Doer{puppet, script}, false},
		{"two marks, by a person", []watch.Doer{person, person}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				r.after(time.Minute)
				before := r.tables()
				_, list := r.deletions()
				list = slices.DeleteFunc(list, func(d deletion) bool {
					return !strings.HasPrefix(d.line, "-D KUBE-SVC-") || !strings.Contains(d.line, "-j KUBE-MARK-MASQ")
				})
				r.delete(puppet, 2*time.Second, list[:1])
				for i, by := range tt.by {
					marks, _ := r.deletions() // the replay may have renewed the marks
					chain := []string{"-D PREROUTING", "-D OUTPUT"}[i]
					at := slices.IndexFunc(marks, func(d deletion) bool { return strings.HasPrefix(d.line, chain) })
					marks[at].unread = true
					r.delete(by, 2*time.Second, marks[at:at+1])
				}
				r.delete(puppet, 0, list[1:2])
				r.after(time.Minute)
				for i, d := range list[:2] {
					words := strings.SplitN(d.line, " ", 3)
					if back := slices.Contains(r.chain(rules.IPv4, d.table, words[1]), words[2]); back != tt.back {
						t.Errorf("rule %d is back: %t, want %t", i, back, tt.back)
					}
				}
				if tt.back {
					r.wantTables(before, before)
				}
			})
		})
	}
}

// TestAnAgentDeletesByName: without a deleted mark, deletions by name are decisions. So are the
// later deletions of a process that purged a while ago.
func TestAnAgentDeletesByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		_, list := r.deletions()
		i := slices.IndexFunc(list, func(d deletion) bool { return strings.HasPrefix(d.line, "-D KUBE-SERVICES") })
		r.delete(puppet, 2*time.Minute, list[i:i+1])
		if n := len(r.records(0)); n != 0 {
			t.Fatalf("%d records", n)
		}
		before := r.tables()
		marks, _ := r.deletions() // the marks are renewed
		r.delete(puppet, time.Minute, marks[:1])
		r.wantTables(before, before)
		r.delete(puppet, 0, list[i+1:i+2])
		before = r.tables()
		r.after(time.Minute)
		r.wantTables(before, before)
		if n := len(r.records(0)); n != 1 {
			t.Errorf("%d records, want that of the mark", n)
		}
	})
}

// TestAPurgeDeletesJumpsOnLegacy: only processes of the purge held the lock, so the jumps that
// were deleted meanwhile are back when it rests. If an owner also held it, a jump waits for its
// grace.
func TestAPurgeDeletesJumpsOnLegacy(t *testing.T) {
	for _, tt := range []struct {
		name string
		by   watch.Doer // deletes the jump in the middle
		soon bool
	}{
		{"a script alone", script, true},
		{"with a command that was gone", gone, true},
		{"with an owner", proxy, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.Legacy, setup{})
				r.after(time.Minute)
				before, foreign := r.tables(), r.tables()
				marks, list := r.deletions()
				list = slices.DeleteFunc(list, func(d deletion) bool {
					return !strings.HasPrefix(d.line, "-D PREROUTING") && !strings.HasPrefix(d.line, "-D OUTPUT") || !strings.Contains(d.line, "-j KUBE-")
				})
				if len(list) < 3 {
					t.Fatalf("%d jumps", len(list))
				}
				r.delete(script, 300*time.Millisecond, marks)
				r.delete(script, 300*time.Millisecond, list[:1])
				r.delete(tt.by, 300*time.Millisecond, list[1:2])
				r.delete(script, 300*time.Millisecond, list[2:])
				r.after(5 * time.Second)
				missing := 0
				for _, d := range list {
					chain, rest, _ := strings.Cut(strings.TrimPrefix(d.line, "-D "), " ")
					if !slices.Contains(r.chain(rules.IPv4, d.table, chain), rest) {
						missing++
					}
				}
				if tt.soon != (missing == 0) {
					t.Errorf("%d of %d jumps are missing", missing, len(list))
				}
				r.after(time.Minute)
				r.wantTables(before, foreign)
				r.wantReady()
			})
		})
	}
}

// TestAPurgeInAnyOrder: a purge takes jumps, and canaryd has learned some of the removals. All
// come back in their order, which decides about packets. Some commands ended before canaryd
// could read them.
func TestAPurgeInAnyOrder(t *testing.T) {
	for seed := range uint64(6) {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			t.Run(fmt.Sprintf("%s/%d", backend, seed), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := start(t, backend, setup{})
					r.after(time.Minute)
					_, list := r.deletions()
					rand.New(rand.NewPCG(seed, 1)).Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
					list = slices.DeleteFunc(list, func(d deletion) bool {
						chain, _, _ := strings.Cut(strings.TrimPrefix(d.line, "-D "), " ")
						return !slices.Contains([]string{"PREROUTING", "OUTPUT", "POSTROUTING", "KUBE-SERVICES", "CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-MASQ"}, chain)
					})
					before, foreign := r.tables(), r.tables()
					for i := range list {
						by := script
						if i%6 == 3 && i+1 < len(list) {
							by = gone
						}
						r.delete(by, 700*time.Millisecond, list[i:i+1])
					}
					marks, _ := r.deletions() // the marks may have been renewed
					r.delete(script, 300*time.Millisecond, marks)
					for f, set := range r.tables() { // owners restore their unprotected rules
						foreign[f] = set
					}
					r.after(time.Minute)
					r.wantTables(before, foreign)
					r.wantReady()
				})
			})
		}
	}
}
