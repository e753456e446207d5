package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// setPolicies sets the policy of built-in chains of filter.
func (r *rig) setPolicies(policy string, chains ...string) {
	r.t.Helper()
	for _, chain := range chains {
		must(r.t, r.fake.SetPolicy(rules.IPv4, rules.Filter, chain, policy))
	}
}

// wantClosed fails unless headline, readiness and metric say of these chains of filter that they
// have become closed, and when; "" is no chain.
func (r *rig) wantClosed(chains, since string) {
	r.t.Helper()
	r.wantClosedIn("policy_drops{family=ipv4,table=filter}", chains, since, "canaryd sets none")
}

// wantClosedIn is wantClosed for the chains that a metric counts.
func (r *rig) wantClosedIn(metric, chains, since, left string) {
	r.t.Helper()
	s := r.d.Status()
	text, n := "", 0.0
	if chains != "" {
		text, n = ", but policy of "+chains+" is DROP since "+since+"; "+left, float64(strings.Count(chains, ",")+1)
	}
	type said struct {
		Headline, Ready string
		Metric          float64
	}
	want := said{"healthy" + text, "ok" + text, n}
	got := said{s.Headline, s.ReadyText(), r.metrics("policy_drops")[metric]}
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("(-want +got)\n%s", d)
	}
	if err := s.Ready(); err != nil {
		r.t.Errorf("not ready: %v", err)
	}
}

// TestPolicyDrop: a policy becomes DROP, with a flush or without. The status says so until it
// changes or an operator accepts it, over a restart too. A policy that was DROP at the start is
// not reported.
func TestPolicyDrop(t *testing.T) {
	const both = "ipv4 filter INPUT, ipv4 filter OUTPUT"
	flush := func(r *rig) { must(r.t, r.fake.Flush(rules.IPv4, rules.Filter, "")) }
	drop := func(r *rig) { r.setPolicies("DROP", "INPUT", "OUTPUT") }
	stamp := func() string { return time.Now().UTC().Format(time.RFC3339) }
	for name, story := range map[string]func(t *testing.T, r *rig, restart func() *rig){
		"with a flush, and set back": func(_ *testing.T, r *rig, _ func() *rig) {
			flush(r)
			drop(r)
			r.settled()
			r.wantClosed(both, "flush 1")
			r.wantLog(`"The policy of a chain has become DROP; canaryd leaves it, and the kernel drops packets that no rule accepts" family="ipv4" table="filter"`)
			r.setPolicies("ACCEPT", "OUTPUT")
			r.settled()
			r.wantClosed("ipv4 filter INPUT", "flush 1")
			r.setPolicies("ACCEPT", "INPUT")
			r.settled()
			r.wantClosed("", "")
		},
		"behind the replay, and another flush": func(_ *testing.T, r *rig, _ func() *rig) {
			flush(r)
			r.after(2 * time.Second)
			drop(r)
			r.settled()
			r.wantClosed(both, "flush 1")
			r.after(time.Minute)
			flush(r)
			r.settled()
			r.wantClosed(both, "flush 2")
		},
		"a restart, and accepted": func(t *testing.T, r *rig, restart func() *rig) {
			flush(r)
			drop(r)
			r.settled()
			since := stamp()
			r = restart()
			if got := r.d.Status().PolicyDrops; len(got) != 2 || got[0].Flush != "" || got[0].Was != "ACCEPT" {
				t.Errorf("after a restart: %+v, not before %s", got, since)
			}
			reply, err := r.d.Dismiss(t.Context())
			must(t, err)
			if d := cmp.Diff(strings.Split(both, ", "), reply.Policies); d != "" {
				t.Errorf("accepted (-want +got)\n%s", d)
			}
			r.settled()
			r.wantClosed("", "")
			flush(r)
			r.settled()
			r.wantClosed("", "")
			r = restart()
			r.wantClosed("", "")
		},
		"without a flush": func(_ *testing.T, r *rig, _ func() *rig) {
			since := stamp()
			r.setPolicies("DROP", "OUTPUT")
			r.settled()
			r.wantClosed("ipv4 filter OUTPUT", since)
		},
		"while the table is gone": func(_ *testing.T, r *rig, _ func() *rig) {
			if r.d.Status().Backend.Name == iptables.NFT {
				must(r.t, r.fake.FlushRuleset())
			} else {
				flush(r)
			}
			drop(r)
			r.settled()
			r.wantClosed(both, "flush 1")
		},
	} {
		t.Run(name, func(t *testing.T) {
			oneBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, id := t.TempDir(), identity(backend)
				r := start(t, backend, setup{store: openStore(t, dir, id)})
				r.after(20 * time.Second)
				story(t, r, func() *rig {
					r.after(5 * time.Second)
					r.stop()
					r = startOn(t, r.fake, setup{store: openStore(t, dir, id)})
					r.after(5 * time.Second)
					return r
				})
			})
		})
	}
	t.Run("always", func(t *testing.T) {
		oneBackend(t, func(t *testing.T, backend iptables.Backend) {
			fake := loadedFake(t, backend)
			must(t, fake.SetPolicy(rules.IPv4, rules.Filter, "OUTPUT", "DROP"))
			r := startOn(t, fake, setup{})
			r.wantClosed("", "")
			flush(r)
			r.settled()
			r.wantClosed("", "")
		})
	})
}

