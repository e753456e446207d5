package daemon

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// wordsOf returns the found owners, each after its word of --protect.
func wordsOf(s api.Status) string {
	var words []string
	for _, o := range s.Owners {
		words = append(words, o.Word+"/"+o.Owner)
	}
	return strings.Join(words, " ")
}

// owner has a program write its rules in both families.
func (r *rig) owner(name string) {
	r.t.Helper()
	for _, f := range rules.Families() {
		if text := scenario.Owner(f, name).Text; text != "" {
			must(r.t, r.fake.RestoreNoflush(f, text))
		}
	}
}

// flushEverything runs iptables -F on every table of both families.
func (r *rig) flushEverything() {
	r.t.Helper()
	must(r.t, scenario.All()[0].Do(r.t.Context(), r.programs()))
}

var auto = setup{protect: []string{protect.Auto}}

// TestAutoTakesInAnOwnerThatAppears: Docker and flannel start later on a node of Kubernetes.
// The log names each once, and their rules survive a flush.
func TestAutoTakesInAnOwnerThatAppears(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, auto)
		if d := cmp.Diff("kube/kube-proxy kube/kubelet cni/portmap cni/ipmasq cni/firewall", wordsOf(r.d.Status())); d != "" {
			t.Errorf("owners at the start (-want +got):\n%s", d)
		}
		r.wantLog("Guarding the rules of these owners")
		r.owner("docker")
		r.settled()
		r.owner("flannel")
		r.settled()
		if d := cmp.Diff("kube/kube-proxy kube/kubelet cni/portmap cni/ipmasq cni/firewall docker/docker flannel/flannel", wordsOf(r.d.Status())); d != "" {
			t.Errorf("owners later (-want +got):\n%s", d)
		}
		for _, owner := range []string{"docker (", "flannel ("} {
			if n := strings.Count(r.log.String(), `owners="`+owner); n != 1 {
				t.Errorf("the log names %q %d times, want once", owner, n)
			}
		}
		before := r.tables()
		r.flushEverything()
		if found := wordsOf(r.d.Status()); !strings.Contains(found, "docker/docker") {
			t.Errorf("a flush made an owner unknown: %s", found)
		}
		r.settled()
		r.wantBack(before, r.onlyForeign(before))
		for _, o := range r.d.Status().Owners {
			if o.Owner == "docker" && (o.Chains == 0 || o.Rules == 0) {
				t.Errorf("the evidence for Docker is %+v", o)
			}
		}
	})
}

// TestAnUpgradeToAuto: a canaryd guarded kube,cni, the former default, and its successor guards
// auto. The new one logs the new owners once, and removes or restores nothing.
func TestAnUpgradeToAuto(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		fake := loadedFake(t, backend)
		must(t, scenario.LoadOwners(t.Context(), scenario.FakePrograms{Fake: fake}, rules.Families()...))
		former := run(t, fake, setup{protect: []string{"kube", "cni"}, store: openStore(t, dir, id)})
		former.settled()
		former.wantReady()
		former.stop()
		before, restores := former.tables(), former.fake.Restores()
		upgraded := auto
		upgraded.store = openStore(t, dir, id)
		r := run(t, former.fake, upgraded)
		r.settled()
		r.wantLog(`leaveOut="--protect=auto,-docker,-podman,-libvirt,-tailscale"`)
		r.wantBack(before, before)
		if n := r.fake.Restores() - restores; n > 2 { // new nonces for another generation
			t.Errorf("%d restores at the start", n)
		}
		r.flushEverything()
		r.settled()
		r.wantBack(before, r.onlyForeign(before))
		r.stop()
		upgraded.store = openStore(t, dir, id)
		again := run(t, r.fake, upgraded)
		again.settled()
		again.wantReady()
		if strings.Contains(again.log.String(), "that the last run did not guard") {
			t.Error("the next start says again which owners are new")
		}
	})
}

