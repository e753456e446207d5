package owners

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// firewalls has chains in the style of ufw, firewalld, OpenStack's Neutron and a
// person.
const firewalls = `*filter
:ufw-user-input - [0:0]
:IN_public - [0:0]
:neutron-filter-top - [0:0]
:mine - [0:0]
-A INPUT -j ufw-user-input
-A INPUT -i eth7 -j IN_public
-A INPUT -j mine
-A FORWARD -j neutron-filter-top
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
-A IN_public -p tcp -m tcp --dport 25 -j REJECT
-A neutron-filter-top -o tap7 -j ACCEPT
-A mine -s 192.0.2.1/32 -j DROP
COMMIT
`

// TestAuto: canaryd runs without --protect on a node with kube-proxy, CNI
// plugins, Docker and flannel next to firewalls of others. iptables -F empties
// everything. All rules of the owners must come back, and no rule of the
// firewalls. Tailscale appears later. canaryd detect lists the others.
func TestAuto(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		write := func(f rules.Family, text string) {
			n.Helper()
			if text != "" {
				n.Must(n.Programs.RestoreNoflush(n.Context(), f, text))
			}
		}
		owner := func(name string) {
			n.Helper()
			for _, f := range n.Families {
				write(f, scenario.Owner(f, name).Text)
			}
		}
		owner("docker")
		owner("flannel")
		write(rules.IPv4, firewalls)
		protects(n, protect.Auto)
		s := selectorOf(n, protect.Auto)
		before := n.Save()
		n.Start()
		back := func(when string) {
			n.Helper()
			for f, set := range n.Save() {
				want := scenario.Want{Protected: before[f], Foreign: set, Protects: s.Protects, MatchesPreset: s.MatchesPreset}
				for _, line := range scenario.Compare(want, set) {
					n.Errorf("%s: %s %s", when, f, line)
				}
			}
			for _, chain := range []string{"ufw-user-input", "IN_public", "mine", "neutron-filter-top"} {
				if left := n.Save()[rules.IPv4][rules.Filter].Rules(chain); len(left) > 0 {
					n.Errorf("%s, %s has rules: %v", when, chain, left)
				}
			}
		}
		says := func(command string, words ...string) {
			n.Helper()
			stdout, _ := n.Want(0, command)
			for _, word := range words {
				if !strings.Contains(stdout, word) {
					n.Errorf("canaryd %s does not say %q:\n%s", command, word, stdout)
				}
			}
		}
		found := func(owner string) {
			n.Helper()
			n.Until(owner+" to be found", func() error {
				if stdout, _ := n.Want(0, "status"); !strings.Contains(stdout, owner+" (") {
					return fmt.Errorf("status does not name it:\n%s", stdout)
				}
				return nil
			})
		}
		found("docker")
		says("status", "--protect=auto found: kube (kube-proxy: ", "flannel (", "not guarded: ")
		says("detect", "neutron-filter-top", "the word neutron-filter-top of --protect would", "likely of ufw", "likely of firewalld", "the word [m]ine of --protect would")
		flush(n, false)
		n.Healed(1)
		back("after iptables -F")

		owner("tailscale")
		found("tailscale")
		n.Until("its rules to be captured", func() error {
			if !n.Status().LearningPendingSince.IsZero() {
				return errors.New("something is not captured yet")
			}
			return nil
		})
		before = n.Save()
		flush(n, true)
		n.Healed(2)
		back("after iptables -F and -X")
	})
}