// TestNativePolicyDrop: the policy of a base chain in a native table becomes DROP. If the
// process is not the table's owner, the status says so until the policy changes or is accepted,
// over a restart too. The owner's own change is not reported, nor a policy that always was
// DROP.
func TestNativePolicyDrop(t *testing.T) {
	const chain = "ip kube-proxy prerouting"
	drop := func(k *fakeNative) { k.setPolicy(proxyTable, 0) }
	closed := func(r *rig, since string) {
		t.Helper()
		chains := chain
		if since == "" {
			chains = ""
		}
		r.wantClosedIn("policy_drops{family=ip,table=ip kube-proxy}", chains, since, "canaryd leaves it so")
	}
	for name, story := range map[string]func(t *testing.T, r *rig, k *fakeNative, restart func(while func()) *rig){
		"alone, and set back": func(_ *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			since := time.Now().UTC().Format(time.RFC3339)
			drop(k)
			r.after(10 * time.Second)
			closed(r, since)
			r.wantLog(`"The policy of a chain has become DROP; canaryd leaves it, and the kernel drops packets that no rule accepts" family="ipv4" table="kube-proxy"`)
			k.setPolicy(proxyTable, 1)
			r.after(10 * time.Second)
			closed(r, "")
		},
		"with a flush of the table": func(_ *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			k.flushTable(proxyTable)
			drop(k)
			r.after(10 * time.Second)
			closed(r, "flush 1")
			r.wantOneFlush("emptied", reload.Proved)
			k.wantNative(r.t, withPolicy(tableOf(proxyTable, "a", "b"), 0))
		},
		"behind the replay": func(_ *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			k.flushTable(proxyTable)
			r.after(2 * time.Second)
			drop(k)
			r.after(10 * time.Second)
			closed(r, "flush 1")
			k.flushRuleset() // the table returns with its old policy
			r.after(10 * time.Second)
			closed(r, "flush 2")
		},
		"commits were missed": func(_ *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			k.missing(func() { drop(k) })
			since := time.Now().UTC().Format(time.RFC3339)
			r.after(10 * time.Second)
			closed(r, since)
		},
		"by its owner": func(_ *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			k.origin.Ancestors = []string{"kube-proxy"}
			drop(k)
			r.after(10 * time.Second)
			closed(r, "")
		},
		"restarts, and accepted": func(t *testing.T, r *rig, k *fakeNative, restart func(func()) *rig) {
			drop(k)
			r.after(10 * time.Second)
			r = restart(func() {})
			if got := r.d.Status().PolicyDrops; len(got) != 1 || got[0].Was != "ACCEPT" || !got[0].Native {
				t.Errorf("after a restart: %+v", got)
			}
			reply, err := r.d.Dismiss(t.Context())
			must(t, err)
			if d := cmp.Diff([]string{chain}, reply.Policies); d != "" {
				t.Errorf("accepted (-want +got)\n%s", d)
			}
			r.settled()
			closed(r, "")
			r = restart(k.flushRuleset)
			closed(r, "")
			k.wantNative(t, withPolicy(tableOf(proxyTable, "a", "b"), 0))
		},
		"while no canaryd ran": func(_ *testing.T, _ *rig, k *fakeNative, restart func(func()) *rig) {
			r := restart(func() { drop(k) })
			if got := r.d.Status().PolicyDrops; len(got) != 1 || got[0].String() != chain {
				t.Errorf("after a restart: %+v", got)
			}
		},
		"an operator restores a generation with it": func(t *testing.T, r *rig, k *fakeNative, _ func(func()) *rig) {
			open := r.present(proxyTable)
			drop(k)
			r.after(10 * time.Second)
			shut := r.present(proxyTable)
			for _, id := range []string{open, shut} {
				dry, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id, DryRun: true})
				must(t, err)
				reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id, Agreed: dry.Agreement()})
				if must(t, err); !reply.Proved() {
					t.Errorf("the reply is %+v", reply)
				}
				r.after(10 * time.Second)
				closed(r, "")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := nativestore.New(t.TempDir(), nativestore.Identity{BootID: "b", NetNS: "n", Release: "6.18"})
			k := newFakeNative(withPolicy(tableOf(proxyTable, "a", "b"), 1), withPolicy(tableOf(dockerTable, "c"), 0))
			nativeNode(t, setup{guarded: k, nativeStore: store}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(20 * time.Second)
				closed(r, "")
				story(t, r, k, func(while func()) *rig {
					r.after(5 * time.Second)
					r.stop()
					while()
					k.Hear(0)
					r = run(t, r.fake, setup{guarded: k, nativeStore: store})
					r.after(5 * time.Second)
					return r
				})
			})
		})
	}
}
