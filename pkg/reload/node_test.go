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
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nodeText is a small node: two owners' protected chains, jumps at the top, in the middle and at
// the bottom, kube-proxy's canaries, and foreign rules.
const nodeText = `*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
-A FORWARD -p tcp -j TCPMSS --clamp-mss-to-pmtu
COMMIT
*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:corp - [0:0]
-A corp -j RETURN
-A PREROUTING -j KUBE-SERVICES
-A PREROUTING -i wg0 -j corp
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -o wg0 -j MASQUERADE
-A POSTROUTING -j KUBE-POSTROUTING
-A POSTROUTING -o eth9 -j MASQUERADE
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE
-A KUBE-SERVICES -p tcp -m comment --comment "ns/a's port" -j KUBE-SVC-A
-A KUBE-SVC-A -j KUBE-MARK-MASQ
COMMIT
*filter
:FORWARD DROP [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
:corp - [0:0]
-A corp -j RETURN
-A FORWARD -j KUBE-FORWARD
-A FORWARD -i tun0 -j ACCEPT
-A INPUT -i lo -j ACCEPT
-A INPUT -j KUBE-FIREWALL
-A KUBE-FORWARD -j corp
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
`

// foreignRules are the rules of nodeText that canaryd must never touch.
var foreignRules = []string{
	"-A FORWARD -p tcp -j TCPMSS --clamp-mss-to-pmtu", "-A corp -j RETURN", "-A PREROUTING -i wg0 -j corp",
	"-A POSTROUTING -o wg0 -j MASQUERADE", "-A POSTROUTING -o eth9 -j MASQUERADE", "-A FORWARD -i tun0 -j ACCEPT", "-A INPUT -i lo -j ACCEPT",
	":FORWARD DROP",
}

// A testNode is a Fake with a Replayer that learned and planted everything.
type testNode struct {
	*iptablestest.Fake
	t        *testing.T
	replayer Replayer
	job      Job
	before   map[rules.Family]string // the output of iptables-save, without marks
}

// onBoth runs a test on a node of each backend.
func onBoth(t *testing.T, test func(t *testing.T, n *testNode)) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) { test(t, newNode(t, backend, nodeText, v4, v6)) })
	}
}

func newNode(t *testing.T, backend iptables.Backend, text string, families ...rules.Family) *testNode {
	t.Helper()
	n := &testNode{Fake: iptablestest.NewFake(backend, families...), t: t, before: map[rules.Family]string{}}
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: protects}}
	n.job = Job{Families: families, Generation: rules.Generation{}, Quiet: map[rules.Family]bool{}}
	for _, f := range families {
		must(t, n.RestoreNoflush(f, text))
		snapshot, err := n.Fake.Read(t.Context(), f)
		must(t, err)
		for table, seen := range snapshot.Tables {
			n.job.Generation = n.job.Generation.With(f.Table(table), rules.Protection{Chain: protects}.Extract(seen, canary.IsMark))
		}
		n.before[f] = n.content(f)
	}
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	for _, f := range families {
		n.outcome(result, f, Proved)
		n.same(f)
	}
	return n
}

// take takes over the marks of a result, and removes its tables that need no marks.
func (n *testNode) take(result Result) {
	for f, fr := range result {
		for table, tr := range fr.Tables {
			if tr.Finding.Unmarked {
				delete(fr.Tables, table)
				continue
			}
			n.job.Marks = n.job.Marks.With(f.Table(table), tr.Mark)
		}
	}
}

// learn learns the rules in force, and plants new marks for them.
func (n *testNode) learn() {
	n.t.Helper()
	for _, f := range n.job.Families {
		snapshot, err := n.Fake.Read(n.t.Context(), f)
		must(n.t, err)
		for table, seen := range snapshot.Tables {
			n.job.Generation = n.job.Generation.With(f.Table(table), rules.Protection{Chain: n.replayer.Protection.Chain}.Extract(seen, canary.IsMark))
		}
	}
	result, err := n.replayer.Rotate(n.t.Context(), n.job)
	must(n.t, err)
	n.take(result)
}

// heal heals, takes over the marks and returns the result.
func (n *testNode) heal() Result {
	n.t.Helper()
	result, err := n.replayer.Heal(n.t.Context(), n.job)
	must(n.t, err)
	n.take(result)
	return result
}

func (n *testNode) outcome(result Result, f rules.Family, want Outcome) {
	n.t.Helper()
	fr := result[f]
	if fr.Outcome != want {
		n.t.Errorf("%s is %s, want %s: %v", f, fr.Outcome, want, fr.Err)
	}
	if done := fr.Outcome.Done(); done != (fr.Err == nil) {
		n.t.Errorf("%s is %s with error %v", f, fr.Outcome, fr.Err)
	}
}

// content returns the output of iptables-save, without canaryd's marks.
func (n *testNode) content(f rules.Family) string {
	var b strings.Builder
	for line := range strings.Lines(n.Save(f)) {
		if !strings.Contains(line, "canaryd-") && !strings.Contains(line, canary.DefaultChain) {
			b.WriteString(line)
		}
	}
	return b.String()
}

// same checks that all rules are as they were at the beginning.
func (n *testNode) same(f rules.Family) {
	n.t.Helper()
	if d := cmp.Diff(n.before[f], n.content(f)); d != "" {
		n.t.Errorf("%s (-before +now):\n%s", f, d)
	}
	n.marked(f)
}

// marked checks that every mark is in force exactly once.
func (n *testNode) marked(f rules.Family) {
	n.t.Helper()
	probed, err := n.Probe(n.t.Context(), f, n.job.Marks.Places(f, canary.DefaultChain))
	must(n.t, err)
	if got := n.job.Marks.Verdicts(f, canary.DefaultChain, probed); !n.job.Marks.Standing(f, canary.DefaultChain, probed) || len(got) != 3 {
		n.t.Errorf("%s: marks are %v\n%s", f, got, n.Save(f))
	}
	witnesses := 0
	for _, mark := range tableid.Of(n.job.Marks, f) {
		witnesses += len(mark.Witnessed)
	}
	if got := strings.Count(n.Save(f), "canaryd-witness:"); got != witnesses {
		n.t.Errorf("%s: %d witnesses stand, want %d", f, got, witnesses)
	}
}

// verdicts returns the verdicts that a replay acted on.
func verdicts(fr FamilyResult) map[rules.TableName]canary.Verdict {
	v := map[rules.TableName]canary.Verdict{}
	for table, tr := range fr.Tables {
		v[table] = tr.Finding.Verdict
	}
	return v
}

// flushAll runs iptables -F in every table.
func (n *testNode) flushAll(f rules.Family) {
	n.t.Helper()
	for _, table := range protect.Always() {
		must(n.t, n.Flush(f, table, ""))
	}
}

// withoutForeign returns a text without the others' rules that a flush removed.
func withoutForeign(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		foreign := false
		for _, r := range foreignRules {
			foreign = foreign || line == r+"\n" && r[0] == '-'
		}
		if !foreign {
			b.WriteString(line)
		}
	}
	return b.String()
}
