package daemon

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// unprotected returns the number of a table's rules that --protect does not name.
func (r *rig) unprotected(f rules.Family, t rules.TableName) (n int) {
	for _, c := range r.tables()[f][t].Chains {
		builtin := rules.Builtin(t, c.Name)
		for _, rule := range c.Rules {
			protected := !builtin && r.d.cfg.Protection.Chain(c.Name) || builtin && (r.d.cfg.Protection.Chain(rule.Target) || r.d.cfg.Protection.Rule(t, c.Name, rule))
			if !protected && !canary.IsMark(rule) {
				n++
			}
		}
	}
	return n
}

// withOthers runs a daemon on a node with three rules of another owner in mangle.
func withOthers(t *testing.T, backend iptables.Backend, s setup) *rig {
	fake := loadedFake(t, backend)
	must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, ":MINE - [0:0]", "-A MINE -p tcp -j ACCEPT", "-A MINE -j RETURN", "-A PREROUTING -j MINE")))
	r := run(t, fake, s)
	r.settled()
	return r
}

// TestUnprotectedRulesAreCounted: a flush takes rules of others. Record and metric count them
// by table, and not among the lost rules.
func TestUnprotectedRulesAreCounted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := withOthers(t, backend, setup{})
		had := r.unprotected(rules.IPv4, rules.Mangle)
		if had < 3 {
			t.Fatalf("%d rules of others stand in mangle", had)
		}
		moved := r.moved(func() {
			must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Mangle, ""))
			r.settled()
		}, "flushed_unprotected")
		wantMoved(t, moved, series{"flushed_unprotected_rules_total{family=ipv4,table=mangle}": float64(had)})
		record := r.oneRecord()
		if record.Lost.Unprotected != had || len(record.Lost.Tables) != 1 || record.Lost.Tables[0].Unprotected != had {
			t.Errorf("%d rules of others were lost, the record has %+v", had, record.Lost)
		}
		if want := fmt.Sprintf(", and %d rules that --protect does not name", had); record.Lost.UnprotectedText() != want {
			t.Errorf("in words it is %q, want %q", record.Lost.UnprotectedText(), want)
		}
		r.wantLog("Rules that --protect does not name were lost, too")

		// They are not restored, and the next flush takes none.
		moved = r.moved(func() {
			must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Mangle, ""))
			r.settled()
		}, "flushed_unprotected")
		wantMoved(t, moved, series{})
	})
}

// TestUnprotectedRulesThatStay: rules of others that the flush spared, or that their owner has
// already restored, do not count.
func TestUnprotectedRulesThatStay(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := withOthers(t, backend, setup{})
		moved := r.moved(func() {
			must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, "PREROUTING"))
			r.settled()
		}, "flushed_unprotected", "flush_events")
		if n := moved["flush_events_total"]; n != 1 {
			t.Fatalf("%v flushes", n)
		}
		if record := r.oneRecord(); record.Lost.Unprotected != int(moved["flushed_unprotected_rules_total{family=ipv4,table=nat}"]) {
			t.Errorf("%d in the record, and %v", record.Lost.Unprotected, moved)
		}
		if moved["flushed_unprotected_rules_total{family=ipv4,table=mangle}"] != 0 {
			t.Errorf("mangle was not flushed: %v", moved)
		}
	})
}

// TestUnprotectedRulesThatAreNotKnown: the last read does not show the table right before the
// flush, or another process wrote to it too. Record, text and metrics say that the number is
// unknown.
func TestUnprotectedRulesThatAreNotKnown(t *testing.T) {
	for name, before := range map[string]func(r *rig){
		"another process wrote right before": func(r *rig) {
			must(r.t, r.fake.As(22, "dockerd").RestoreNoflush(rules.IPv4, section(rules.Mangle, "-A MINE -j DROP")))
		},
		"what commits did is not known": func(r *rig) {
			must(r.t, r.fake.As(22, "dockerd").RestoreNoflush(rules.IPv4, section(rules.Nat, ":DOCKER - [0:0]")))
			r.fake.OnCommit(func(nft.Commit) { r.fake.ForgetTakings() })
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := withOthers(t, iptables.NFT, setup{})
				moved := r.moved(func() {
					before(r)
					must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Mangle, ""))
					r.after(3 * time.Second)
				}, "flushed_unprotected")
				wantMoved(t, moved, series{"flushed_unprotected_unknown_total{family=ipv4,table=mangle}": 1})
				if record := r.oneRecord(); record.Lost.Unprotected != 0 || record.Lost.UnprotectedText() != "; how many rules went that --protect does not name is not known" {
					t.Errorf("%+v", record.Lost)
				}
			})
		})
	}
}

// TestWhatIsNoFlushOfOthersIsNotUnknown: all marks are in force. Then canaryd reports nothing
// about rules of others, even if the table was not read right before.
func TestWhatIsNoFlushOfOthersIsNotUnknown(t *testing.T) {
	for name, take := range map[string]string{"a chain alone": "-F KUBE-SERVICES", "a jump by name": "-D OUTPUT " + hostport} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := withOthers(t, backend, setup{})
				moved := r.moved(func() {
					r.write(rules.Nat, ":MINE2 - [0:0]", "-A MINE2 -j ACCEPT")
					r.write(rules.Nat, take)
					r.after(30 * time.Second)
				}, "flushed_unprotected")
				wantMoved(t, moved, series{})
				if record := r.oneRecord(); record.Lost.UnprotectedUnknown || record.Lost.UnprotectedText() != "" {
					t.Errorf("%+v", record.Lost)
				}
			})
		})
	}
}

// TestUnprotectedRulesInObserveMode: observe mode counts them too.
func TestUnprotectedRulesInObserveMode(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := withOthers(t, backend, setup{mode: api.Observe})
		had := r.unprotected(rules.IPv4, rules.Mangle)
		must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Mangle, ""))
		r.settled()
		if record := r.oneRecord(); record.Lost.Unprotected != had {
			t.Errorf("%d rules of others were lost, the record has %+v", had, record.Lost)
		}
	})
}

// TestUnprotectedRulesThatStayInObserveMode: a flush of one built-in chain takes no rules of
// others in another chain.
func TestUnprotectedRulesThatStayInObserveMode(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":MINE - [0:0]", "-A MINE -p tcp -j ACCEPT", "-A PREROUTING -j MINE")))
		r := run(t, fake, setup{mode: api.Observe})
		r.settled()
		had := r.unprotected(rules.IPv4, rules.Nat)
		must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, "OUTPUT"))
		left := r.unprotected(rules.IPv4, rules.Nat)
		r.settled()
		if record := r.oneRecord(); left == 0 || record.Lost.Unprotected != had-left {
			t.Errorf("of %d rules of others %d are left, the record has %+v", had, left, record.Lost)
		}
	})
}
