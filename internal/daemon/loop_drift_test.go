package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// drifts returns changes by strangers to nat's claimed chains, as lines of iptables-restore
// --noflush.
func drifts(t *testing.T) []drift {
	t.Helper()
	nat := medium(t)[rules.IPv4.Table(rules.Nat)]
	services, _ := nat.Chain("KUBE-SERVICES")
	first, second := services.Rules[0].Spec, services.Rules[1].Spec
	svc := services.Rules[0].Target
	chain, _ := nat.Chain(svc)
	var sep string
	for _, r := range chain.Rules {
		if strings.HasPrefix(r.Target, "KUBE-SEP-") {
			sep = r.Target
		}
	}
	return []drift{
		{"a rule deleted", []string{"-D KUBE-SERVICES " + first}},
		{"a rule replaced", []string{"-D KUBE-SERVICES " + first, "-I KUBE-SERVICES -d 192.0.2.1/32 -j " + svc}},
		{"another order", []string{"-D KUBE-SERVICES " + first, "-I KUBE-SERVICES 2 " + first}},
		{"two deleted", []string{"-D KUBE-SERVICES " + first, "-D KUBE-SERVICES " + second}},
		{"a rule doubled", []string{"-A KUBE-SERVICES " + first}},
		{"another owner's rule first", []string{"-I KUBE-SERVICES -s 192.0.2.9/32 -j RETURN"}},
		{"another owner's rule last", []string{"-A KUBE-MARK-MASQ -j RETURN"}},
		{"another owner's jump to a chain of its own", []string{":corp - [0:0]", "-A corp -j RETURN", "-I KUBE-POSTROUTING -j corp"}},
		{"a service's chain emptied", []string{"-F " + svc}},
		{"an endpoint's chain emptied", []string{"-F " + sep}},
		{"the services emptied", []string{"-F KUBE-SERVICES"}},
		{"an endpoint's chain deleted", []string{"-F " + svc, "-F " + sep, "-X " + sep}},
		{"a chain without a declaration", []string{":KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]", "-A KUBE-SVC-AAAAAAAAAAAAAAAA -j RETURN"}},
		{"chains without a declaration that jump to each other, and a jump to them", []string{
			":KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]", ":KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]",
			"-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-AAAAAAAAAAAAAAAA", "-A KUBE-SEP-AAAAAAAAAAAAAAAA -j " + svc,
			"-I KUBE-SERVICES -j KUBE-SVC-AAAAAAAAAAAAAAAA", "-A OUTPUT -j KUBE-SVC-AAAAAAAAAAAAAAAA",
		}},
		{"a service of kube-proxy's", strings.Split(strings.TrimSuffix(strings.TrimPrefix(scenario.NewService, "*nat\n"), "\nCOMMIT\n"), "\n")},
		{"a jump deleted", []string{"-D PREROUTING " + portals}},
		{"all jumps deleted", []string{"-D PREROUTING " + portals, "-D OUTPUT " + portals}},
		{"a jump reworded", []string{"-I PREROUTING -p tcp -j KUBE-SERVICES", "-D PREROUTING " + portals}},
		{"a jump more", []string{"-A INPUT -j KUBE-MARK-MASQ"}},
		{"a jump doubled at the top", []string{"-I PREROUTING " + portals}},
		{"a jump doubled at the bottom", []string{"-A PREROUTING " + portals}},
		{"a jump three times and a rule less", []string{"-A OUTPUT " + portals, "-I OUTPUT " + portals, "-D KUBE-SERVICES " + first}},
	}
}

type drift struct {
	name  string
	lines []string
}

