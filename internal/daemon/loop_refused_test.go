package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// withRule returns the generation with one more rule in a chain of IPv4's filter.
func withRule(t *testing.T, g rules.Generation, chain, spec string) rules.Generation {
	t.Helper()
	r, err := rules.ParseRule(spec)
	if err != nil {
		t.Fatal(err)
	}
	s := g[rules.IPv4.Table(rules.Filter)]
	s.Chains = slices.Clone(s.Chains)
	i := slices.IndexFunc(s.Chains, func(c rules.Chain) bool { return c.Name == chain })
	s.Chains[i].Rules = append(slices.Clone(s.Chains[i].Rules), r)
	return g.With(rules.IPv4.Table(rules.Filter), s)
}

// inSite returns one place as the origin of all declared rules.
func inSite(rules.Family, rules.TableName, string, rules.Rule) Origin {
	return Origin{Source: "snapshot", Where: "/etc/site/10.v4:7"}
}

// badTarget is a rule that the kernel refuses.
const badTarget = "-p tcp -m comment --comment hush -j NOSUCH"

// wantRefused fails unless status, JSON, page, metrics and log say that one declared
// rule of IPv4's filter is refused, and nothing else is wrong.
func (r *rig) wantRefused() {
	r.t.Helper()
	s := r.d.Status()
	for f, verdicts := range s.Families {
		for table, v := range verdicts {
			if want := map[bool]canary.Verdict{true: canary.Refused, false: canary.Intact}[f == rules.IPv4 && table == rules.Filter]; v != want {
				r.t.Errorf("%s %s is %s, want %s", f, table, v, want)
			}
		}
	}
	r.wantNotReady("ipv4 filter is not as declared: /etc/site/10.v4:7 is refused: it jumps to a chain or target that does not exist")
	if list := s.DeclaredRefused; len(list) != 1 || list[0].Rule != badTarget || !strings.Contains(list[0].Reason, "NOSUCH") || list[0].Since.IsZero() {
		r.t.Errorf("refused: %+v", list)
	}
	if !s.LossSince.IsZero() || len(s.Flushes) > 0 {
		r.t.Errorf("told as a loss since %s: %+v", s.LossSince, s.Flushes)
	}
	if list := s.Public().DeclaredRefused; len(list) != 1 || list[0].Where == "" || list[0].Meaning == "" || list[0].Rule+list[0].Reason != "" {
		r.t.Errorf("over TCP: %+v", list)
	}
	if page := pageOf(r.t, s.Public()); !strings.Contains(page, "Declared rules refused") || !strings.Contains(page, "/etc/site/10.v4:7") {
		r.t.Errorf("the page says\n%s", page)
	}
	if got := r.metrics("declared_refused", "source_errors"); got["declared_refused{family=ipv4,table=filter}"] != 1 || got["source_errors_total{source=snapshot}"] != 1 || len(got) != 2 {
		r.t.Errorf("metrics: %v", got)
	}
	if log := r.log.String(); strings.Count(log, "A declared rule is refused") != 1 || !strings.Contains(log, `where="/etc/site/10.v4:7"`) {
		r.t.Errorf("the log:\n%s", log)
	}
}

// TestRefusedAtStart: the kernel refuses one declared rule. Only its table keeps its former
// content, also after a flush, and canaryd names the rule until it is corrected.
func TestRefusedAtStart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		good := medium(t)
		r := run(t, bareNode(t, backend), setup{declared: withRule(t, good, "KUBE-FORWARD", badTarget), origin: inSite})
		r.after(time.Minute)
		r.wantRefused()
		none := good.With(rules.IPv4.Table(rules.Filter), rules.Section{})
		r.wantDeclared(none)

		reply, err := r.d.Restore(t.Context(), api.RestoreRequest{})
		if err != nil || reply.Proved() || reply.Outcomes[rules.IPv4] != reload.Partial || !strings.Contains(reply.Detail, "/etc/site/10.v4:7") {
			t.Errorf("restore: %+v, %v", reply, err)
		}
		restores := r.fake.Restores()
		r.after(10 * time.Minute)
		if n := r.fake.Restores() - restores; n > 4*21 {
			t.Errorf("%d restores in 10 minutes, want four each 30 s", n)
		}
		r.wantRefused()

		r.declare <- Declaration{Generation: good, Claims: claims, Origin: inSite}
		r.settled()
		r.wantDeclared(good)
		r.wantReady()
		if got := r.metrics("declared_refused"); len(got) > 0 || len(r.d.Status().DeclaredRefused) > 0 {
			t.Errorf("still refused: %v", got)
		}
		r.wantLog("No declared rule is refused any more")
		r.wantNoFlush()
	})
}

