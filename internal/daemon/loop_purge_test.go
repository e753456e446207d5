package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A deletion is a line of a purge.
type deletion struct {
	table rules.TableName
	line  string
	mark  bool
}

// deletions returns what deletes all rules of the node's IPv4 tables one by one.
func (r *rig) deletions() (marks, others []deletion) {
	r.t.Helper()
	set := r.tables()[rules.IPv4]
	for _, name := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
		for _, c := range set[name].Chains {
			for _, rule := range c.Rules {
				if canary.IsMark(rule) {
					marks = append(marks, deletion{name, "-D " + c.Name + " " + rule.Spec, true})
				} else {
					others = append(others, deletion{name, "-D " + c.Name + " " + rule.Spec, false})
				}
			}
		}
	}
	return marks, others
}

// TestAPurgeDeletesMarksByName: what a process deleted that deletes marks, too, is lost, whenever
// it comes to the marks and however slow it is. What kube-proxy removed right before and right
// after stays removed, and what it added stays.
func TestAPurgeDeletesMarksByName(t *testing.T) {
	for _, pause := range []time.Duration{0, 50 * time.Millisecond, 300 * time.Millisecond} {
		for _, place := range []float64{0, 0.5, 1} {
			t.Run(fmt.Sprintf("%s/%v", pause, place), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := start(t, iptables.NFT, setup{})
					proxy := r.fake.As(900, "iptables-restor")
					must(t, proxy.RestoreNoflush(rules.IPv4, scenario.NewService))
					r.after(time.Minute)
					must(t, proxy.RestoreNoflush(rules.IPv4, removeService))
					r.after(3 * time.Second)
					marks, list := r.deletions()
					list = list[:60]
					before, foreign := r.tables(), r.tables()
					list = slices.Insert(list, int(place*float64(len(list))), marks...)
					for _, d := range list {
						_ = r.fake.As(4711, "iptables").RestoreNoflush(rules.IPv4, section(d.table, d.line))
						r.after(pause)
					}
					for f, set := range r.tables() { // what is not protected its owners put back
						foreign[f] = set
					}
					r.after(10 * time.Second)
					r.wantTables(before, foreign)
					r.wantReady()
					if n := len(r.records(0)); n == 0 || place == 0 && n > 1 {
						t.Errorf("%d flush records", n)
					}
					for _, record := range r.records(0) {
						if record.Culprit.PID != 4711 {
							t.Errorf("the culprit is %+v", record.Culprit)
						}
					}
					must(t, proxy.RestoreNoflush(rules.IPv4, scenario.NewService))
					r.after(time.Second)
					must(t, proxy.RestoreNoflush(rules.IPv4, removeService))
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

// TestAPersonDeletesByName: without a mark among them, deletions by name are decisions, and so is
// what a process deletes again that purged a while ago.
func TestAPersonDeletesByName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		by := r.fake.As(4711, "iptables")
		marks, list := r.deletions()
		i := slices.IndexFunc(list, func(d deletion) bool { return strings.HasPrefix(d.line, "-D KUBE-SERVICES") })
		must(t, by.RestoreNoflush(rules.IPv4, section(list[i].table, list[i].line)))
		r.after(2 * time.Minute)
		if n := len(r.records(0)); n != 0 {
			t.Fatalf("%d records", n)
		}
		before := r.tables()
		marks, _ = r.deletions() // they are renewed
		must(t, by.RestoreNoflush(rules.IPv4, section(marks[0].table, marks[0].line)))
		r.after(time.Minute)
		r.wantTables(before, before)
		must(t, by.RestoreNoflush(rules.IPv4, section(list[i+1].table, list[i+1].line)))
		before = r.tables()
		r.after(time.Minute)
		r.wantTables(before, before)
		if n := len(r.records(0)); n != 1 {
			t.Errorf("%d records, want that of the mark", n)
		}
	})
}
