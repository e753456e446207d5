package owners

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// ownersStories are about the normal work of owners of protected rules.
func ownersStories() []story {
	many := testkit.Size(100, 5000)
	return []story{
		{
			name: "an owner commits 100 times a second", busy: true,
			prepare: func(n *nodetest.Node, _ *story) []string { services(n, testkit.Size(100, 1000)); return nil }, happens: storm,
		},
		{
			name: fmt.Sprintf("kube-proxy --cleanup at %d services", many), quiet: grace, busy: testkit.IsLarge(),
			prepare: func(n *nodetest.Node, s *story) []string { return control(n, s, many) }, happens: cleanup,
		},
		{
			name: "Docker deletes and inserts its jumps", quiet: grace, protect: []string{"DOCKER*"},
			prepare: docker, happens: rewriteJumps,
		},
		lastPod(),
	}
}

// services writes the rules of a node with count IPv4 services.
func services(n *nodetest.Node, count int) {
	n.Helper()
	parts := scenario.Node(rules.IPv4, "v4-medium")
	for i := range parts {
		if parts[i].Name == "kube-proxy" {
			parts[i].Text = descending(n.Services(count))
		}
	}
	n.Must(scenario.LoadParts(n.Context(), n.Programs, rules.IPv4, parts))
	n.Must(scenario.Load(n.Context(), n.Programs, rules.IPv6))
}

// descending sorts the declarations of chains, so that iptables-nft-restore takes
// 2 s for 5,000 services instead of 7 s. The resulting rules are the same.
func descending(text string) string {
	var sorted, declared []string
	flush := func() {
		slices.Sort(declared)
		slices.Reverse(declared)
		sorted = append(sorted, declared...)
		declared = nil
	}
	for line := range strings.Lines(text) {
		if line[0] == ':' {
			declared = append(declared, line)
			continue
		}
		flush()
		sorted = append(sorted, line)
	}
	return strings.Join(sorted, "")
}

// program returns a program's name, such as "ip6tables-legacy-restore".
func program(n *nodetest.Node, family rules.Family, suffix string) string {
	base := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[family]
	return base + string(n.Programs.With) + suffix
}

// run runs iptables, which must not fail.
func run(n *nodetest.Node, family rules.Family, table rules.TableName, args ...string) string {
	n.Helper()
	return nstest.Command(n.T, program(n, family, ""), append([]string{"-w", "5", "-t", string(table)}, args...)...)
}

// everything returns all chains and rules but canaryd's own.
func everything(n *nodetest.Node) []string {
	n.Helper()
	return n.Lines(
		func(_ rules.TableName, name string) bool { return name != canary.DefaultChain },
		func(r rules.Rule) bool { return !canary.IsMark(r) })
}

// control returns the rules that kube-proxy's cleanup leaves on a node without
// canaryd, the same for any number of services. Then it writes the node's rules.
// If more than --jump-grace passes between two changes, canaryd takes a cleanup
// for a flush, as docs/guarantees.md says. So on a machine that is busy with
// other tests the grace lasts as long as the whole cleanup. That is 10 ms a
// service, and more if writing the rules is slow.
func control(n *nodetest.Node, s *story, count int) []string {
	n.Helper()
	services(n, 100)
	took, gap := kubeProxyCleanup(n)
	n.Logf("without canaryd the cleanup took %s, with %s at most between two changes", took.Round(time.Millisecond), gap.Round(time.Millisecond))
	left := everything(n)
	n.Must(scenario.Wipe(n.Context(), n.Programs, rules.Families()...))
	start := time.Now()
	services(n, count)
	if needs := max(4*gap, took, 4*time.Since(start), time.Duration(count)*10*time.Millisecond); needs > jumpGrace {
		s.flags = append(s.flags, "--jump-grace="+needs.String())
		s.quiet += needs - jumpGrace
	}
	return left
}

// cleanup runs kube-proxy's cleanup while canaryd watches.
func cleanup(n *nodetest.Node, _ *nodetest.Process) {
	took, gap := kubeProxyCleanup(n)
	n.Logf("the cleanup took %s; %s at most went by between two changes", took.Round(time.Millisecond), gap.Round(time.Millisecond))
}