// TestDriftIsRepaired: canaryd repairs any difference in claimed chains at once, without a
// grace, and reports it once.
func TestDriftIsRepaired(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, drift := range drifts(t) {
			t.Run(string(backend)+"/"+drift.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					want := medium(t)
					r := startDeclared(t, backend, setup{declared: want})
					before, marks := r.fake.Save(rules.IPv4), r.canaries()
					moved := r.moved(func() {
						r.write(rules.Nat, drift.lines...)
						r.after(120 * time.Millisecond)
						r.wantDeclared(want)
						r.wantReady()
						r.settled()
					}, lossMetrics...)
					wantMoved(t, moved, healed(scenario.Lost{rules.IPv4.Table(rules.Nat): string(canary.Drifted)}, 1))
					after := strings.NewReplacer(":corp - [0:0]\n", "", "-A corp -j RETURN\n", "").Replace(r.fake.Save(rules.IPv4))
					if diff := cmp.Diff(before, after); diff != "" {
						t.Errorf("something is not as before (-before +now):\n%s", diff)
					}
					if now := r.canaries(); now != marks {
						t.Errorf("the marks were renewed: %s, were %s", now, marks)
					}
					record := r.oneRecord()
					if record.Kind != canary.Drifted || record.Outcome != reload.Proved || record.AbsentSeconds > 0.1 {
						t.Errorf("the record says %+v", record)
					}
					r.wantLog("Claimed chains are not as declared")
				})
			})
		}
	}
}

// canaries returns the lines of all canaries.
func (r *rig) canaries() string {
	var found []string
	for _, f := range r.fake.Families() {
		for line := range strings.Lines(r.fake.Save(f)) {
			if strings.Contains(line, "canaryd-canary:") {
				found = append(found, line)
			}
		}
	}
	return strings.Join(found, "")
}

// TestUnclaimedIsJudgedAsEver: next to a manifest, other owners may still change their own
// rules.
func TestUnclaimedIsJudgedAsEver(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := startDeclared(t, backend, setup{})
		before := r.d.Status().Generation
		r.write(rules.Nat, "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 20000 -j CNI-HOSTPORT-SETMARK", "-D OUTPUT "+hostport, "-I OUTPUT "+hostport)
		r.write(rules.Mangle, ":KUBE-OTHER - [0:0]", "-A KUBE-OTHER -j RETURN", "-A KUBE-IPTABLES-HINT -j RETURN")
		r.settled()
		r.wantNoFlush()
		r.wantReady()
		if now := r.d.Status().Generation; now.Rules != before.Rules+2 {
			t.Errorf("the generation is %+v, was %+v", now, before)
		}
		// Another owner's jump that is deleted by name has a grace.
		r.after(20 * time.Second)
		deleted := time.Now()
		r.write(rules.Nat, "-D OUTPUT "+hostport)
		r.after(10 * time.Second)
		r.wantLeft(canary.JumpsMissing, deleted)
		r.after(10 * time.Second)
		if record := r.oneRecord(); record.Kind != canary.JumpsMissing || record.Lost.Jumps != 1 {
			t.Errorf("the record says %+v", record)
		}
		r.wantReady()
	})
}

// TestDriftAndFlushAtOnce: canaryd repairs both, and the record has the graver kind.
func TestDriftAndFlushAtOnce(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		want := medium(t)
		r := startDeclared(t, backend, setup{declared: want})
		before := r.tables()
		moved := r.moved(func() {
			r.write(rules.Filter, "-F KUBE-FORWARD")
			r.flushNat()
			r.settled()
		}, lossMetrics...)
		wantMoved(t, moved, healed(scenario.Lost{rules.IPv4.Table(rules.Nat): scenario.Emptied, rules.IPv4.Table(rules.Filter): string(canary.Drifted)}, 1))
		r.wantBack(before, leftBy(t, backend, "flush-nat"))
		r.wantDeclared(want)
		if record := r.oneRecord(); record.Kind != canary.Emptied {
			t.Errorf("the record says %s", record.Kind)
		}
	})
}