// TestAnOwnerThatIsLeftOut: canaryd restarts with -docker. Docker's rules are in the tables, or
// a flush took them while no canaryd ran. canaryd reports neither a loss nor a removal by their
// owner.
func TestAnOwnerThatIsLeftOut(t *testing.T) {
	for name, flushed := range map[string]bool{"intact": false, "flushed": true} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir, id := t.TempDir(), identity(backend)
				s := auto
				s.store = openStore(t, dir, id)
				first := run(t, ownersFake(t, backend), s)
				first.settled()
				first.wantReady()
				before := first.tables()
				first.stop()
				if flushed {
					first.flushEverything()
				}
				r := run(t, first.fake, setup{protect: []string{protect.Auto, "-docker"}, store: openStore(t, dir, id)})
				r.settled()
				r.after(2 * r.d.cfg.JumpGrace)
				r.wantReady()
				if strings.Contains(r.log.String(), "takes this for their owner") {
					t.Error("rules that stand are called removed")
				}
				if found := wordsOf(r.d.Status()); strings.Contains(found, "docker") || !strings.Contains(found, "podman/podman") {
					t.Errorf("it found %s", found)
				}
				if flushed {
					if saved := r.fake.Save(rules.IPv4); strings.Contains(saved, "docker0") {
						t.Errorf("rules of Docker's came back:\n%s", saved)
					}
					return
				}
				if records := r.d.Status().Flushes; len(records) > 0 {
					t.Errorf("flush records %+v", records)
				}
				r.wantBack(before, before)
			})
		})
	}
}

// TestAutoFindsNothing: without an owner nothing is protected, and the node is ready but not
// healthy. canaryd guards no rules of a firewall manager, and points to detect for none.
func TestAutoFindsNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, iptablestest.NewFake(backend), auto)
		r.settled()
		r.wantLog("No owner of rules is found yet")
		s := r.d.Status()
		if s.Healthy || s.Ready() != nil || s.NothingProtected == nil || s.Unguarded != nil {
			t.Errorf("healthy %t, ready %v, nothing %+v, unguarded %+v", s.Healthy, s.Ready(), s.NothingProtected, s.Unguarded)
		}
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n:ufw-user-input - [0:0]\n:IN_public - [0:0]\n-A INPUT -j ufw-user-input\n-A ufw-user-input -p tcp --dport 22 -j ACCEPT\n-A IN_public -j ACCEPT\nCOMMIT\n"))
		r.after(2 * inventoryEvery)
		if s = r.d.Status(); s.Healthy || s.Unguarded != nil || len(s.Owners) > 0 || s.Generation.Rules > 0 {
			t.Errorf("healthy %t, unguarded %+v, owners %+v, %d rules", s.Healthy, s.Unguarded, s.Owners, s.Generation.Rules)
		}
		r.owner("docker")
		r.settled()
		r.wantReady()
		if s = r.d.Status(); !s.Healthy || wordsOf(s) != "docker/docker" {
			t.Errorf("with Docker: %s, owners %s", s.Headline, wordsOf(s))
		}
		r.wantLog("Guarding the rules of another owner")
	})
}

// TestStatusPointsToDetect: the status counts unguarded chains, with a likely owner.
func TestStatusPointsToDetect(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := loadedFake(t, backend)
		must(t, fake.RestoreNoflush(rules.IPv4, "*filter\n:CILIUM_FORWARD - [0:0]\n:mine - [0:0]\n:empty - [0:0]\n-A CILIUM_FORWARD -j ACCEPT\n-A mine -j ACCEPT\nCOMMIT\n"))
		r := startOn(t, fake, setup{protect: []string{protect.Auto, "-cilium"}})
		got := r.d.Status().Unguarded
		if got == nil || got.Chains < 2 || !strings.Contains(got.Text(), "CILIUM_FORWARD (cilium)") || !strings.Contains(got.Text(), "canaryd detect") {
			t.Errorf("not guarded: %+v: %s", got, got.Text())
		}
		must(t, fake.RestoreNoflush(rules.IPv4, "*filter\n-F CILIUM_FORWARD\n-F mine\nCOMMIT\n"))
		r.after(4 * inventoryEvery)
		if later := r.d.Status().Unguarded; later != nil && later.Chains != got.Chains-2 {
			t.Errorf("not guarded after two were emptied: %+v", later)
		}
	})
}

// TestStatusCountsAsTheGenerationDoes: the generation has the chains to which protected rules
// lead, so they do not count. A jump counts with its chain; rules of a firewall manager do not
// count. The status has no text of a rule.
func TestStatusCountsAsTheGenerationDoes(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := iptablestest.NewFake(backend)
		must(t, fake.RestoreNoflush(rules.IPv4, `*filter
:DOCKER-USER - [0:0]
:corp - [0:0]
:corp-log - [0:0]
:mine - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j corp
-A FORWARD -i wg0 -j ACCEPT
-A INPUT -j mine
-A INPUT -i eth1 -j ACCEPT
-A INPUT -m comment --comment "000 allow all" -j ACCEPT
-A DOCKER-USER -j corp
-A corp -j corp-log
-A corp-log -j LOG
-A mine -j RETURN
COMMIT
`))
		r := startOn(t, fake, setup{protect: []string{protect.Auto}})
		status := r.d.Status()
		want := &api.Unguarded{Chains: 1, Rules: 3, Names: []string{"mine"}} // with the jump to corp
		if d := cmp.Diff(want, status.Unguarded); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		if len(status.LedTo) != 2 {
			t.Errorf("led to: %v", status.LedTo)
		}
		if text := status.Unguarded.Text(); !strings.HasPrefix(text, "1 chain and 3 single rules, such as mine; canaryd detect") {
			t.Errorf("it says %q", text)
		}
	})
}