// jumps are kube-proxy 1.36's, in the order in which its cleanup deletes them.
var jumps = []struct {
	table    rules.TableName
	from, to string
	new      bool // only for new connections
	comment  string
}{
	{rules.Filter, "INPUT", "KUBE-EXTERNAL-SERVICES", true, "kubernetes externally-visible service portals"},
	{rules.Filter, "FORWARD", "KUBE-EXTERNAL-SERVICES", true, "kubernetes externally-visible service portals"},
	{rules.Filter, "INPUT", "KUBE-NODEPORTS", false, "kubernetes health check service ports"},
	{rules.Filter, "FORWARD", "KUBE-SERVICES", true, "kubernetes service portals"},
	{rules.Filter, "OUTPUT", "KUBE-SERVICES", true, "kubernetes service portals"},
	{rules.Filter, "FORWARD", "KUBE-FORWARD", false, "kubernetes forwarding rules"},
	{rules.Filter, "INPUT", "KUBE-PROXY-FIREWALL", true, "kubernetes load balancer firewall"},
	{rules.Filter, "OUTPUT", "KUBE-PROXY-FIREWALL", true, "kubernetes load balancer firewall"},
	{rules.Filter, "FORWARD", "KUBE-PROXY-FIREWALL", true, "kubernetes load balancer firewall"},
	{rules.Nat, "OUTPUT", "KUBE-SERVICES", false, "kubernetes service portals"},
	{rules.Nat, "PREROUTING", "KUBE-SERVICES", false, "kubernetes service portals"},
	{rules.Nat, "POSTROUTING", "KUBE-POSTROUTING", false, "kubernetes postrouting rules"},
}

// kubeProxyCleanup executes the commands of kube-proxy --cleanup in their order.
// It deletes jump by jump with -D. Then each table gets a save, and a restore
// that flushes and deletes its chains. No command may fail.
func kubeProxyCleanup(n *nodetest.Node) (took, gap time.Duration) {
	n.Helper()
	start := time.Now()
	last := start
	changed := func() { gap, last = max(gap, time.Since(last)), time.Now() }
	service := regexp.MustCompile(`^KUBE-(SVC|SVL|SEP|EXT|FW)-`)
	for _, family := range rules.Families() {
		for _, j := range jumps {
			args := []string{"-D", j.from}
			if j.new {
				args = append(args, "-m", "conntrack", "--ctstate", "NEW")
			}
			run(n, family, j.table, append(args, "-m", "comment", "--comment", j.comment, "-j", j.to)...)
			changed()
		}
		for _, c := range []struct {
			table rules.TableName
			fixed []string
		}{
			{rules.Nat, []string{"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING"}},
			{rules.Filter, []string{"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL"}},
		} {
			saved := nstest.Command(n.T, program(n, family, "-save"), "-t", string(c.table))
			var flush, drop strings.Builder
			for line := range strings.Lines(saved) {
				name, _, _ := strings.Cut(strings.TrimPrefix(line, ":"), " ")
				if line[0] == ':' && (service.MatchString(name) || slices.Contains(c.fixed, name)) {
					fmt.Fprintf(&flush, ":%s - [0:0]\n", name)
					fmt.Fprintf(&drop, "-X %s\n", name)
				}
			}
			n.Must(n.Programs.RestoreNoflush(n.Context(), family, fmt.Sprintf("*%s\n%s%sCOMMIT\n", c.table, &flush, &drop)))
			changed()
		}
	}
	return time.Since(start), gap
}

// dockerJumps are Docker 28's, in the order in which it inserts them.
var dockerJumps = []string{"DOCKER-FORWARD", "DOCKER-USER"}

// docker is a node on which Docker runs, too.
func docker(n *nodetest.Node, _ *story) []string {
	n.Load()
	for _, family := range rules.Families() {
		n.Must(n.Programs.RestoreNoflush(n.Context(), family, `*filter
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
-I FORWARD -j DOCKER-FORWARD
-I FORWARD -j DOCKER-USER
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-USER -i eth7 -j DROP
COMMIT
`))
	}
	return everything(n)
}

// rewriteJumps does the same as Docker at a start or reload.
func rewriteJumps(n *nodetest.Node, _ *nodetest.Process) {
	for round := range 20 {
		for _, family := range rules.Families() {
			for _, chain := range dockerJumps {
				run(n, family, rules.Filter, "-D", "FORWARD", "-j", chain)
				if round == 10 {
					testkit.Pass(n.T, jumpGrace/5, "how long a busy machine lacks the jump")
				}
				run(n, family, rules.Filter, "-I", "FORWARD", "-j", chain)
			}
		}
	}
}