// TestDriftWithoutHints: the poll finds a drift. On legacy the walk each 30 s also finds a
// drift that the fingerprint does not show.
func TestDriftWithoutHints(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		want := medium(t)
		r := startDeclared(t, backend, setup{declared: want, deaf: true})
		r.write(rules.Nat, "-D OUTPUT "+portals)
		r.after(1200 * time.Millisecond)
		r.wantDeclared(want)
		r.write(rules.Nat, "-D OUTPUT "+portals, "-A OUTPUT -p tcp "+portals)
		r.after(31 * time.Second)
		r.wantDeclared(want)
		r.wantReady()
		if n := len(r.records(0)); n != 2 {
			t.Errorf("%d records, want 2", n)
		}
	})
}

// TestContended: another process undoes repairs four times within a minute. It counts as the
// owner of the claimed chains, and canaryd only observes from then on.
func TestContended(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := startDeclared(t, backend, setup{})
		strange := func(n int) {
			r.write(rules.Nat, fmt.Sprintf("-I KUBE-SERVICES -s 192.0.2.%d/32 -j RETURN", n))
			r.settled()
		}
		for n := range 3 {
			strange(n)
			r.wantReady()
		}
		if got := r.metrics("contended"); len(got) != 0 {
			t.Errorf("given up after three drifts: %v", got)
		}
		strange(3)
		if got := r.metrics("contended"); got["contended"] != 1 {
			t.Errorf("not given up after four drifts: %v", got)
		}
		if s := r.d.Status(); s.Mode != api.Observe || len(s.Flushes) != 4 || s.Flushes[0].Outcome != api.WaitingObserve {
			t.Errorf("mode %s, flushes %+v", s.Mode, s.Flushes)
		}
		r.wantLog("only observes from now on")
		r.wantNotReady("ipv4 nat is drifted")
		restores := r.fake.Restores()
		// canaryd writes no new declaration either, though more tables differ from it now. It
		// makes only one record of that.
		r.declare <- Declaration{Generation: small(t), Claims: claims}
		for n := range 10 {
			strange(10 + n)
		}
		r.after(time.Minute)
		if n := r.fake.Restores() - restores; n != 0 {
			t.Errorf("%d restores after it was given up", n)
		}
		if n := len(r.records(0)); n != 5 {
			t.Errorf("%d records, want 5", n)
		}
		// A flush still gets a record.
		r.flushNat()
		r.settled()
		if s := r.d.Status(); len(s.Flushes) != 6 || s.Flushes[0].Kind != canary.Emptied {
			t.Errorf("after a flush: %d records, last %+v", len(s.Flushes), s.Flushes[0])
		}
		if len(r.chain(rules.IPv4, rules.Nat, "KUBE-SERVICES")) != 0 {
			t.Error("it was replayed although canaryd only observes")
		}
	})
}

// TestRareDriftIsNoContention: eight drifts, but never more than three within a minute.
func TestRareDriftIsNoContention(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		want := medium(t)
		r := startDeclared(t, backend, setup{declared: want})
		for n := range 8 {
			r.write(rules.Nat, "-I KUBE-SERVICES -j RETURN")
			r.settled()
			r.wantDeclared(want)
			r.after(19 * time.Second)
			if got := r.metrics("contended"); len(got) != 0 {
				t.Fatalf("given up after drift %d", n+1)
			}
		}
		r.wantReady()
	})
}

// TestFlushesAreNoContention: ten flushes in a row are not drift.
func TestFlushesAreNoContention(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		want := medium(t)
		r := startDeclared(t, backend, setup{declared: want})
		for range 10 {
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, "PREROUTING"))
			r.settled()
		}
		r.wantDeclared(want)
		r.wantReady()
		if got := r.metrics("contended"); len(got) != 0 {
			t.Error("given up because of flushes")
		}
	})
}

