package rules

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
	set, _, err := Parse(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	kube := Protection{Chain: func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }, Follow: func(chain string) bool { return !strings.HasSuffix(chain, "-CANARY") }}
	wide := kube
	wide.Chain = func(chain string) bool { return chain == "DOCKER" || kube.Chain(chain) }
	wide.Rule = func(_ TableName, _ string, r Rule) bool { return strings.Contains(r.Spec, "docker0") }
	extract := func(p Protection) Section { return p.Extract(set[Nat], func(Rule) bool { return false }) }
	id := IPv4.Table(Nat)
	got := kube.Narrow(Generation{}.With(id, extract(wide)))[id]
	want := extract(kube)
	want.Jumps[0].Anchor = Anchor{Position: Top} // it was behind a jump, which is no neighbour
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the narrow section (-read with the narrow protection +narrowed):\n%s", d)
	}
	if same := wide.Narrow(Generation{}.With(id, extract(wide)))[id]; !cmp.Equal(extract(wide), same) {
		t.Errorf("a generation that is protected as a whole changed:\n%s", cmp.Diff(extract(wide), same))
	}
}

// TestNarrowKeepsChainsThatAreLedTo: kube-proxy's chain KUBE-MARK-MASQ was protected. Now only
// rules of CNI plugins are, and they lead to it. Without it a replay could not write them.
func TestNarrowKeepsChainsThatAreLedTo(t *testing.T) {
	set, _, err := Parse(strings.NewReader(`*nat
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
`))
	if err != nil {
		t.Fatal(err)
	}
	named := func(prefixes ...string) Protection {
		return Protection{Follow: func(string) bool { return true }, Chain: func(chain string) bool {
			return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
		}}
	}
	extract := func(p Protection) Section { return p.Extract(set[Nat], func(Rule) bool { return false }) }
	id := IPv4.Table(Nat)
	got := named("CNI-").Narrow(Generation{}.With(id, extract(named("CNI-", "KUBE-"))))[id]
	want := extract(named("CNI-"))
	want.Jumps[0].Anchor, got.Jumps[0].Anchor = Anchor{}, Anchor{} // now a foreign rule
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the narrow section (-read with the narrow protection +narrowed):\n%s", d)
	}
}
