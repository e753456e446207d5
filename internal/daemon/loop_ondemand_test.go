package daemon

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// dnsLines returns rules of NodeLocal DNSCache in raw, and calicoLines chains of Calico's
// there.
func dnsLines(verb string) []string {
	const skip = ` -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`
	return []string{
		verb + " PREROUTING -d 169.254.20.10/32 -p udp -m udp --dport 53" + skip,
		verb + " PREROUTING -d 169.254.20.10/32 -p tcp -m tcp --dport 53" + skip,
		verb + " OUTPUT -s 169.254.20.10/32 -p udp -m udp --sport 53" + skip,
	}
}

func calicoLines() []string {
	return []string{
		":cali-PREROUTING - [0:0]", ":cali-OUTPUT - [0:0]",
		"-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000", "-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000",
		"-I OUTPUT -j cali-OUTPUT", "-I PREROUTING -j cali-PREROUTING",
	}
}

// onDemandNode returns a node whose raw has rules of both and of a stranger. canaryd guards
// both.
func onDemandNode(t *testing.T, backend iptables.Backend) (*iptablestest.Fake, setup) {
	fake := loadedFake(t, backend)
	lines := append(calicoLines(), dnsLines("-A")...)
	must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Raw, append(lines, "-A OUTPUT -p icmp -j DROP")...)))
	return fake, setup{protect: []string{"kube", "cni", "cali-*", "node-local-dns"}}
}

// raw returns the rules of raw's chains, without marks and the stranger's rule.
func (r *rig) raw() map[string][]string {
	all := map[string][]string{}
	table := r.tables()[rules.IPv4][rules.Raw]
	if table == nil {
		return nil
	}
	for _, c := range table.Chains {
		for _, rule := range c.Rules {
			if !canary.IsMark(rule) && !strings.Contains(rule.Spec, "icmp") {
				all[c.Name] = append(all[c.Name], rule.Spec)
			}
		}
	}
	return all
}

func (r *rig) wantRaw(what string, want map[string][]string) {
	r.t.Helper()
	if d := cmp.Diff(want, r.raw()); d != "" {
		r.t.Errorf("%s, raw is another (-want +got):\n%s", what, d)
	}
}

// TestRawIsGuarded: canaryd notices each kind of flush of raw, and restores all protected rules
// in their order, once each.
func TestRawIsGuarded(t *testing.T) {
	flushed := func(r *rig, tables ...rules.TableName) {
		for _, table := range tables {
			must(r.t, r.fake.As(11, "iptables").Flush(rules.IPv4, table, ""))
		}
	}
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake, s := onDemandNode(t, backend)
		saved, dir := fake.Save(rules.IPv4), t.TempDir()
		s.store = openStore(t, dir, identity(backend))
		r := run(t, fake, s)
		r.settled()
		want := r.raw()
		if got := r.marked(rules.IPv4); !slices.Contains(got, rules.Raw) || slices.Contains(got, rules.Security) {
			t.Errorf("canaries stand in %v", got)
		}
		if got := r.marked(rules.IPv6); slices.Contains(got, rules.Raw) {
			t.Errorf("IPv6 has canaries in %v", got)
		}
		flushes := 0
		for _, c := range []struct {
			name string
			on   []iptables.Backend
			kind canary.Verdict
			do   func()
		}{
			{"-F", nil, canary.Emptied, func() { flushed(r, rules.Raw) }},
			{"-F and -X", nil, canary.ChainDeleted, func() {
				flushed(r, rules.Raw)
				must(t, r.fake.DeleteChains(rules.IPv4, rules.Raw))
			}},
			{"-F PREROUTING", nil, canary.JumpsMissing, func() { must(t, r.fake.Flush(rules.IPv4, rules.Raw, "PREROUTING")) }},
			{"-F of all tables", nil, canary.Emptied, func() { flushed(r, protect.Tables()...) }},
			{"a restore of an empty table", nil, "", func() { must(t, r.fake.Restore(rules.IPv4, section(rules.Raw))) }},
			{"a restore of saved rules", nil, canary.ChainDeleted, func() { must(t, r.fake.Restore(rules.IPv4, saved)) }},
			{"nft delete table", []iptables.Backend{iptables.NFT}, canary.TableDeleted, func() { must(t, r.fake.DeleteTable(rules.IPv4, rules.Raw)) }},
		} {
			if c.on != nil && !slices.Contains(c.on, backend) {
				continue
			}
			c.do()
			r.after(20 * time.Second)
			flushes++
			records := r.records(0)
			if len(records) != flushes {
				t.Fatalf("%s: %d records", c.name, len(records))
			}
			if f := records[len(records)-1]; f.Outcome != reload.Proved || c.kind != "" && f.Kind != c.kind || !slices.Contains(f.Tables, rules.Raw) {
				t.Errorf("%s: the record is %+v", c.name, f)
			}
			r.wantRaw("after "+c.name, want)
			r.wantReady()
		}
		if s := r.d.Status(); s.Families[rules.IPv4][rules.Raw] == "" || s.Families[rules.IPv6][rules.Raw] != "" || s.Families[rules.IPv4][rules.Security] != "" {
			t.Errorf("the status has %v", s.Families)
		}
		if n := len(r.metrics("canary_present")); n != 7 {
			t.Errorf("%d canaries are shown, want 7", n)
		}
		r.stop()

		// The next start restores the last rules in force.
		flushed(r, rules.Raw)
		s.store = openStore(t, dir, identity(backend))
		r = run(t, fake, s)
		r.after(5 * time.Second)
		r.wantRaw("after a start", want)
	})
}

