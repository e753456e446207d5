package canary

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// dockerNode is a nat table in which Docker put rules into POSTROUTING itself.
const dockerNode = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A PREROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -s 172.18.40.0/24 ! -o br-4f5a6b7c8d9e -j MASQUERADE
-A POSTROUTING -o eth0 -j MASQUERADE
-A POSTROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A DOCKER -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
COMMIT
`

const (
	jumpDocker = "-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER"
	masq17     = "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"
	masq18     = "-A POSTROUTING -s 172.18.40.0/24 ! -o br-4f5a6b7c8d9e -j MASQUERADE"
	masqLAN    = "-A POSTROUTING -o eth0 -j MASQUERADE"
)

// protectsDocker protects node's chains and the rules of the docker preset.
func protectsDocker(t testing.TB) rules.Protection {
	t.Helper()
	s, err := protect.NewSelector([]string{"docker"})
	if err != nil {
		t.Fatal(err)
	}
	return rules.Protection{Chain: func(chain string) bool { return protects(chain) || s.Protects(chain) }, Rule: s.MatchesPreset}
}

func TestARuleThatLeadsNowhereIsLostWithItsChainAndLetGoOfByName(t *testing.T) {
	both := []string{masq17, masq18}
	firewalld := "-A POSTROUTING -o eth7 -j MASQUERADE"
	tests := []struct {
		name  string
		edits []edit
		quiet bool
		want  summary
	}{
		{name: "nothing happened", want: summary{Verdict: Intact}},
		{name: "the network was removed", edits: []edit{without(masq18)}, want: summary{Verdict: Changed}},
		{name: "long ago", edits: []edit{without(masq18)}, quiet: true, want: summary{Verdict: Changed}},
		{name: "all networks were", edits: []edit{without(both...)}, quiet: true, want: summary{Verdict: Changed}},
		{
			name: "POSTROUTING was flushed", edits: []edit{flushed("POSTROUTING")},
			want: summary{Verdict: JumpsMissing, Witnesses: []string{"POSTROUTING"}, Jumps: both},
		},
		{
			name:  "and another network's rule appeared there",
			edits: []edit{flushed("POSTROUTING"), with(firewalld)},
			want:  summary{Verdict: JumpsMissing, Witnesses: []string{"POSTROUTING"}, Jumps: both},
		},
		{
			name:  "and Docker was faster with one of them",
			edits: []edit{flushed("POSTROUTING"), with(masq18)},
			want:  summary{Verdict: JumpsMissing, Witnesses: []string{"POSTROUTING"}, Jumps: []string{masq17}},
		},
		{
			name: "everything was flushed", edits: []edit{flushed()},
			want: summary{
				Verdict: Emptied, MarkLost: true, Witnesses: []string{"PREROUTING", "POSTROUTING"},
				Jumps: []string{jumpDocker, masq17, masq18}, Emptied: []string{"DOCKER"},
			},
		},
		{name: "the neighbour went", edits: []edit{without(masqLAN)}, want: summary{Verdict: Intact}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			protection := protectsDocker(t)
			before := protection.Extract(tableOf(t, dockerNode), IsMark)
			text := dockerNode
			for _, e := range test.edits {
				text = e(text)
			}
			after := tableOf(t, text)
			got := summarize(Judge(
				Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: before.JumpChains(rules.Nat)}, Section: before},
				Seen{Table: after, Section: protection.Extract(after, IsMark), Quiet: test.quiet}))
			if d := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// sharedNode is a nat table of portmap, with the host ports of two pods.
const sharedNode = `*nat
:PREROUTING ACCEPT [0:0]
:CNI-DN-1 - [0:0]
:CNI-DN-2 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A PREROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A CNI-DN-1 -j RETURN
-A CNI-DN-2 -j RETURN
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 2 -j CNI-DN-2
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
COMMIT
`

// TestTheLastPodTakesItsJumpAwayBeforeItsChain: portmap's DEL runs several commands. After the
// first one, the chain that all pods share may be empty.
func TestTheLastPodTakesItsJumpAwayBeforeItsChain(t *testing.T) {
	const shared, jump1, jump2 = "CNI-HOSTPORT-DNAT", "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1", "-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 2 -j CNI-DN-2"
	protection := rules.Protection{Chain: func(chain string) bool { return chain == shared || chain == "CNI-DN-1" || chain == "CNI-DN-2" }}
	tests := []struct {
		name  string
		edits []edit
		quiet bool
		whole bool // a single owner writes all of the chain
		want  summary
	}{
		{name: "the last pod is being removed", edits: []edit{deleted("CNI-DN-1"), without(jump1, jump2)}, want: summary{Verdict: Changed, Waiting: []string{jump2}}},
		{name: "two are at once", edits: []edit{flushed(shared)}, want: summary{Verdict: Changed, Waiting: []string{jump1}}},
		{name: "they were", edits: []edit{without(jump1, jump2), deleted("CNI-DN-1", "CNI-DN-2")}, quiet: true, want: summary{Verdict: Changed}},
		{name: "the owner does not delete the chain", edits: []edit{flushed(shared)}, quiet: true, want: summary{Verdict: Emptied, Emptied: []string{shared}}},
		{name: "who writes all of a chain empties it at once", edits: []edit{flushed(shared)}, whole: true, want: summary{Verdict: Emptied, Emptied: []string{shared}}},
		{name: "the table was flushed", edits: []edit{flushed()}, want: summary{Verdict: Emptied, MarkLost: true, Witnesses: []string{"PREROUTING"}, Jumps: []string{"-A PREROUTING -j " + shared}, Emptied: []string{"CNI-DN-1", "CNI-DN-2", shared}}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			text := sharedNode
			for _, e := range test.edits {
				text = e(text)
			}
			section := protection.Extract(tableOf(t, sharedNode), IsMark)
			want := Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: section.JumpChains(rules.Nat)}, Section: section}
			if !test.whole {
				want.Piecewise = func(chain string) bool { return chain == shared }
			}
			table := tableOf(t, text)
			got := summarize(Judge(want, Seen{Table: table, Section: protection.Extract(table, IsMark), Quiet: test.quiet}))
			if d := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// onePodNode is a nat table with the host port of one pod, by portmap, and a service, by
// kube-proxy.
const onePodNode = `*nat
:PREROUTING ACCEPT [0:0]
:CNI-DN-1 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:KUBE-CANARYD-CANARY - [0:0]
:KUBE-SEP-1 - [0:0]
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A PREROUTING -j KUBE-SEP-1
-A PREROUTING -m comment --comment "canaryd-witness:0123456789abcdef"
-A CNI-DN-1 -s 10.244.0.0/24 -p tcp -m tcp --dport 1 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-1 -p tcp -m tcp --dport 1 -j DNAT --to-destination 10.244.0.3:8080
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
-A KUBE-CANARYD-CANARY -m comment --comment "canaryd-canary:0123456789abcdef"
-A KUBE-SEP-1 -j RETURN
COMMIT
`

// TestTheLastPodFlushesItsChainBeforeItsJump: portmap's DEL flushes the pod's chain, deletes
// the jump and then the chain. After the last pod no chain leads to the mark's chain, which
// remains. That is no flush, even if kube-proxy removes an endpoint at the same time.
func TestTheLastPodFlushesItsChainBeforeItsJump(t *testing.T) {
	const dnat, mark, pod = "CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-DN-1"
	const toMark = "-A CNI-DN-1 -s 10.244.0.0/24 -p tcp -m tcp --dport 1 -j CNI-HOSTPORT-SETMARK"
	const toEndpoint = "-A PREROUTING -j KUBE-SEP-1"
	protection := rules.Protection{Chain: func(chain string) bool { return slices.Contains([]string{dnat, mark, pod, "KUBE-SEP-1"}, chain) }}
	for _, test := range []struct {
		name  string
		edits []edit
		quiet bool
		want  summary
	}{
		{name: "the pod is being removed", edits: []edit{flushed(pod)}, want: summary{Verdict: Changed, Waiting: []string{toMark}}},
		{name: "and an endpoint is", edits: []edit{flushed(pod), without(toEndpoint), deleted("KUBE-SEP-1")}, want: summary{Verdict: Changed, Waiting: []string{toMark}}},
		{name: "it was removed", edits: []edit{without("-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1"), deleted(pod)}, quiet: true, want: summary{Verdict: Changed}},
		{name: "a flusher took the pod's rules", edits: []edit{flushed(pod)}, quiet: true, want: summary{Verdict: Emptied, Emptied: []string{pod}}},
		{name: "the mark was taken", edits: []edit{flushed(mark)}, want: summary{Verdict: Emptied, Emptied: []string{mark}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			text := onePodNode
			for _, e := range test.edits {
				text = e(text)
			}
			section := protection.Extract(tableOf(t, onePodNode), IsMark)
			want := Wanted{CanaryChain: DefaultChain, Mark: Mark{Nonce: nonce, Witnessed: section.JumpChains(rules.Nat)}, Section: section}
			want.Piecewise = func(chain string) bool { return chain == dnat || chain == mark }
			table := tableOf(t, text)
			got := summarize(Judge(want, Seen{Table: table, Section: protection.Extract(table, IsMark), Quiet: test.quiet}))
			if d := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
