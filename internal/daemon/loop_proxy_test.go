package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

const proxyCanary = "KUBE-PROXY-CANARY"

// ofProxy reports whether a line of iptables-save belongs to kube-proxy, and not to kubelet or
// canaryd.
func ofProxy(line string) bool {
	for _, word := range []string{"KUBE-FIREWALL", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY", "KUBE-CANARYD-CANARY"} {
		if strings.Contains(line, word) {
			return false
		}
	}
	return strings.Contains(line, "KUBE-")
}

// proxyCleansUp does the same as kube-proxy --cleanup, 1.36, and as a start in nftables mode.
// In each family it deletes the jumps one by one. One restore per table then deletes the chains
// and canaries of nat, of filter, and last of mangle.
func (r *rig) proxyCleansUp() {
	r.t.Helper()
	for _, f := range rules.Families() {
		for _, table := range []rules.TableName{rules.Filter, rules.Nat} {
			for _, c := range r.tables()[f][table].Chains {
				for _, rule := range c.Rules {
					if rules.Builtin(table, c.Name) && ofProxy(rule.Target) {
						must(r.t, r.fake.RestoreNoflush(f, section(table, "-D "+c.Name+" "+rule.Spec)))
					}
				}
			}
		}
		for _, table := range []rules.TableName{rules.Nat, rules.Filter, rules.Mangle} {
			var declare, remove []string
			for _, c := range r.tables()[f][table].Chains {
				if ofProxy(c.Name) {
					declare, remove = append(declare, ":"+c.Name+" - [0:0]"), append(remove, "-X "+c.Name)
				}
			}
			must(r.t, r.fake.RestoreNoflush(f, section(table, append(declare, remove...)...)))
		}
	}
}

// proxyChains returns the present chains of kube-proxy.
func (r *rig) proxyChains() []string {
	r.t.Helper()
	var found []string
	for f, tables := range r.tables() {
		for table, set := range tables {
			for _, c := range set.Chains {
				if c.Name != proxyCanary && ofProxy(c.Name) {
					found = append(found, f.String()+" "+string(table)+" "+c.Name)
				}
			}
		}
	}
	return found
}

// flushAll flushes every table, and deletes every chain, as a firewall does.
func (r *rig) flushAll() {
	r.t.Helper()
	for _, f := range rules.Families() {
		for _, table := range protect.Always() {
			must(r.t, r.fake.Flush(f, table, ""))
			must(r.t, r.fake.DeleteChains(f, table))
		}
	}
}

// TestAProxyThatLeftStaysAway: all of kube-proxy's chains and its canary are gone, and every
// mark is in force. After a flush 200 ms later canaryd restores only the rules of others.
func TestAProxyThatLeftStaysAway(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		hint := r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT")
		r.proxyCleansUp()
		r.after(200 * time.Millisecond)
		r.wantNothingOf(proxyCanary)
		r.flushAll()
		r.settled()
		r.wantReady()
		if back := r.proxyChains(); len(back) > 0 {
			t.Errorf("chains of a kube-proxy that had left are back: %q", back)
		}
		if now := r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT"); len(now) != len(hint) {
			t.Errorf("CNI-HOSTPORT-DNAT holds %q, want %q", now, hint)
		}
		if r.chain(rules.IPv4, rules.Filter, "KUBE-FIREWALL") == nil {
			t.Error("kubelet's KUBE-FIREWALL is not back")
		}
		r.after(10 * time.Minute)
		if o := r.d.Status().RulesWithoutOwner; o != nil {
			t.Errorf("rules that are gone have no owner: %+v", o)
		}
	})
}

// wantNothingOf fails if any table has the chain.
func (r *rig) wantNothingOf(chain string) {
	r.t.Helper()
	for f, tables := range r.tables() {
		for table, set := range tables {
			if set.Chain(chain) != nil {
				r.t.Errorf("%s stands in %s %s", chain, f, table)
			}
		}
	}
}

// TestHalfOfAProxysChainsIsNotItsWord: one chain of kube-proxy's, or its canary, still exists.
// Then the removal of the others counts after two seconds, as ever.
func TestHalfOfAProxysChainsIsNotItsWord(t *testing.T) {
	for name, leave := range map[string]func(*rig){
		"its canary": func(r *rig) { r.write(rules.Mangle, ":"+proxyCanary+" - [0:0]") },
		"one chain":  func(r *rig) { r.write(rules.Filter, ":KUBE-PROXY-FIREWALL - [0:0]") },
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				r.after(20 * time.Second)
				before := r.d.Status().Generation.Chains
				r.proxyCleansUp()
				leave(r) // before canaryd has read
				r.after(time.Second)
				// IPv6's chains are gone for good; all of IPv4's are still known.
				if now := r.d.Status().Generation.Chains; now < before/2 {
					t.Errorf("the generation has %d chains, had %d", now, before)
				}
				r.flushNat()
				r.settled()
				if r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES") == nil {
					t.Error("KUBE-SERVICES is not back within two seconds")
				}
			})
		})
	}
}