// TestACleanupOfRulesSaysWhose: with auto, cleanup removes only the rules of the owners that
// the request names. Without a name it removes nothing.
func TestACleanupOfRulesSaysWhose(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := run(t, ownersFake(t, backend), auto)
		r.settled()
		before := r.fake.Save(rules.IPv4)
		err := r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: true})
		if !errors.Is(err, onrequest.ErrWhoseRules) || !strings.Contains(err.Error(), "docker (") {
			t.Errorf("a cleanup of everybody's rules ends with %v", err)
		}
		if r.fake.Save(rules.IPv4) != before {
			t.Error("it removed something")
		}
		must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{Rules: true, Protect: "docker"}))
		r.wantLog(`"canaryd's marks were removed on request; canaryd guards nothing until it is restarted" rulesRemoved=true protect="docker"`)
		if saved := r.fake.Save(rules.IPv4); strings.Contains(saved, "docker0") || !strings.Contains(saved, "LIBVIRT_") {
			t.Errorf("a cleanup of Docker's rules left:\n%s", saved)
		}
	})
}

// TestAnOlderGenerationIsNarrowed: an operator restores a generation from before -docker.
// canaryd writes no rule of Docker's, because it would not guard, prove or remove that rule.
func TestAnOlderGenerationIsNarrowed(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir, id := t.TempDir(), identity(backend)
		s := auto
		s.store = openStore(t, dir, id)
		first := run(t, ownersFake(t, backend), s)
		first.settled()
		older := first.d.Status().Generation.ID
		first.stop()
		first.flushEverything()
		r := run(t, first.fake, setup{protect: []string{protect.Auto, "-docker"}, store: openStore(t, dir, id)})
		r.settled()
		if reply, err := r.d.Restore(t.Context(), api.RestoreRequest{Generation: older}); err != nil || !reply.Proved() {
			t.Errorf("restore: %+v, %v", reply, err)
		}
		r.settled()
		r.wantReady()
		if saved := r.fake.Save(rules.IPv4); strings.Contains(saved, "docker0") || !strings.Contains(saved, "LIBVIRT_") {
			t.Errorf("the node has after the restore:\n%s", saved)
		}
	})
}

// TestLeaveOut: leaveOut appends words that leave owners out, and keeps the others. It returns
// nothing without auto, or if another word names the owner.
func TestLeaveOut(t *testing.T) {
	docker := []api.GuardedOwner{{Owner: "docker", Word: "docker"}}
	for value, want := range map[string]string{
		"auto":              "auto,-docker",
		"kube, auto":        "kube, auto,-docker",
		"auto,-cilium,f2-*": "auto,-cilium,f2-*,-docker",
		`auto,"rule:filter:INPUT:-m multiport --dports 1,2 *"`: `auto,"rule:filter:INPUT:-m multiport --dports 1,2 *",-docker`,
		"kube,docker": "",
		"auto,docker": "",
	} {
		got := strings.ReplaceAll(leaveOut(value, docker), `" auto"`, " auto")
		if got != want {
			t.Errorf("with %s it is %q, want %q", value, got, want)
		}
	}
}

// TestSameTables: a table that replaces another one is a change, though their number stays.
func TestSameTables(t *testing.T) {
	a, b := tableid.IPv4.Table("docker-bridges"), tableid.Inet.Table("netavark")
	known := map[tableid.TableID]bool{a: true}
	for _, c := range []struct {
		now  map[tableid.TableID]*nativeTable
		want bool
	}{{map[tableid.TableID]*nativeTable{a: nil}, true}, {map[tableid.TableID]*nativeTable{b: nil}, false}, {nil, false}, {map[tableid.TableID]*nativeTable{a: nil, b: nil}, false}} {
		if got := sameTables(known, c.now); got != c.want {
			t.Errorf("sameTables(%v, %v) is %t", known, c.now, got)
		}
	}
}
