package reload

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// newMarkNode returns a node that learned the text, in which some rules need the ipset bad.
func newMarkNode(t *testing.T, backend iptables.Backend, text string) *testNode {
	t.Helper()
	n := &testNode{Fake: iptablestest.NewFake(backend, v4), t: t, before: map[rules.Family]string{}}
	n.Sets().Put(setBad)
	n.replayer = Replayer{Kernel: n.Fake, Canary: canary.DefaultChain, Protection: rules.Protection{Chain: protects}, Supplier: n.Sets()}
	n.job = Job{Families: []rules.Family{v4}, Generation: rules.Generation{}, Sets: map[string]iptables.Set{}}
	must(t, n.RestoreNoflush(v4, text))
	snapshot, err := n.Fake.Read(t.Context(), v4)
	must(t, err)
	for _, table := range protect.Always() {
		n.job.Generation = n.job.Generation.With(v4.Table(table), n.replayer.Protection.Extract(snapshot.Tables[table], canary.IsMark))
	}
	result, err := n.replayer.Plant(t.Context(), n.job)
	must(t, err)
	n.take(result)
	n.before[v4] = n.content(v4)
	return n
}

// waiting returns the quarantined rules that wait, and the quarantined rules that cannot be
// written.
func (n *testNode) waiting() (waiting, missing []string) {
	for _, list := range n.job.Quarantine {
		for _, h := range list {
			line := "-A " + h.Chain + " " + h.Rule.Spec
			if h.Waits {
				waiting = append(waiting, line)
			} else {
				missing = append(missing, line)
			}
		}
	}
	slices.Sort(waiting)
	return waiting, missing
}

// inFilter returns a table filter with a jump from FORWARD to KUBE-FORWARD.
func inFilter(lines ...string) string {
	return "*filter\n:FORWARD DROP [0:0]\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
}

const (
	markBad       = "-m set --match-set bad src -j MARK --set-xmark 0x8000/0x8000"
	markDropNat   = "*nat\n:KUBE-MARK-DROP - [0:0]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000\n-A KUBE-SERVICES -m set --match-set bad src -j KUBE-MARK-DROP\nCOMMIT\n"
	firewall      = ":KUBE-FIREWALL - [0:0]\n-I FORWARD -j KUBE-FIREWALL\n-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP"
	masqueradeNat = "*nat\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000\n-A KUBE-SERVICES -m set --match-set bad src -j KUBE-MARK-MASQ\n-A KUBE-SERVICES -p tcp -j DNAT --to-destination 10.0.0.1\n" +
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\nCOMMIT\n"
	masqueradeOld = "*nat\n:KUBE-POSTROUTING - [0:0]\n-A POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A KUBE-POSTROUTING -m set --match-set bad src -j MARK --set-xmark 0x4000/0x4000\n-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE\n-A KUBE-POSTROUTING -s 10.0.0.0/8 -j MASQUERADE\nCOMMIT\n"
)

// markTests have a rule that marks packets and cannot be written, and the rules that wait for it.
var markTests = []struct {
	name string
	text string
	wait []string
}{
	{"a DROP in the same chain looks for the mark", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark --mark 0x8000/0x8000 -j DROP", "-A KUBE-FORWARD -j ACCEPT"),
		[]string{"-A KUBE-FORWARD -j ACCEPT"}},
	{"a RETURN looks for the mark", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark --mark 0x8000/0x8000 -j RETURN", "-A KUBE-FORWARD -j ACCEPT"),
		[]string{"-A KUBE-FORWARD -j ACCEPT"}},
	{"an ACCEPT looks for packets without the mark", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark ! --mark 0x8000/0x8000 -j ACCEPT"),
		[]string{"-A KUBE-FORWARD -m mark ! --mark 0x8000/0x8000 -j ACCEPT"}},
	{"a RETURN before a DROP looks for packets without the mark",
		inFilter(":KUBE-A - [0:0]", "-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -j KUBE-A", "-A KUBE-FORWARD -j ACCEPT", "-A KUBE-A -m mark ! --mark 0x8000/0x8000 -j RETURN", "-A KUBE-A -j DROP"),
		[]string{"-A KUBE-FORWARD -j ACCEPT"}},
	{"a rule clears the mark", inFilter("-A KUBE-FORWARD -m set --match-set bad src -j MARK --set-xmark 0x0/0xf0000", "-A KUBE-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT"),
		[]string{"-A KUBE-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT"}},
	{"another rule marks packets with that mark", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark --mark 0x8000/0x8000 -j MARK --set-xmark 0x1/0x1",
		"-A KUBE-FORWARD -m mark --mark 0x1/0x1 -j DROP", "-A KUBE-FORWARD -j ACCEPT"),
		[]string{"-A KUBE-FORWARD -j ACCEPT"}},
	{"a chain marks packets for another table", markDropNat + inFilter(firewall, "-A KUBE-FORWARD -j ACCEPT"), []string{"-A FORWARD -j KUBE-FORWARD"}},
	{"a connection's mark is restored in a third table",
		"*mangle\n:KUBE-M - [0:0]\n-A PREROUTING -j KUBE-M\n-A KUBE-M -j CONNMARK --restore-mark --nfmask 0x8000 --ctmask 0x8000\nCOMMIT\n" +
			"*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -m set --match-set bad src -j CONNMARK --set-xmark 0x8000/0x8000\nCOMMIT\n" +
			inFilter(firewall, "-A KUBE-FORWARD -j ACCEPT"), []string{"-A FORWARD -j KUBE-FORWARD"}},
	{"the masquerade looks for packets without the mark", masqueradeNat + inFilter("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT", "-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"), nil},
	{"the masquerade looks for the mark", masqueradeOld, nil},
	{"the masquerade's mark is cleared behind a missing rule",
		"*nat\n:KUBE-POSTROUTING - [0:0]\n-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -m set --match-set bad src -j RETURN\n" +
			"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully\nCOMMIT\n" +
			inFilter("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT"),
		[]string{"-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0", "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"}},
	{"a connection's mark is set in nat's POSTROUTING",
		"*mangle\n:KUBE-M - [0:0]\n-A PREROUTING -j KUBE-M\n-A KUBE-M -j CONNMARK --restore-mark --nfmask 0x8000 --ctmask 0x8000\nCOMMIT\n" +
			"*nat\n:KUBE-POSTROUTING - [0:0]\n-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -m set --match-set bad src -j CONNMARK --set-xmark 0x8000/0x8000\nCOMMIT\n" +
			inFilter(firewall, "-A KUBE-FORWARD -j ACCEPT"), []string{"-A FORWARD -j KUBE-FORWARD"}},
	{"packets without the mark are rejected", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark ! --mark 0x8000/0x8000 -j REJECT --reject-with icmp-port-unreachable", "-A KUBE-FORWARD -j ACCEPT"), nil},
	{"the missing rule looks for its own mark", inFilter("-A KUBE-FORWARD -m mark ! --mark 0x18000/0x18000 -m set --match-set bad src -j MARK --set-xmark 0x18000/0x18000",
		"-A KUBE-FORWARD -m mark --mark 0x18000/0x18000 -j ACCEPT"), nil},
	{"no rule looks for the mark", inFilter("-A KUBE-FORWARD "+markBad, "-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j DROP", "-A KUBE-FORWARD -j ACCEPT"), nil},
}

