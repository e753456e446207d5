package daemon

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// claims says whether a manifest owns the chain. It owns kube-proxy's and kubelet's chains,
// except for kubelet's hint.
func claims(chain string) bool {
	return kubeSelector().Protects(chain) && chain != "KUBE-IPTABLES-HINT"
}

var kubeSelector = sync.OnceValue(func() protect.Selector {
	kube, err := protect.NewSelector([]string{"kube"})
	if err != nil {
		panic(err)
	}
	return kube
})

// manifest returns the declaration of a manifest with these kube-proxy cases.
func manifest(t *testing.T, v4, v6 string) rules.Generation {
	t.Helper()
	fake := iptablestest.NewFake(iptables.NFT)
	g := rules.Generation{}
	for f, name := range map[rules.Family]string{rules.IPv4: v4, rules.IPv6: v6} {
		must(t, fake.RestoreNoflush(f, scenario.KubeProxy(name)))
		snapshot, err := fake.Read(t.Context(), f)
		must(t, err)
		for table, seen := range snapshot.Tables {
			s := rules.Protection{Chain: claims}.Extract(seen, canary.IsMark)
			for i := range s.Jumps {
				s.Jumps[i].Anchor = rules.Anchor{Position: rules.Top}
			}
			s.Policies = nil
			if len(s.Chains) > 0 {
				g = g.With(f.Table(table), s)
			}
		}
	}
	return g
}

func medium(t *testing.T) rules.Generation { return manifest(t, "v4-medium", "v6-medium") }
func small(t *testing.T) rules.Generation  { return manifest(t, "v4-small", "v6-small") }

// bareNode returns the scenarios' node without kube-proxy.
func bareNode(t *testing.T, backend iptables.Backend) *iptablestest.Fake {
	t.Helper()
	fake := iptablestest.NewFake(backend)
	for _, f := range rules.Families() {
		parts := scenario.Node(f, scenario.Cases(f)[0])
		parts = slices.Delete(parts, 2, 3)
		parts[1].Text = "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
		must(t, scenario.LoadParts(t.Context(), scenario.FakePrograms{Fake: fake}, f, parts))
	}
	return fake
}

// startDeclared runs a Daemon with a manifest on a node without kube-proxy.
func startDeclared(t *testing.T, backend iptables.Backend, s setup) *rig {
	t.Helper()
	if s.declared == nil {
		s.declared = medium(t)
	}
	r := run(t, bareNode(t, backend), s)
	r.settled()
	return r
}

// wantDeclared fails unless the claimed chains and jumps are as declared, in
// every table.
func (r *rig) wantDeclared(g rules.Generation) {
	r.t.Helper()
	tables := r.tables()
	for _, f := range r.fake.Families() {
		for _, name := range protect.Always() {
			got, want := rules.Protection{Chain: claims}.Extract(tables[f][name], canary.IsMark), g[f.Table(name)]
			text := func(s rules.Section) string {
				slices.SortFunc(s.Chains, func(a, b rules.Chain) int { return strings.Compare(a.Name, b.Name) })
				var b strings.Builder
				for _, c := range s.Chains {
					b.WriteString(":" + c.Name + "\n")
					for _, rule := range c.Rules {
						b.WriteString("  " + rule.Spec + "\n")
					}
				}
				for _, chain := range rules.BuiltinChains(name) {
					for _, h := range s.Jumps {
						if h.Chain == chain {
							b.WriteString(h.String() + "\n")
						}
					}
				}
				return b.String()
			}
			want.Chains, got.Chains = slices.Clone(want.Chains), slices.Clone(got.Chains)
			if diff := cmp.Diff(text(want), text(got)); diff != "" {
				r.t.Errorf("%s %s is not as declared (-want +got):\n%s", f, name, diff)
			}
		}
	}
}

// wantNoFlush fails if anything was taken for a loss.
func (r *rig) wantNoFlush() {
	r.t.Helper()
	if got := r.metrics("flush_events", "flushes", "rules_absent", "loss_since", "contended"); len(got) > 0 || len(r.records(0)) > 0 {
		r.t.Errorf("losses were told: %v, %+v", got, r.records(0))
	}
}

