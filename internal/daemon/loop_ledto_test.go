package daemon

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ufwDocker is a node with ufw-docker: Docker's chain leads to ufw's chains, which have the
// DROP.
const ufwDocker = `*filter
:FORWARD DROP [0:0]
:DOCKER-USER - [0:0]
:ufw-before-forward - [0:0]
:ufw-docker-logging-deny - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A FORWARD -j DOCKER-USER
-A DOCKER-USER -j ufw-user-forward
-A DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny
-A DOCKER-USER -j RETURN
-A ufw-before-forward -j ufw-user-forward
-A ufw-docker-logging-deny -j DROP
-A ufw-user-forward -s 198.51.100.1/32 -j ACCEPT
COMMIT
`

// onUfw runs a test with a daemon that guards Docker's chains on a node with ufw-docker.
func onUfw(t *testing.T, test func(t *testing.T, r *rig)) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		fake := iptablestest.NewFake(backend, rules.IPv4)
		must(t, fake.RestoreNoflush(rules.IPv4, ufwDocker))
		r := run(t, fake, setup{protect: []string{"docker"}})
		r.settled()
		test(t, r)
	})
}

// ledTo returns the chains of others that the status names.
func (r *rig) ledTo() (names []string) {
	for _, l := range r.d.Status().LedTo {
		names = append(names, l.Chain+" from "+l.From)
	}
	return names
}

// TestChainsOfOthersAreNamed: canaryd guards the chains of others to which protected rules
// lead. Status and page name them, and the log once. Without such a rule the status no longer
// names the chain.
func TestChainsOfOthersAreNamed(t *testing.T) {
	onUfw(t, func(t *testing.T, r *rig) {
		both := []string{"ufw-docker-logging-deny from DOCKER-USER", "ufw-user-forward from DOCKER-USER"}
		if d := cmp.Diff(both, r.ledTo()); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
		r.wantLog("Chains of other owners are guarded too, because protected rules lead to them")
		if page := pageOf(t, r.d.Status()); !strings.Contains(page, "2 chains of other owners are guarded too: ipv4 filter ufw-docker-logging-deny, because DOCKER-USER leads to it; ") {
			t.Errorf("the page is %s", page)
		}
		r.write(rules.Filter, "-D DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny")
		r.settled()
		r.after(2 * time.Second)
		if d := cmp.Diff(both[1:], r.ledTo()); d != "" {
			t.Errorf("without a jump (-want +got):\n%s", d)
		}
		r.write(rules.Filter, ":ufw-more - [0:0]", "-A ufw-user-forward -j ufw-more")
		r.settled()
		if d := cmp.Diff([]string{"ufw-more from ufw-user-forward", both[1]}, r.ledTo()); d != "" {
			t.Errorf("with one more (-want +got):\n%s", d)
		}
		if n := strings.Count(r.log.String(), "Chains of other owners are guarded too"); n != 2 {
			t.Errorf("the log has it %d times, want 2", n)
		}
		r.wantReady()
		r.wantNoFlush()
		if got := r.accepted(); len(got) != 0 {
			t.Errorf("accepted is %q, and nothing is gone but a rule", got)
		}
	})
}

// TestAnOwnerReloadsItsChains: ufw empties its chains and writes them again. After a flush in
// between canaryd restores their rules. A chain that ufw leaves empty for two seconds stays
// empty, and rules that ufw writes after a flush stay.
func TestAnOwnerReloadsItsChains(t *testing.T) {
	const deny, allow = "ufw-docker-logging-deny", "ufw-user-forward"
	empty := func(r *rig, chain string) { must(r.t, r.fake.Flush(rules.IPv4, rules.Filter, chain)) }
	flush := func(r *rig) { empty(r, "") }
	for _, test := range []struct {
		name        string
		do          func(r *rig)
		deny, allow []string
		records     int
		accepted    []string
	}{
		{"without a flush", func(r *rig) {
			empty(r, allow)
			r.after(time.Second)
			r.write(rules.Filter, "-A ufw-user-forward -j ACCEPT")
		}, []string{"-j DROP"}, []string{"-j ACCEPT"}, 0, nil},
		{"a flush while it is empty", func(r *rig) {
			empty(r, deny)
			r.after(time.Second)
			flush(r)
		}, []string{"-j DROP"}, []string{"-s 198.51.100.1/32 -j ACCEPT"}, 1, nil},
		{"it leaves it empty", func(r *rig) {
			empty(r, deny)
			r.after(4 * time.Second)
			flush(r)
		}, []string{}, []string{"-s 198.51.100.1/32 -j ACCEPT"}, 1, []string{"ipv4 filter " + deny + " lost one rule, 0 left"}},
		{"it writes one again after the flush", func(r *rig) {
			flush(r)
			r.write(rules.Filter, "-A ufw-user-forward -j ACCEPT")
		}, []string{"-j DROP"}, []string{"-j ACCEPT"}, 1, nil},
		{"its owner deletes one after the flush", func(r *rig) {
			flush(r)
			r.write(rules.Filter, "-X ufw-docker-logging-deny")
		}, []string{"-j DROP"}, []string{"-s 198.51.100.1/32 -j ACCEPT"}, 1, nil},
		{"twice", func(r *rig) {
			flush(r)
			r.settled()
			r.write(rules.Filter, "-F", "-X")
		}, []string{"-j DROP"}, []string{"-s 198.51.100.1/32 -j ACCEPT"}, 2, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			onUfw(t, func(t *testing.T, r *rig) {
				before := r.chain(rules.IPv4, rules.Filter, "DOCKER-USER")
				test.do(r)
				r.settled()
				r.after(10 * time.Second)
				for chain, want := range map[string][]string{deny: test.deny, allow: test.allow, "DOCKER-USER": before} {
					if d := cmp.Diff(want, r.chain(rules.IPv4, rules.Filter, chain)); d != "" {
						t.Errorf("%s (-want +got):\n%s", chain, d)
					}
				}
				r.wantReady()
				flushes := r.d.Status().Flushes
				if len(flushes) != test.records || slices.ContainsFunc(flushes, func(f api.Flush) bool { return f.Outcome != api.Outcome("proved") }) {
					t.Errorf("the records are %+v, want %d that are proved", flushes, test.records)
				}
				if d := cmp.Diff(by(r.d.cfg.Kernel.Info().Backend, test.accepted), r.accepted()); d != "" {
					t.Errorf("accepted (-want +got):\n%s", d)
				}
			})
		})
	}
}