// TestKubeProxyAppears: kube-proxy's canary shows that it owns the chains, so canaryd only
// observes.
func TestKubeProxyAppears(t *testing.T) {
	for _, declaring := range []bool{false, true} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			r := startDeclared(t, backend, setup{})
			restores := r.fake.Restores()
			for _, f := range rules.Families() {
				for _, table := range protect.Always() {
					must(t, r.fake.RestoreNoflush(f, section(table, ":KUBE-PROXY-CANARY - [0:0]")))
				}
			}
			if declaring {
				r.declare <- Declaration{Generation: small(t), Claims: claims}
			}
			r.settled()
			must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
			r.settled()
			if n := r.fake.Restores() - restores; n != 0 {
				t.Errorf("%d restores beside kube-proxy", n)
			}
			if s := r.d.Status(); s.Mode != api.Observe || r.metrics("contended")["contended"] != 1 {
				t.Errorf("mode %s, %v", s.Mode, r.metrics("contended"))
			}
			if r.chain(rules.IPv4, rules.Mangle, "KUBE-PROXY-CANARY") == nil || r.chain(rules.IPv4, rules.Nat, latecome) == nil {
				t.Error("what kube-proxy wrote is gone")
			}
			r.wantLog("kube-proxy writes the chains")
		})
	}
}

// TestKubeProxyIsThereAtStart: canaryd overwrites no rule of a running kube-proxy.
func TestKubeProxyIsThereAtStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		before := without((&rig{t: t, fake: fake}).tables())
		r := run(t, fake, setup{declared: small(t)})
		r.after(time.Minute)
		if diff := cmp.Diff(before, without(r.tables())); diff != "" {
			t.Errorf("written beside kube-proxy (-before +now):\n%s", diff)
		}
		if s := r.d.Status(); s.Mode != api.Observe || r.metrics("contended")["contended"] != 1 {
			t.Errorf("mode %s, %v", s.Mode, r.metrics("contended"))
		}
	})
}

// TestObserveDeclared: with --mode=observe canaryd writes nothing but marks, and reports the
// difference once.
func TestObserveDeclared(t *testing.T) {
	for _, there := range []bool{false, true} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			want := medium(t)
			fake := bareNode(t, backend)
			if there {
				for f, name := range map[rules.Family]string{rules.IPv4: "v4-medium", rules.IPv6: "v6-medium"} {
					must(t, fake.RestoreNoflush(f, scenario.KubeProxy(name)))
				}
			}
			before := without((&rig{t: t, fake: fake}).tables())
			r := run(t, fake, setup{declared: want, mode: api.Observe})
			r.settled()
			if there {
				r.wantReady()
				r.wantNoFlush()
			} else {
				r.wantNotReady("ipv4 nat is drifted")
			}
			r.declare <- Declaration{Generation: small(t), Claims: claims}
			r.settled()
			r.write(rules.Nat, "-A CNI-HOSTPORT-SETMARK -j RETURN", "-D CNI-HOSTPORT-SETMARK -j RETURN")
			for range 5 {
				r.write(rules.Filter, "-A INPUT -j ACCEPT", "-D INPUT -j ACCEPT")
				r.settled()
			}
			r.wantNotReady("ipv4 nat is drifted")
			if diff := cmp.Diff(before, without(r.tables())); diff != "" {
				t.Errorf("observe mode wrote (-before +now):\n%s", diff)
			}
			if n := len(r.records(0)); n != 1 {
				t.Errorf("%d records, want 1", n)
			}
			if got := r.metrics("contended", "replays"); len(got) != 0 {
				t.Errorf("metrics: %v", got)
			}
		})
	}
}

// TestApplyFails: the rules in force stay, and the tries become rarer.
func TestApplyFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		first, second := medium(t), small(t)
		r := startDeclared(t, backend, setup{declared: first})
		r.fake.FailRestores(-1, iptables.ReasonOther)
		restores := r.fake.Restores()
		r.declare <- Declaration{Generation: second, Claims: claims}
		r.after(5 * time.Minute)
		r.wantDeclared(first)
		// A try has two restores: of both tables, and of the second alone. Its trials also have
		// two, and end at once, because even an empty chain is refused.
		if n := r.fake.Restores() - restores; n < 2*4*10 || n > 2*4*20 {
			t.Errorf("%d restores in 5 minutes, want about four times 17 per family", n)
		}
		r.wantNotReady("is refused")
		if n := len(r.records(0)); n != 0 {
			t.Errorf("%d flush records", n)
		}
		if got := r.metrics("restore_failures"); got["restore_failures_total{family=ipv4,reason=other}"] < 10 {
			t.Errorf("metrics: %v", got)
		}
		// Commits of other processes do not change that.
		r.write(rules.Nat, "-A CNI-HOSTPORT-SETMARK -j RETURN")
		r.after(time.Second)
		r.wantNotReady("is refused")
		r.fake.FailRestores(0, iptables.ReasonOther)
		r.after(31 * time.Second)
		r.wantDeclared(second)
		r.wantReady()
		r.wantNoLossTold()
		r.wantLog("the rules in force stay")
	})
}