// TestOwnerLeavesRaw: an owner deletes its rules in raw by name, and they stay deleted. With
// the last one canaryd's marks are deleted. After a deletion of the table canaryd restores
// nothing.
func TestOwnerLeavesRaw(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Raw, dnsLines("-A")...)))
		dir := t.TempDir()
		s := setup{protect: []string{"kube", "cni", "node-local-dns"}, store: openStore(t, dir, identity(backend))}
		r := run(t, fake, s)
		r.settled()
		lines := dnsLines("-D")
		must(t, fake.As(22, "node-cache").RestoreNoflush(rules.IPv4, section(rules.Raw, lines[0])))
		r.after(30 * time.Second)
		must(t, fake.Flush(rules.IPv4, rules.Raw, ""))
		r.after(30 * time.Second)
		if got := r.raw(); len(got["PREROUTING"]) != 1 || len(got["OUTPUT"]) != 1 {
			t.Errorf("after the removal of one rule and a flush raw has %v", got)
		}
		for round := range 2 {
			for _, line := range lines[1:] {
				must(t, fake.As(22, "node-cache").RestoreNoflush(rules.IPv4, section(rules.Raw, line)))
			}
			r.after(2 * time.Minute)
			if got := r.marked(rules.IPv4); slices.Contains(got, rules.Raw) {
				t.Errorf("round %d: canaries stand in %v", round, got)
			}
			for _, c := range r.tables()[rules.IPv4][rules.Raw].Chains {
				if len(c.Rules) > 0 {
					t.Errorf("round %d: %s has %v", round, c.Name, c.Rules)
				}
			}
			if _, shown := r.d.Status().Families[rules.IPv4][rules.Raw]; shown {
				t.Error("the status has raw")
			}
			if n := len(r.metrics("canary_present")); n != 6 {
				t.Errorf("%d canaries are shown, want 6", n)
			}
			r.wantReady()
			must(t, fake.Flush(rules.IPv4, rules.Raw, "")) // nothing is lost
			if backend == iptables.NFT {
				must(t, fake.DeleteTable(rules.IPv4, rules.Raw))
			}
			r.after(time.Minute)
			if backend == iptables.NFT && r.tables()[rules.IPv4][rules.Raw] != nil {
				t.Error("canaryd has made raw")
			}
			if n := len(r.records(0)); n != 1+round {
				t.Errorf("round %d: %d records, want %d", round, n, 1+round)
			}
			if round == 1 {
				break
			}
			must(t, fake.As(22, "node-cache").RestoreNoflush(rules.IPv4, section(rules.Raw, dnsLines("-A")[1:]...))) // it is back
			r.after(5 * time.Second)
			if got := r.marked(rules.IPv4); !slices.Contains(got, rules.Raw) {
				t.Errorf("raw has no canary again: %v", got)
			}
			must(t, fake.Flush(rules.IPv4, rules.Raw, ""))
			r.after(5 * time.Second)
			if got := r.raw(); len(got["PREROUTING"]) != 1 || len(got["OUTPUT"]) != 1 {
				t.Errorf("after its return and a flush raw has %v", got)
			}
		}
		r.stop()
		r = run(t, fake, setup{protect: s.protect, store: openStore(t, dir, identity(backend))})
		r.after(5 * time.Second)
		r.wantReady()
		if n := len(r.records(0)); n != 0 {
			t.Errorf("a start has found a flush: %d records", n)
		}
	})
}

