package rules_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestNarrow: a generation has rules of kube-proxy and Docker, and Docker is no longer
// protected. Narrow must drop Docker's chains, jumps and MASQUERADE, and the chain that only
// they lead to.
func TestNarrow(t *testing.T) {
	text := `*nat
:POSTROUTING ACCEPT [0:0]
:PREROUTING ACCEPT [0:0]
:DOCKER - [0:0]
:KUBE-SERVICES - [0:0]
:both - [0:0]
:behind - [0:0]
:ufw-docker - [0:0]
-A PREROUTING -j DOCKER
-A PREROUTING -j KUBE-SERVICES
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -j ufw-docker
-A DOCKER -j both
-A KUBE-SERVICES -j both
-A both -j behind
-A behind -j ACCEPT
-A ufw-docker -j RETURN
COMMIT
`
	set := savefile.Tables(t, text)
	kube := rules.Protection{Chain: func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }, Follow: func(chain string) bool { return !strings.HasSuffix(chain, "-CANARY") }}
	wide := kube
	wide.Chain = func(chain string) bool { return chain == "DOCKER" || kube.Chain(chain) }
	wide.Rule = func(_ rules.TableName, _ string, r rules.Rule) bool { return strings.Contains(r.Spec, "docker0") }
	extract := func(p rules.Protection) rules.Section {
		return p.Extract(set[rules.Nat], func(rules.Rule) bool { return false })
	}
	id := rules.IPv4.Table(rules.Nat)
	got := kube.Narrow(rules.Generation{}.With(id, extract(wide)))[id]
	want := extract(kube)
	want.Jumps[0].Anchor = rules.Anchor{Position: rules.Top} // it was behind a jump, which is no neighbour
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the narrow section (-read with the narrow protection +narrowed):\n%s", d)
	}
	if same := wide.Narrow(rules.Generation{}.With(id, extract(wide)))[id]; !cmp.Equal(extract(wide), same) {
		t.Errorf("a generation that is protected as a whole changed:\n%s", cmp.Diff(extract(wide), same))
	}
}

// TestNarrowKeepsChainsThatAreLedTo: kube-proxy's chain KUBE-MARK-MASQ was protected. Now only
// rules of CNI plugins are, and they lead to it. Without it a replay could not write them.
func TestNarrowKeepsChainsThatAreLedTo(t *testing.T) {
	set := savefile.Tables(t, `*nat
:PREROUTING ACCEPT [0:0]
:CNI-DN-1 - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -j CNI-DN-1
-A CNI-DN-1 -s 10.0.0.1/32 -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -j KUBE-MARK-MASQ
COMMIT
`)
	named := func(prefixes ...string) rules.Protection {
		return rules.Protection{Follow: func(string) bool { return true }, Chain: func(chain string) bool {
			return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
		}}
	}
	extract := func(p rules.Protection) rules.Section {
		return p.Extract(set[rules.Nat], func(rules.Rule) bool { return false })
	}
	id := rules.IPv4.Table(rules.Nat)
	got := named("CNI-").Narrow(rules.Generation{}.With(id, extract(named("CNI-", "KUBE-"))))[id]
	want := extract(named("CNI-"))
	want.Jumps[0].Anchor, got.Jumps[0].Anchor = rules.Anchor{}, rules.Anchor{} // now a foreign rule
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the narrow section (-read with the narrow protection +narrowed):\n%s", d)
	}
}