func (r *rig) wantNoLossTold() {
	r.t.Helper()
	if got := r.metrics("flush_events", "flushes"); len(got) > 0 || len(r.records(0)) > 0 {
		r.t.Errorf("losses were recorded: %v, %+v", got, r.records(0))
	}
}

// TestApplyWhileLocked: canaryd applies the declaration soon after the lock is free.
func TestApplyWhileLocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startDeclared(t, iptables.Legacy, setup{})
		release := r.fake.HoldLock()
		second := small(t)
		r.declare <- Declaration{Generation: second, Claims: claims}
		r.after(40 * time.Second)
		release()
		r.after(300 * time.Millisecond)
		r.wantDeclared(second)
		r.wantReady()
		if r.metrics("restore_failures")["restore_failures_total{family=ipv4,reason=lock}"] == 0 {
			t.Error("the held lock is not counted")
		}
	})
}

// TestFlushWhileApplyFails: the kernel refuses a declaration. A flush takes the one in force,
// and canaryd restores that.
func TestFlushWhileApplyFails(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		first := medium(t)
		r := startDeclared(t, backend, setup{declared: first})
		second := small(t)
		nat := second[rules.IPv4.Table(rules.Nat)]
		bad := rules.Rule{Spec: "-j KUBE-SVC-NOWHERENOWHERE22", Target: "KUBE-SVC-NOWHERENOWHERE22"}
		nat.Chains = append(slices.Clip(nat.Chains), rules.Chain{Name: "KUBE-SVC-BADBADBADBADBADB", Rules: []rules.Rule{bad}})
		r.declare <- Declaration{Generation: second.With(rules.IPv4.Table(rules.Nat), nat), Claims: claims}
		r.after(time.Second)
		mixed := second.With(rules.IPv4.Table(rules.Nat), first[rules.IPv4.Table(rules.Nat)])
		r.wantDeclared(mixed)
		r.wantNotReady("ipv4 nat is not as declared")
		before := r.tables()
		for range 6 {
			r.flushNat()
			r.settled()
			r.wantTables(before, leftBy(t, backend, "flush-nat"))
		}
		r.write(rules.Filter, "-F KUBE-FORWARD")
		r.after(time.Minute)
		r.wantDeclared(mixed)
		r.wantNotReady("ipv4 nat is not as declared")
		wantMoved(t, r.metrics("flush_events", "flushes", "contended"), series{
			"flush_events_total": 7, "flushes_total{family=ipv4,kind=emptied,table=nat}": 6, "flushes_total{family=ipv4,kind=drifted,table=filter}": 1,
		})
		r.declare <- Declaration{Generation: second, Claims: claims}
		r.settled()
		r.wantDeclared(second)
		r.wantReady()
	})
}