// TestRefusedLater: a refused table keeps the last declaration that the kernel took, over
// flushes and a restart. The other tables follow the new declaration.
func TestRefusedLater(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, first, second := t.TempDir(), medium(t), small(t)
		r := startDeclared(t, backend, setup{declared: first, origin: inSite, store: openStore(t, dir, identity(backend))})
		bad := withRule(t, second, "KUBE-FORWARD", badTarget)
		r.declare <- Declaration{Generation: bad, Claims: claims, Origin: inSite}
		r.settled()
		mixed := second.With(rules.IPv4.Table(rules.Filter), first[rules.IPv4.Table(rules.Filter)])
		r.wantDeclared(mixed)
		r.wantRefused()
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Filter, ""))
		r.settled()
		r.wantDeclared(mixed)
		r.wantNotReady("is refused")
		r.stop()

		again := run(t, r.fake, setup{declared: bad, origin: inSite, store: openStore(t, dir, identity(backend))})
		again.settled()
		again.wantDeclared(mixed)
		again.wantRefused()
	})
}

// TestRefusedWhatStands: nothing is on disk. A refused table keeps the rules of an earlier run,
// also after a flush.
func TestRefusedWhatStands(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		first, second := medium(t), small(t)
		r := startDeclared(t, backend, setup{declared: first})
		r.stop()
		again := run(t, r.fake, setup{declared: withRule(t, second, "KUBE-FORWARD", badTarget), origin: inSite})
		again.settled()
		mixed := second.With(rules.IPv4.Table(rules.Filter), first[rules.IPv4.Table(rules.Filter)])
		again.wantDeclared(mixed)
		again.wantRefused()
		must(t, again.programs().Flush(t.Context(), rules.IPv4, rules.Filter, ""))
		again.settled()
		again.wantDeclared(mixed)
	})
}

// TestBrokenFiles: the declared rules cannot be read. The node is not healthy from the start
// on, though canaryd keeps the known rules in force.
func TestBrokenFiles(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		broken := []api.SourceError{{Source: "rules-dir", Where: "/etc/site/10.v4:5", Reason: `/etc/site/10.v4:5: "hush" is no rule`, InForce: api.StoredGood}}
		r := run(t, bareNode(t, backend), setup{declared: medium(t), broken: broken})
		r.settled()
		r.wantDeclared(medium(t))
		r.wantNotReady("rules-dir cannot be used because of /etc/site/10.v4:5: the rules that an earlier run read from it are in force")
		s := r.d.Status().Public()
		if len(s.SourceErrors) != 1 || s.SourceErrors[0].Reason != "" || len(r.d.Status().SourceErrors[0].Reason) == 0 {
			t.Errorf("over TCP: %+v", s.SourceErrors)
		}
		if page := pageOf(t, s); strings.Contains(page, `class="verdict whole"`) || !strings.Contains(page, "/etc/site/10.v4:5") {
			t.Errorf("the page says\n%s", page)
		}
		r.flushNat()
		r.settled()
		r.wantDeclared(medium(t))

		document := api.SourceError{Source: "manifest", Where: "/etc/all.yaml:9", InForce: api.AllButThis}
		r.broken <- []api.SourceError{document}
		r.settled()
		r.wantReady()
		if page := pageOf(t, r.d.Status()); !strings.Contains(page, "Manifest: a document in /etc/all.yaml:9 declares nothing") {
			t.Errorf("the page does not warn:\n%s", page)
		}
		r.broken <- nil
		r.settled()
		r.wantReady()
		if list := r.d.Status().SourceErrors; len(list) > 0 {
			t.Errorf("still %+v", list)
		}
	})
}