// TestRulesWithoutAnOwner: kube-proxy has left, and a flush right after that makes canaryd
// restore its rules. Its canary does not come back, so the rules have no owner.
func TestRulesWithoutAnOwner(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{store: openStore(t, dir, identity(backend))})
		r.after(20 * time.Second)
		r.proxyCleansUp()
		r.flushAll() // before canaryd has read
		r.settled()
		r.wantReady()
		if len(r.proxyChains()) == 0 {
			t.Fatal("nothing is back that could be without an owner")
		}
		r.after(110 * time.Second)
		r.wantOwner(true)
		r.after(20 * time.Second)
		r.wantOwner(false)
		r.wantReady() // all rules are in force
		r.wantLog("kube-proxy's rules have no owner")
		r.wantLog("canaryd cleanup --rules --protect=kube-proxy")

		// After a restart canaryd knows that at once.
		r.stop()
		r = run(t, r.fake, setup{store: openStore(t, dir, identity(backend))})
		r.settled()
		r.wantOwner(false)

		// kube-proxy is back.
		r.write(rules.Mangle, ":"+proxyCanary+" - [0:0]")
		must(t, r.fake.RestoreNoflush(rules.IPv6, section(rules.Mangle, ":"+proxyCanary+" - [0:0]")))
		r.settled()
		r.wantOwner(true)
		r.wantLog("kube-proxy's rules have an owner again, or are gone")
		r.after(time.Hour)
		r.wantOwner(true)
	})
}

// wantOwner fails unless status and gauge say of kube-proxy's rules that they have an
// owner, or that they have none.
func (r *rig) wantOwner(has bool) {
	r.t.Helper()
	o := r.d.Status().RulesWithoutOwner
	if (o == nil) != has {
		r.t.Errorf("the status says %+v; want an owner: %t", o, has)
	}
	if o != nil && (len(o.Choices) != 4 || len(o.Families) != 2 || o.Since.IsZero()) {
		r.t.Errorf("the status says %+v", o)
	}
	if _, set := r.metrics("rules_without_owner")["rules_without_owner"]; set == has {
		r.t.Errorf("the gauge says %t; want an owner: %t", set, has)
	}
	if o == nil {
		return
	}
	for i, word := range []string{"spec.nodeName=NODE", "k3s", "rke2", "canaryd cleanup"} { // on this node only
		if c := o.Choices[i].Command; !strings.Contains(c, word) || strings.Contains(c, "rollout") {
			r.t.Errorf("choice %d is %q, want %s", i, c, word)
		}
	}
}

// TestANudgedProxyThatIsGone: kube-proxy was killed. The replay requests a full sync, and there
// is no answer.
func TestANudgedProxyThatIsGone(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		r.after(20 * time.Second)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		must(t, r.fake.Flush(rules.IPv6, rules.Nat, ""))
		r.settled()
		r.wantOwner(true)
		r.after(3 * time.Minute)
		r.wantOwner(false)
		r.proxyCleansUp() // an operator removes the rules
		r.settled()
		r.wantOwner(true)
		r.wantReady()
	})
}

// TestAProxyThatNeverPlantedACanary: kube-proxy in ipvs mode and before 1.17 has no canary, so
// its absence proves nothing.
func TestAProxyThatNeverPlantedACanary(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		for _, f := range rules.Families() {
			for _, table := range protect.Always() {
				must(t, fake.RestoreNoflush(f, section(table, ":"+proxyCanary+" - [0:0]", "-X "+proxyCanary)))
			}
		}
		r := run(t, fake, setup{})
		r.settled()
		r.flushAll()
		r.after(time.Hour)
		r.wantReady()
		r.wantOwner(true)
	})
}

// TestARulesetWithoutKUBE: an operator removes kube-proxy's rules as Cilium's documentation
// says, with iptables-save | grep -v KUBE | iptables-restore. That also removes canaryd's
// chain, as a firewall's saved file does, and the tables look the same after both. So it counts
// as a flush, and a running kube-proxy has its services back at once. The missing canary shows
// that kube-proxy is gone.
func TestARulesetWithoutKUBE(t *testing.T) {
	for _, test := range []struct {
		name  string
		lives bool
	}{{"and kube-proxy is gone", false}, {"and kube-proxy lives", true}} {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				r.after(20 * time.Second)
				chains := len(r.proxyChains())
				for _, f := range rules.Families() {
					var kept []string
					for line := range strings.Lines(r.fake.Save(f)) {
						if !strings.Contains(line, "KUBE") {
							kept = append(kept, line)
						}
					}
					must(t, r.fake.Restore(f, strings.Join(kept, "")))
				}
				r.settled()
				r.wantReady()
				if got := len(r.proxyChains()); got != chains {
					t.Errorf("%d chains of kube-proxy's are back, want %d", got, chains)
				}
				if record := r.records(0); len(record) != 1 || record[0].Outcome != reload.Proved {
					t.Errorf("the records are %+v", record)
				}
				if test.lives {
					r.after(25 * time.Second)
					for _, f := range rules.Families() {
						must(t, r.fake.RestoreNoflush(f, section(rules.Mangle, ":"+proxyCanary+" - [0:0]")))
					}
				}
				r.after(3 * time.Minute)
				r.wantOwner(test.lives)
			})
		})
	}
}

// TestCleanupOfOneOwnersRules: a cleanup removes the named owner's rules, and leaves the
// protected rules of others, kubelet's too.
func TestCleanupOfOneOwnersRules(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: true, Protect: "kube-proxy"}))
		if left := r.proxyChains(); len(left) > 0 {
			t.Errorf("chains of kube-proxy's are left: %q", left)
		}
		for _, place := range [][2]string{{"filter", "KUBE-FIREWALL"}, {"nat", "CNI-HOSTPORT-DNAT"}} {
			if len(r.chain(rules.IPv4, rules.TableName(place[0]), place[1])) == 0 {
				t.Errorf("%s is gone, too", place[1])
			}
		}
		r.wantNothingOf("KUBE-CANARYD-CANARY")
		if err := r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: true, Protect: "kubee"}); err == nil {
			t.Error("a cleanup of something that is no preset is not refused")
		}
	})
}