// TestRestartDeclared: a start does not learn declared rules from the stored generation, and an
// unchanged manifest causes no write.
func TestRestartDeclared(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := startDeclared(t, backend, setup{store: openStore(t, dir, id)})
		generation := first.d.Status().Generation
		first.stop()
		time.Sleep(time.Minute)

		restores := first.fake.Restores()
		again := run(t, first.fake, setup{declared: medium(t), store: openStore(t, dir, id)})
		again.settled()
		again.wantReady()
		again.wantNoFlush()
		if n := first.fake.Restores() - restores; n != 0 {
			t.Errorf("%d restores at the start of a run that found all as declared", n)
		}
		if now := again.d.Status().Generation; now.ID != generation.ID || now.Rules != generation.Rules {
			t.Errorf("the generation is %+v, was %+v", now, generation)
		}
		again.stop()

		// While no canaryd runs, the manifest shrinks, and nat is flushed.
		r := &rig{t: t, fake: first.fake}
		rest := r.unclaimedText()
		r.flushNat()
		want := small(t)
		r = run(t, first.fake, setup{declared: want, store: openStore(t, dir, id)})
		r.settled()
		r.wantReady()
		r.wantDeclared(want)
		if record := r.oneRecord(); record.Kind != canary.Emptied {
			t.Errorf("the record says %+v", record)
		}
		for _, line := range strings.Split(rest, "\n") {
			if strings.Contains(line, "CNI") && !strings.Contains(r.unclaimedText(), line) {
				t.Errorf("%q did not come back", line)
			}
		}
		n, chains := r.joined(want)
		if g := r.d.Status().Generation; g.Rules != n || g.Chains != chains {
			t.Errorf("the generation is %+v, want %d rules in %d chains", g, n, chains)
		}
		r.stop()

		// Without the manifest no chain is claimed, and canaryd learns all of them.
		r = run(t, first.fake, setup{store: openStore(t, dir, id)})
		r.settled()
		r.wantReady()
		r.wantDeclared(want)
		r.wantNoFlush()
	})
}

// TestRestartAfterDrift: canaryd repairs a drift that happened while it was away, however old
// its stored rules are.
func TestRestartAfterDrift(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		first := startDeclared(t, backend, setup{store: openStore(t, dir, id)})
		first.stop()
		first.write(rules.Nat, "-I KUBE-SERVICES -j RETURN")
		time.Sleep(time.Hour)
		want := medium(t)
		r := run(t, first.fake, setup{declared: want, store: openStore(t, dir, id)})
		r.settled()
		r.wantReady()
		r.wantDeclared(want)
	})
}

// TestRestoreDeclared: a request writes the declaration, and no older generation.
func TestRestoreDeclared(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := startDeclared(t, backend, setup{store: openStore(t, dir, identity(backend))})
		r.after(2 * time.Second) // until it is on disk
		old := r.d.Status().Generation.ID
		want := small(t)
		r.declare <- Declaration{Generation: want, Claims: claims}
		r.settled()
		text := r.fake.Save(rules.IPv4)
		for _, id := range []string{old, "000000000000"} {
			if _, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id}); !errors.Is(err, errDeclared) {
				t.Errorf("restoring %s: %v", id, err)
			}
		}
		if now := r.fake.Save(rules.IPv4); now != text {
			t.Error("a refused request wrote something")
		}
		for _, id := range []string{"", r.d.Status().Generation.ID} {
			reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: id})
			if err != nil || reply.Generation != r.d.Status().Generation.ID {
				t.Errorf("restoring %q: %+v, %v", id, reply, err)
			}
			r.settled()
			r.wantDeclared(want)
			r.wantReady()
		}
		r.wantNoFlush()
	})
}

// TestNoFeedbackDeclared: while nothing changes, canaryd reads and writes nothing.
func TestNoFeedbackDeclared(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := startDeclared(t, backend, setup{})
		r.write(rules.Nat, "-I KUBE-SERVICES -j RETURN")
		r.after(5 * time.Second)
		r.wantReady()
		reads, restores, begins := r.fake.Reads(), r.fake.Restores(), r.fake.Begins()
		r.after(10 * time.Minute)
		if r.fake.Reads() != reads || r.fake.Restores() != restores || r.fake.Begins() != begins {
			t.Errorf("%d reads, %d restores, %d sessions in 10 minutes of quiet",
				r.fake.Reads()-reads, r.fake.Restores()-restores, r.fake.Begins()-begins)
		}
	})
}