// TestTableGoesBeforeItsMarks: a process deletes a table while canaryd waits to remove its own
// marks there. canaryd plants none again.
func TestTableGoesBeforeItsMarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Raw, dnsLines("-A")...)))
		r := run(t, fake, setup{protect: []string{"kube", "cni", "node-local-dns"}})
		r.settled()
		for _, line := range dnsLines("-D") {
			must(t, fake.As(22, "node-cache").RestoreNoflush(rules.IPv4, section(rules.Raw, line)))
		}
		for range 1000 { // until the removal is learned
			if r.after(10 * time.Millisecond); r.d.Status().LearningPendingSince.IsZero() {
				break
			}
		}
		must(t, fake.DeleteTable(rules.IPv4, rules.Raw))
		r.after(time.Minute)
		if r.tables()[rules.IPv4][rules.Raw] != nil {
			t.Error("canaryd has made raw")
		}
		r.wantReady()
	})
}

// TestNoRawIsMade: a node has no rules in raw and security. canaryd never makes these tables,
// and plants no mark in tables of other programs.
func TestNoRawIsMade(t *testing.T) {
	for _, there := range []bool{false, true} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			fake := loadedFake(t, backend)
			onDemand := []rules.TableName{rules.Raw, rules.Security}
			if there {
				for _, table := range onDemand {
					must(t, fake.RestoreNoflush(rules.IPv4, section(table, "-A OUTPUT -p icmp -j DROP")))
				}
			}
			want := func(what string) {
				t.Helper()
				for _, table := range onDemand {
					got := tablesOf4(fake, t)[table]
					if (got != nil) != there {
						t.Errorf("%s, %s exists: %t", what, table, got != nil)
					}
					if got.Chain(canary.DefaultChain) != nil {
						t.Errorf("%s, %s has a canary", what, table)
					}
				}
			}
			dir := t.TempDir()
			for _, mode := range []api.Mode{api.Heal, api.Observe, api.Heal} {
				r := run(t, fake, setup{mode: mode, store: openStore(t, dir, identity(backend)), protect: []string{"kube", "cni", "cali-*", "node-local-dns", "docker"}})
				r.after(5 * time.Second)
				want("after a start")
				for _, table := range protect.Always() {
					must(t, fake.Flush(rules.IPv4, table, ""))
				}
				r.after(5 * time.Second)
				want("after a flush")
				if mode == api.Heal {
					_, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: r.d.Status().Generation.ID})
					must(t, err)
					want("after a restore")
					reply, err := r.d.Drill(t.Context(), api.DrillRequest{Table: rules.Raw, Kind: canary.Emptied})
					if err != nil || !strings.Contains(reply.Reason, "nothing is protected in raw") {
						t.Errorf("a drill of raw says %q: %v", reply.Reason, err)
					}
					r.wantReady()
				}
				r.after(5 * time.Minute)
				want("later")
				r.stop()
			}
		})
	}
}

// tablesOf4 returns a Fake's tables of IPv4.
func tablesOf4(fake *iptablestest.Fake, t *testing.T) rules.Ruleset {
	return (&rig{t: t, fake: fake}).tables()[rules.IPv4]
}

// TestMarksOfAForgottenRunAreRemoved: the state is gone, and --protect names nothing in raw.
// canaryd removes the last run's marks there, and no other rule.
func TestMarksOfAForgottenRunAreRemoved(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake, s := onDemandNode(t, backend)
		s.store = openStore(t, t.TempDir(), identity(backend))
		first := run(t, fake, s)
		first.settled()
		want := first.raw()
		if !slices.Contains(first.marked(rules.IPv4), rules.Raw) {
			t.Fatal("raw has no marks")
		}
		first.stop()
		r := run(t, fake, setup{protect: []string{"kube", "cni"}, store: openStore(t, t.TempDir(), identity(backend))})
		r.settled()
		r.wantReady()
		r.wantRaw("after the start", want)
		table := r.tables()[rules.IPv4][rules.Raw]
		if table.Chain(canary.DefaultChain) != nil || slices.ContainsFunc(table.Chains, func(c rules.Chain) bool { return slices.ContainsFunc(c.Rules, canary.IsMark) }) {
			t.Errorf("marks stand in raw: %+v", table)
		}
	})
}
