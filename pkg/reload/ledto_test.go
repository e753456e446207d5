package reload

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ufwDockerText is a node with ufw-docker: DOCKER-USER leads to chains of ufw, which hold the DROP.
// ufw's own jump from FORWARD leads to one of them too.
const ufwDockerText = `*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-USER - [0:0]
:ufw-before-forward - [0:0]
:ufw-docker-logging-deny - [0:0]
:ufw-empty - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j ufw-before-forward
-A FORWARD -j DOCKER-USER
-A FORWARD -o docker0 -j DOCKER
-A DOCKER -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER-USER -j ufw-user-forward
-A DOCKER-USER -s 192.168.0.0/16 -j RETURN
-A DOCKER-USER -d 172.16.0.0/12 -p tcp -j ufw-docker-logging-deny
-A DOCKER-USER -j RETURN
-A ufw-before-forward -j ufw-user-forward
-A ufw-docker-logging-deny -j ufw-empty
-A ufw-docker-logging-deny -j DROP
-A ufw-user-forward -s 198.51.100.1/32 -d 172.17.0.2/32 -j ACCEPT
COMMIT
`

// newUfwNode returns a node that learned ufwDockerText with --protect=docker.
func newUfwNode(t *testing.T, backend iptables.Backend) *testNode {
	t.Helper()
	selector, err := protect.NewSelector([]string{"docker"})
	must(t, err)
	n := &testNode{Fake: iptablestest.NewFake(backend, v4), t: t, before: map[rules.Family]string{}}
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: selector.Protection()}
	n.job = Job{Families: []rules.Family{v4}, Generation: rules.Generation{}, Quiet: map[rules.Family]bool{}}
	must(t, n.RestoreNoflush(v4, ufwDockerText))
	n.job.Generation = n.job.Generation.With(v4.Table(rules.Filter), n.filter())
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	n.before[v4] = n.content(v4)
	return n
}

// filter is what is guarded of the table filter as it stands.
func (n *testNode) filter() rules.Section {
	n.t.Helper()
	snapshot, err := n.Fake.Read(n.t.Context(), v4)
	must(n.t, err)
	return n.replayer.Protection.Extract(snapshot.Tables[rules.Filter], canary.IsMark)
}

// onlyLost returns a text without these lines.
func onlyLost(text string, lines ...string) string {
	for _, line := range lines {
		text = strings.Replace(text, line+"\n", "", 1)
	}
	return text
}

func TestAChainOfOthersThatProtectedRulesLeadToComesBack(t *testing.T) {
	const managers = "-A FORWARD -j ufw-before-forward" // ufw's own: neither it nor its chain is guarded
	rewritten := func(text string) string {
		return strings.Replace(text, "-A ufw-user-forward -s 198.51.100.1/32 -d 172.17.0.2/32 -j ACCEPT", "-A ufw-user-forward -j DROP", 1)
	}
	for _, test := range []struct {
		name  string
		flush func(n *testNode) error
		want  func(before string) string
	}{
		{"all rules", func(n *testNode) error { return n.Flush(v4, rules.Filter, "") }, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward")
		}},
		{"all rules and chains", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.DeleteChains(v4, rules.Filter)
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward", ":ufw-before-forward - [0:0]")
		}},
		{"all rules, and its owner deletes the chain", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.RestoreNoflush(v4, "*filter\n-X ufw-docker-logging-deny\nCOMMIT\n")
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward")
		}},
		{"all rules, and its owner writes it again", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, ""))
			return n.RestoreNoflush(v4, "*filter\n-A ufw-user-forward -j DROP\nCOMMIT\n")
		}, func(before string) string {
			return rewritten(onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward"))
		}},
		{"a saved file with other rules in it", func(n *testNode) error {
			return n.Restore(v4, strings.ReplaceAll(strings.ReplaceAll(rewritten(n.Save(v4)), "canaryd-canary:", "canaryd-canary:0"), "-A DOCKER-USER -j ufw-user-forward\n", ""))
		}, rewritten},
		{"a saved file without them", func(n *testNode) error {
			return n.Restore(v4, "*filter\n:FORWARD DROP [0:0]\n:DOCKER - [0:0]\n:"+canary.DefaultChain+" - [0:0]\n-A "+canary.DefaultChain+
				" -m comment --comment \"canaryd-canary:0123456789abcdef\"\nCOMMIT\n")
		}, func(before string) string {
			return onlyLost(before, managers, "-A ufw-before-forward -j ufw-user-forward", ":ufw-before-forward - [0:0]")
		}},
		{"the jump and, by its name, the chain", func(n *testNode) error {
			must(n.t, n.Flush(v4, rules.Filter, "ufw-docker-logging-deny"))
			return n.Flush(v4, rules.Filter, "FORWARD")
		}, func(before string) string { return onlyLost(before, managers) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
				t.Run(string(backend), func(t *testing.T) {
					n := newUfwNode(t, backend)
					must(t, test.flush(n))
					n.outcome(n.heal(), v4, Proved)
					if d := cmp.Diff(test.want(n.before[v4]), n.content(v4)); d != "" {
						t.Errorf("(-want +got):\n%s", d)
					}
					if again := n.heal(); again[v4].Outcome != Skipped {
						t.Errorf("another look finds %v", verdicts(again[v4]))
					}
				})
			}
		})
	}
}