// joined returns the numbers of rules and chains with that declaration, learned ones included.
func (r *rig) joined(g rules.Generation) (n, chains int) {
	r.t.Helper()
	n, chains = g.Counts()
	for _, tables := range r.tables() {
		for _, name := range protect.Always() {
			_, rest := rules.Protection{Chain: r.d.cfg.Protection.Chain}.Extract(tables[name], canary.IsMark).Split(claims)
			n += rest.RuleCount()
			chains += len(rest.Chains)
		}
	}
	return n, chains
}

// TestDeclaredAtStart: canaryd writes a declaration into tables without these rules, even into
// empty ones, and that is no loss. It learns and protects the rules of other owners as ever.
func TestDeclaredAtStart(t *testing.T) {
	for _, empty := range []bool{true, false} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			fake := iptablestest.NewFake(backend)
			if !empty {
				fake = bareNode(t, backend)
			}
			want := medium(t)
			r := run(t, fake, setup{declared: want})
			foreign := without(map[rules.Family]rules.Ruleset{})
			if !empty {
				foreign = without((&rig{t: t, fake: bareNode(t, backend)}).tables())
			}
			r.after(100 * time.Millisecond)
			r.wantDeclared(want)
			r.wantReady()
			r.settled()
			r.wantDeclared(want)
			r.wantReady()
			r.wantNoFlush()
			if rest := r.unclaimedText(); !empty && rest != foreign {
				t.Errorf("what is not declared was touched (-before +now):\n%s", cmp.Diff(foreign, rest))
			}
			if got := r.metrics("replays"); got["replays_total{family=ipv4,result=proved}"] != 1 || got["replays_total{family=ipv6,result=proved}"] != 1 {
				t.Errorf("replays: %v", got)
			}
			n, chains := r.joined(want)
			if g := r.d.Status().Generation; g.Rules != n || g.Chains != chains || g.ID == "" {
				t.Errorf("the status shows %+v, want %d rules in %d chains", g, n, chains)
			}
			if empty {
				return
			}
			// canaryd restores the learned chains at the same time as the declared ones.
			before := r.tables()
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
			r.settled()
			r.wantBack(before, leftBy(t, backend, "flush-nat"))
			if r.chain(rules.IPv4, rules.Nat, "CNI-HOSTPORT-DNAT") == nil {
				t.Error("what CNI wrote is gone")
			}
		})
	}
}

// unclaimedText returns all rules but the claimed ones.
func (r *rig) unclaimedText() string {
	r.t.Helper()
	unclaimed := map[rules.Family]rules.Ruleset{}
	for f, set := range r.tables() {
		unclaimed[f] = rules.Ruleset{}
		for name, table := range set {
			unclaimed[f][name] = rules.NewTable(name)
			for _, c := range table.Chains {
				if claims(c.Name) {
					continue
				}
				if rules.Builtin(name, c.Name) {
					c.Rules = slices.DeleteFunc(slices.Clone(c.Rules), func(r rules.Rule) bool { return claims(r.Target) })
				}
				unclaimed[f][name].Add(c)
			}
		}
	}
	return without(unclaimed)
}

// TestDeclarationChanges: canaryd writes a new declaration, removes the rules that it no longer
// has, and then writes the old one again. Neither change is a loss.
func TestDeclarationChanges(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := startDeclared(t, backend, setup{})
		rest := r.unclaimedText()
		first := r.d.Status().Generation
		for _, g := range []rules.Generation{small(t), {}, medium(t)} {
			r.declare <- Declaration{Generation: g, Claims: claims}
			r.after(50 * time.Millisecond)
			r.wantDeclared(g)
			r.settled()
			r.wantDeclared(g)
			r.wantReady()
			n, chains := r.joined(g)
			if got := r.d.Status().Generation; got.Rules != n || got.Chains != chains {
				t.Errorf("the status shows %+v, want %d rules in %d chains", got, n, chains)
			}
			if now := r.unclaimedText(); now != rest {
				t.Errorf("what is not declared was touched (-before +now):\n%s", cmp.Diff(rest, now))
			}
		}
		r.wantNoFlush()
		if now := r.d.Status().Generation; now.ID != first.ID {
			t.Errorf("the generation is %s, was %s when the same was declared", now.ID, first.ID)
		}
	})
}

