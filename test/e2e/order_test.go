package e2e

import (
	"errors"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// orderRules has chains in which a rule decides about the loopback before the
// others. Its ipset is missing after the flush, and canaryd does not know the
// members.
const orderRules = `*nat
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.1/32 -j RETURN
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m set --match-set stays src -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x8/0x8
-A KUBE-POSTROUTING -j MASQUERADE
COMMIT
*filter
:INPUT DROP [0:0]
:KUBE-FIREWALL - [0:0]
-A INPUT -i lo -p tcp -m multiport --ports 9475,18081 -j ACCEPT
-A INPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -p tcp -m tcp --dport 18083 -m set --match-set stays dst -j DROP
-A KUBE-FIREWALL -i lo -j ACCEPT
COMMIT
`

// orderPorts are three ports: always open, opened by the rules, and kept shut by
// them.
type orderPorts struct{ always, opened, shut bool }

// listen opens three ports, and returns a function that checks which of them
// answer.
func listen(n *nodetest.Node) (answers func() orderPorts) {
	n.Helper()
	for _, address := range []string{"127.0.0.1:18081", "127.0.0.1:18082", "127.0.0.1:18083"} {
		listener, err := net.Listen("tcp", address)
		n.Must(err)
		n.Cleanup(func() { _ = listener.Close() })
	}
	answer := func(port string, within time.Duration) bool {
		conn, err := net.DialTimeout("tcp", "127.0.0.1:"+port, within)
		if err != nil {
			return false
		}
		_ = conn.Close()
		return true
	}
	return func() orderPorts {
		return orderPorts{answer("18081", 5*time.Second), answer("18082", time.Second), answer("18083", time.Second)}
	}
}

// keepOpen writes the rules of others that canaryd does not put back after a
// flush. Without them the test's own packets would be dropped.
func keepOpen(n *nodetest.Node) {
	n.Helper()
	restoreText(n, "*filter\n-I INPUT -i lo -p tcp -m multiport --ports 9475,18081 -j ACCEPT\nCOMMIT\n")
}

// TestNoRuleIsWrittenBehindARuleThatCannotBeHad: a flush also takes an ipset. The
// MASQUERADE after a RETURN and the ACCEPT after a DROP must wait. So connections
// over the loopback work as after the flush alone, and a port that the rules kept
// shut stays shut. Once the set is back, the rules must be back.
func TestNoRuleIsWrittenBehindARuleThatCannotBeHad(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		ipset := func(args ...string) {
			n.Helper()
			if out, err := exec.CommandContext(n.Context(), "ipset", args...).CombinedOutput(); err != nil {
				n.Fatalf("ipset %q: %v: %s", args, err, out)
			}
		}
		ipset("create", "stays", "hash:ip", "comment")
		ipset("add", "stays", "127.0.0.1", "comment", "a\nnewline") // so that canaryd cannot keep it
		restoreText(n, orderRules)
		answers := listen(n)
		want := n.Protected()
		if got := answers(); got != (orderPorts{true, true, false}) {
			n.Fatalf("before the flush these ports answer: %+v", got)
		}
		p := n.Start("--ip-family=ipv4")
		n.Until("the sets to be read", logs(p, "Some ipsets that protected rules name are not stored"))
		p.WantLog("Some ipsets that protected rules name are not stored", "stays")
		n.Want(0, "pause") // so that the set is deleted before canaryd answers
		for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
			tool(n, rules.IPv4, "-t", string(table), "-F")
		}
		ipset("destroy", "stays")
		keepOpen(n)
		flushed := answers()
		if flushed != (orderPorts{true, false, false}) {
			n.Errorf("after the flush these ports answer: %+v", flushed)
		}
		n.Want(0, "resume")
		n.PartlyHealed(1)
		if got := answers(); got != flushed {
			n.Errorf("after the replay these ports answer: %+v, want %+v as with the flush alone", got, flushed)
		}
		n.Same("after the replay", slices.DeleteFunc(slices.Clone(want), func(line string) bool {
			return strings.Contains(line, "KUBE-POSTROUTING 0") || strings.Contains(line, "KUBE-FIREWALL 0")
		}), n.Protected())
		stdout, _ := n.Want(1, "status")
		for _, line := range []string{
			"NOT healthy: 5 rules were lost and could not be put back: ipv4 nat is partial, ipv4 filter is partial\n",
			"quarantined: ipv4 nat: rule KUBE-POSTROUTING -m set --match-set stays src -j RETURN (ipset stays is missing",
			`waiting: ipv4 nat KUBE-POSTROUTING: 2 rules wait behind "-m set --match-set stays src -j RETURN" of KUBE-POSTROUTING, which cannot be put back`,
			`waiting: ipv4 filter KUBE-FIREWALL: 1 rule waits behind "-p tcp -m tcp --dport 18083 -m set --match-set stays dst -j DROP" of KUBE-FIREWALL`,
		} {
			if !strings.Contains(stdout, line) {
				n.Errorf("status lacks %q:\n%s", line, stdout)
			}
		}
		n.Want(1, "check")
		p.WantLog("Rules of a chain wait", "KUBE-POSTROUTING", "rules=2")

		ipset("create", "stays", "hash:ip")
		ipset("add", "stays", "127.0.0.1")
		n.Until("the last rules to come back", func() error { return sameLines(want, n.Protected()) })
		if record := n.Healed(1); record.Outcome != "proved" {
			n.Errorf("the record ends %s", record.Outcome)
		}
		n.Want(0, "status")
		if got := answers(); got != (orderPorts{true, true, false}) {
			n.Errorf("in the end these ports answer: %+v", got)
		}
		p.Stop()
		// Without the wait this would have happened.
		tool(n, rules.IPv4, "-t", "nat", "-D", "KUBE-POSTROUTING", "1")
		tool(n, rules.IPv4, "-D", "KUBE-FIREWALL", "1")
		if got := answers(); got.always || !got.shut && got.opened {
			n.Errorf("without the RETURN and the DROP these ports answer: %+v", got)
		}
	})
}

// sameLines returns an error that lists got unless it equals want.
func sameLines(want, got []string) error {
	if !slices.Equal(want, got) {
		return errors.New(strings.Join(got, "\n"))
	}
	return nil
}