// TestRulesWaitForOneThatMarksPackets: a rule that marks packets cannot be written. In every table,
// exactly those rules wait that would let packets in without the mark.
func TestRulesWaitForOneThatMarksPackets(t *testing.T) {
	for _, test := range markTests {
		t.Run(test.name, func(t *testing.T) {
			for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
				t.Run(string(backend), func(t *testing.T) {
					n := newMarkNode(t, backend, test.text)
					n.flushAll(v4)
					n.Sets().Destroy("bad")
					n.takeHeld(n.heal())
					waiting, missing := n.waiting()
					if d := cmp.Diff(test.wait, waiting); d != "" {
						t.Errorf("rules that wait (-want +got):\n%s%v", d, n.job.Quarantine)
					}
					if d := cmp.Diff(onlyLost(n.before[v4], slices.Concat(test.wait, missing)...), n.content(v4)); d != "" || len(missing) != 1 {
						t.Errorf("missing %v (-want +got):\n%s", missing, d)
					}
					n.Sets().Put(setBad)
					result, err := n.replayer.Readmit(t.Context(), n.job)
					must(t, err)
					n.take(result)
					n.outcome(result, v4, Proved)
					n.same(v4)
				})
			}
		})
	}
}

// TestATableThatIsFlushedLaterWaitsForAMarkOfAnother: nat was flushed before, and its rule that
// marks packets is quarantined. Then filter is flushed, and a jump of it waits.
func TestATableThatIsFlushedLaterWaitsForAMarkOfAnother(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			n := newMarkNode(t, backend, markDropNat+inFilter(firewall, "-A KUBE-FORWARD -j ACCEPT"))
			n.Sets().Destroy("bad")
			for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
				must(t, n.Flush(v4, table, ""))
				n.takeHeld(n.heal())
			}
			waiting, _ := n.waiting()
			if d := cmp.Diff([]string{"-A FORWARD -j KUBE-FORWARD"}, waiting); d != "" {
				t.Errorf("rules that wait (-want +got):\n%s", d)
			}
		})
	}
}

// A misfitKernel has a built-in chain of nat into which iptables must not write rules.
type misfitKernel struct{ *iptablestest.Fake }

func (k misfitKernel) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := k.Fake.Begin(ctx)
	return misfitSession{s}, err
}

type misfitSession struct{ iptables.Session }

func (s misfitSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	snapshot, err := s.Session.Read(ctx, f)
	snapshot.Misfits = map[iptables.Place]error{{Table: rules.Nat, Chain: "PREROUTING"}: errors.New("another hook")}
	return snapshot, err
}

// TestRulesWaitForMarksOfATableThatIsLeftAlone: nothing is written to nat, whose rules mark packets
// that filter drops. No rule waits for the masquerade's marks, which kube-proxy clears in
// POSTROUTING.
func TestRulesWaitForMarksOfATableThatIsLeftAlone(t *testing.T) {
	for _, test := range []struct {
		name, text string
		wait       []string
	}{
		{"packets to drop", markDropNat + inFilter(firewall, "-A KUBE-FORWARD -j ACCEPT"), []string{"-A FORWARD -j KUBE-FORWARD"}},
		{"packets to masquerade", masqueradeNat + inFilter("-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT"), nil},
	} {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			t.Run(test.name+"/"+string(backend), func(t *testing.T) {
				n := newMarkNode(t, backend, test.text)
				n.flushAll(v4)
				n.replayer.Kernel = misfitKernel{n.Fake}
				n.takeHeld(n.heal())
				waiting, _ := n.waiting()
				if d := cmp.Diff(test.wait, waiting); d != "" {
					t.Errorf("rules that wait (-want +got):\n%s", d)
				}
				n.replayer.Kernel = n.Fake
				n.takeHeld(n.heal())
				result, err := n.replayer.Readmit(t.Context(), n.job)
				must(t, err)
				n.take(result)
				n.same(v4)
			})
		}
	}
}