// TestFlushWhileDeclaring: rules are flushed while canaryd searches a declaration for the rule that
// the kernel refuses. The flush has a record, and the replay puts everything back before the search
// begins again. A write of the declaration would put the rules back in silence.
func TestFlushWhileDeclaring(t *testing.T) {
	for _, chain := range []string{"", "PREROUTING"} {
		t.Run("nat "+chain, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := startDeclared(t, backend, setup{origin: inSite})
				learned, trials := strings.Count(r.unclaimedText(), "CNI-"), 0
				r.fake.BeforeRestore(func() {
					if trials++; trials == 3 {
						flusher := r.fake.Bypassing()
						must(t, flusher.RestoreNoflush(rules.IPv4, section(rules.Nat, strings.TrimSpace("-F "+chain))))
					}
				})
				r.declare <- Declaration{Generation: withRule(t, small(t), "KUBE-FORWARD", badTarget), Claims: claims, Origin: inSite}
				r.settled()
				r.wantDeclared(small(t).With(rules.IPv4.Table(rules.Filter), medium(t)[rules.IPv4.Table(rules.Filter)]))
				if now := strings.Count(r.unclaimedText(), "CNI-"); now != learned || learned == 0 {
					t.Errorf("CNI plugins' names are in the tables %d times, want %d", now, learned)
				}
				if list := r.d.Status().Flushes; len(list) != 1 || list[0].Outcome != reload.Proved || trials < 3 {
					t.Errorf("%d restores; records: %+v, want the flush, proved", trials, list)
				}
			})
		})
	}
}

// flushedAtBegin flushes nat of IPv4 when a guarded write begins, if it is armed.
type flushedAtBegin struct {
	*iptablestest.Fake
	armed *bool
}

func (k flushedAtBegin) Begin(ctx context.Context) (iptables.Session, error) {
	if *k.armed {
		*k.armed = false
		if err := k.Bypassing().RestoreNoflush(rules.IPv4, section(rules.Nat, "-F")); err != nil {
			return nil, err
		}
	}
	return k.Fake.Begin(ctx)
}

// TestFlushRightBeforeDeclaring: rules are flushed right before the guarded read for a new
// declaration. The flush has a record, the declaration follows the replay, and nothing counts or
// is logged as a failure.
func TestFlushRightBeforeDeclaring(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		armed, fake := false, bareNode(t, backend)
		r := run(t, fake, setup{declared: medium(t), kernel: flushedAtBegin{fake, &armed}})
		r.settled()
		armed = true
		r.declare <- Declaration{Generation: small(t), Claims: claims}
		r.settled()
		r.wantDeclared(small(t))
		r.wantReady()
		if list := r.d.Status().Flushes; armed || len(list) != 1 || list[0].Outcome != reload.Proved {
			t.Errorf("records: %+v, want the flush, proved", list)
		}
		if failed := r.metrics("replays_total")["replays_total{family=ipv4,result=failed}"]; failed != 0 {
			t.Errorf("%v failed replays of IPv4", failed)
		}
		if strings.Contains(r.log.String(), "Not all of the declared generation could be written") {
			t.Errorf("the log has a failure:\n%s", r.log.String())
		}
	})
}

// TestDeclaredScenarios: after each flush canaryd restores declared and learned rules.
func TestDeclaredScenarios(t *testing.T) {
	oneOfEachScenario(t, func(t *testing.T, backend iptables.Backend, s scenario.Scenario) {
		want := medium(t)
		r := startDeclared(t, backend, setup{declared: want})
		foreign := leftBy(t, backend, s.Name)
		if s.Prepare != nil {
			// The scenario's new service would be drift; here a new manifest brings it.
			saved := r.fake.Save(rules.IPv4)
			want = small(t)
			r.declare <- Declaration{Generation: want, Claims: claims}
			r.settled()
			s.Do = func(ctx context.Context, f scenario.Flusher) error { return f.Restore(ctx, rules.IPv4, saved) }
		}
		before := r.tables()
		for range max(s.Times, 1) {
			moved := r.moved(func() {
				must(t, s.Do(t.Context(), r.programs()))
				r.settled()
			}, lossMetrics...)
			wantMoved(t, moved, healed(judged(s), 1))
			r.wantBack(before, foreign)
			r.wantDeclared(want)
		}
		if n := len(r.records(0)); n != max(s.Times, 1) {
			t.Errorf("%d flush records", n)
		}
		for _, record := range r.records(0) {
			wantRecord(t, record, judged(s))
		}
	})
}
