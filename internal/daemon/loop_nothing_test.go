package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
)

// wantNothing fails unless the daemon reports that nothing is protected, that it is ready anyway,
// and the texts about the other rules.
func (r *rig) wantNothing(texts ...string) {
	r.t.Helper()
	s := r.d.Status()
	if err := s.Ready(); err != nil || s.Healthy || s.NothingProtected == nil {
		r.t.Fatalf("ready: %v, healthy: %t, nothing protected: %+v", err, s.Healthy, s.NothingProtected)
	}
	page := pageOf(r.t, s.Public())
	for what, text := range map[string]string{"/readyz": s.ReadyText(), "the page": page, "the manager": strings.ToLower(s.Line())} {
		for _, want := range append(texts, "othing is protected") {
			if !strings.Contains(strings.ToLower(text), strings.ToLower(want)) {
				r.t.Errorf("%s does not say %q: %s", what, want, text)
			}
		}
	}
	if !strings.Contains(page, "Nothing protected") || strings.Contains(page, `class="verdict whole"`) || !strings.HasPrefix(s.ReadyText(), "ok") {
		r.t.Errorf("the page says %s\n/readyz %q", page, s.ReadyText())
	}
	if got := r.metrics("nothing_protected"); got["nothing_protected"] != 1 {
		r.t.Errorf("metrics: %v", got)
	}
}

// wantSomething fails unless the daemon is healthy.
func (r *rig) wantSomething() {
	r.t.Helper()
	r.wantReady()
	if got := r.metrics("nothing_protected"); len(got) > 0 || r.d.Status().NothingProtected != nil {
		r.t.Errorf("nothing is protected: %v", got)
	}
}

// TestNothingProtected: a node without rules to guard is ready, as a new node is, but not
// healthy until an owner writes rules.
func TestNothingProtected(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		var native atomic.Pointer[[]string]
		native.Store(&[]string{})
		r := run(t, iptablestest.NewFake(backend), setup{protect: []string{"kube"}, native: func(context.Context) ([]string, error) { return *native.Load(), nil }})
		r.settled()
		r.wantNothing("no others were found")
		native.Store(&[]string{"ip kube-proxy", "ip6 kube-proxy"})
		r.after(inventoryEvery)
		r.wantNothing("native nftables tables, which canaryd does not guard (ip kube-proxy, ip6 kube-proxy)")
		reads := r.fake.Reads()
		r.after(10 * time.Minute)
		if n := r.fake.Reads() - reads; n != 0 {
			t.Errorf("%d reads in 10 minutes of nothing", n)
		}

		r.write(rules.Nat, ":CILIUM_PRE_nat - [0:0]", "-A PREROUTING -j CILIUM_PRE_nat", "-A CILIUM_PRE_nat -j RETURN")
		r.after(inventoryEvery)
		r.wantNothing("ip kube-proxy", "2 iptables rules that --protect does not name (such as those of CILIUM_PRE_nat)")
		if found := r.statusJSON()["nothingProtected"].(map[string]any); found["rules"] != 2.0 {
			t.Errorf("JSON: %v", found)
		}

		r.write(rules.Nat, ":KUBE-SERVICES - [0:0]", "-A KUBE-SERVICES -j RETURN", "-A PREROUTING -j KUBE-SERVICES")
		r.settled()
		r.wantSomething()
		r.wantNoFlush()
	})
}

// TestKubeletAloneIsNothing: next to a kube-proxy in nftables mode, kubelet writes a few rules.
// canaryd guards them, and names them as kubelet's own.
func TestKubeletAloneIsNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		for _, protect := range [][]string{{"kube", "cni"}, {"KUBE-FIREWALL"}} {
			fake := iptablestest.NewFake(backend)
			must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, ":KUBE-IPTABLES-HINT - [0:0]", ":KUBE-KUBELET-CANARY - [0:0]")+
				section(rules.Filter, ":KUBE-FIREWALL - [0:0]", "-A INPUT -j KUBE-FIREWALL", "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP")))
			r := run(t, fake, setup{protect: protect, native: func(context.Context) ([]string, error) { return nil, errors.New("refused") }})
			r.settled()
			if protect[0] == "KUBE-FIREWALL" {
				r.wantSomething() // --protect names no more
			} else {
				r.wantNothing("but kubelet's own rules; other rules could not be listed")
				must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Filter, ""))
				r.settled()
				r.wantNothing("but kubelet's own rules")
			}
			if got := r.chain(rules.IPv4, rules.Filter, "KUBE-FIREWALL"); !slices.Equal(got, []string{"-m mark --mark 0x8000/0x8000 -j DROP"}) {
				t.Errorf("KUBE-FIREWALL holds %q", got)
			}
			r.stop()
		}
	})
}

// TestAPolicyIsSomething: a native table with a base chain has a policy for packets, even
// without a rule. Without base chain and rules it decides about no packet.
func TestAPolicyIsSomething(t *testing.T) {
	for _, test := range []struct {
		name   string
		chains []native.Chain
		want   func(*rig)
	}{
		{"a base chain", []native.Chain{{Name: "input", Base: true}}, (*rig).wantSomething},
		{"a chain at no hook", []native.Chain{{Name: "services"}}, func(r *rig) { r.wantNothing() }},
		{"no chain", nil, func(r *rig) { r.wantNothing() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fake := iptablestest.NewFake(iptables.NFT)
				r := run(t, fake, setup{protect: []string{"kube"}, guarded: newFakeNative(&native.Table{ID: proxyTable, Chains: test.chains})})
				r.settled()
				r.after(time.Minute)
				test.want(r)
			})
		})
	}
}

// TestUnknownIsNotNothing: reads fail, so canaryd does not know that the node has nothing to
// guard.
func TestUnknownIsNotNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := iptablestest.NewFake(backend)
		fake.FailReads(errors.New("no"))
		r := run(t, fake, setup{protect: []string{"kube"}})
		r.after(time.Minute)
		r.wantNotReady("unknown")
		if s := r.d.Status(); s.NothingProtected != nil {
			t.Errorf("nothing is protected: %+v", s.NothingProtected)
		}
		fake.FailReads(nil)
		r.after(time.Minute)
		r.wantNothing("could not be listed")
	})
}
