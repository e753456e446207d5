package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// manifest is a small cluster: one service with one endpoint in each family.
func manifest(endpoint4, endpoint6 string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Node
metadata: {name: node-a}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: web}
spec:
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, "fd00:96::20"]
  ipFamilies: [IPv4, IPv6]
  ports:
  - {port: 80, protocol: TCP}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-4, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080, protocol: TCP}]
endpoints: [{addresses: [%q], nodeName: node-a}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-6, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
ports: [{name: "", port: 8080, protocol: TCP}]
endpoints: [{addresses: [%q], nodeName: node-a}]
`, endpoint4, endpoint6)
}

// declare writes the manifest as editors do: a new file, renamed into place.
func declare(n *nodetest.Node, text string) {
	n.Helper()
	n.Must(os.MkdirAll("/run/manifest", 0o755))
	next := filepath.Join("/run/manifest", ".next")
	n.Must(os.WriteFile(next, []byte(text), 0o600))
	n.Must(os.Rename(next, "/run/manifest/cluster.yaml"))
}

// holds reports whether a protected rule contains text.
func holds(n *nodetest.Node, text string) bool {
	n.Helper()
	return slices.ContainsFunc(n.Protected(), func(l string) bool { return strings.Contains(l, text) })
}

// shows waits until a protected rule contains text, or none does.
func shows(n *nodetest.Node, text string, want bool) {
	n.Helper()
	n.Until(fmt.Sprintf("%q in the rules: %t", text, want), func() error {
		if got := holds(n, text); got != want {
			return fmt.Errorf("it is %t", got)
		}
		return nodetest.Ready()
	})
}

// TestManifest: with a declared source canaryd is the owner. It writes the rules
// into empty tables, and follows the files. If a file is broken it keeps the last
// good rules. It repairs flushes and drift alike.
func TestManifest(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		declare(n, manifest("10.1.0.5", "fd00:10::5"))
		n.Must(os.MkdirAll("/run/rules.d", 0o755))
		n.Must(os.WriteFile("/run/rules.d/corp.v4", []byte("*filter\n:CORP-GUARD - [0:0]\n-A FORWARD -j CORP-GUARD\n-A CORP-GUARD -s 192.0.2.0/24 -j DROP\nCOMMIT\n"), 0o600))
		flags := []string{"--source=manifest", "--manifest=/run/manifest", "--rules-dir=/run/rules.d"}
		d := n.Start(flags...)
		shows(n, "--to-destination 10.1.0.5:8080", true)
		shows(n, "--to-destination [fd00:10::5]:8080", true)
		corp := func() bool {
			return slices.ContainsFunc(n.Foreign(), func(l string) bool { return strings.HasSuffix(l, "CORP-GUARD 0000 -s 192.0.2.0/24 -j DROP") })
		}
		if !corp() {
			n.Error("the operator's own rules are not there")
		}
		if flushes := n.Status().Flushes; len(flushes) > 0 {
			n.Errorf("writing what is declared is reported as %d flushes", len(flushes))
		}

		declare(n, manifest("10.1.0.6", "fd00:10::6"))
		shows(n, "--to-destination 10.1.0.6:8080", true)
		shows(n, "--to-destination [fd00:10::6]:8080", true)
		shows(n, "10.1.0.5", false)

		before := n.Protected()
		declare(n, "apiVersion: v1\nkind: Service\nmetadata: {name: [\n")
		n.Until("the broken manifest to be counted", func() error {
			if !strings.Contains(n.Get("/metrics"), `canaryd_source_errors_total{source="manifest"} 1`) {
				return errors.New("it is not")
			}
			return nil
		})
		d.WantLog("cluster.yaml")
		n.Same("rules next to a broken manifest", before, n.Protected())
		declare(n, manifest("10.1.0.6", "fd00:10::6"))

		n.Flush()
		n.Healed(1)
		n.Same("rules after a flush", before, n.Protected())
		if !corp() {
			n.Error("the operator's own rules did not come back")
		}

		records := len(n.Status().Flushes)
		n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-I KUBE-SERVICES -j RETURN\nCOMMIT\n"))
		if r := n.Healed(records + 1); r.Kind != "drifted" {
			n.Errorf("a stranger's rule inside a claimed chain is %s, want drifted", r.Kind)
		}
		n.Same("rules after drift", before, n.Protected())
		d.Stop()
		n.Same("rules after SIGTERM", before, n.Protected())
	})
}

// TestManifestRefuses: canaryd refuses to start, because two owners of one chain
// would undo each other for ever.
func TestManifestRefuses(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load() // kube-proxy is at work here
		declare(n, manifest("10.1.0.5", "fd00:10::5"))
		flags := []string{"--source=manifest", "--manifest=/run/manifest"}
		_, stderr := n.Want(2, "run", flags...)
		if !strings.Contains(stderr, "KUBE-PROXY-CANARY") {
			n.Errorf("the refusal does not say why: %s", stderr)
		}
		n.Must(os.WriteFile("/run/manifest/more.yaml", []byte(manifest("10.1.0.5", "fd00:10::5")), 0o600))
		d := n.Launch(append(flags, "--hostname-override=node-a")...)
		notReady(n, "manifest cannot be used because of /run/manifest")
		d.WantLog("more.yaml")
		d.WantLog("shop/web")
	})
}

// notReady waits until the daemon gives that reason for not being ready.
func notReady(n *nodetest.Node, why string) {
	n.Helper()
	n.Until("canaryd not to be ready because "+why, func() error {
		if err := nodetest.Ready(); err == nil || !strings.Contains(err.Error(), why) {
			return fmt.Errorf("ready: %w", err)
		}
		return nil
	})
}

// TestRenderManifest: render needs no kernel, and its output can be restored.
func TestRenderManifest(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		declare(n, manifest("10.1.0.5", "fd00:10::5"))
		for _, f := range n.Families {
			text, _ := n.Want(0, "render", "--source=manifest", "--manifest=/run/manifest", "--ip-family="+f.String())
			tool := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[f] + string(n.Programs.With) + "-restore"
			nstest.CommandInput(n.T, text, tool)
			again, _ := n.Want(0, "render", "--source=manifest", "--manifest=/run/manifest", "--ip-family="+f.String())
			if again != text {
				n.Error("the same objects give other text the second time")
			}
		}
		if !holds(n, "--to-destination 10.1.0.5:8080") {
			n.Error("what was loaded does not lead to the endpoint")
		}
	})
}

// TestDeclaredRuleIsRefused: the kernel refuses one of the operator's rules. Only
// that rule's table may be missing, and render --check must name file and line
// before. TestEveryFaceSaysOfADecision checks each face.
func TestDeclaredRuleIsRefused(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Must(os.MkdirAll("/run/rules.d", 0o755))
		const nat = "*nat\n:CORP-NAT - [0:0]\n-A CORP-NAT -j RETURN\n-A PREROUTING -j CORP-NAT\nCOMMIT\n"
		const filter = "*filter\n:CORP-GUARD - [0:0]\n-A FORWARD -j CORP-GUARD\n-A CORP-GUARD -s 192.0.2.0/24 -j DROP\n"
		const bad = "-A CORP-GUARD -j NOSUCH\n"
		write := func(text string) {
			n.Must(os.WriteFile("/run/rules.d/.corp.v4", []byte(text), 0o600))
			n.Must(os.Rename("/run/rules.d/.corp.v4", "/run/rules.d/corp.v4"))
		}
		write(nat + filter + bad + "COMMIT\n")
		flags := []string{"--rules-dir=/run/rules.d", "--backend=" + string(n.Programs.With)}
		stdout, stderr := n.Want(1, "render", append(flags, "--check")...)
		if !strings.Contains(stdout, "1 declared rules are refused") || !strings.Contains(stderr, "/run/rules.d/corp.v4:10: ipv4 filter -A CORP-GUARD -j NOSUCH") {
			n.Errorf("render --check says %s%s", stdout, stderr)
		}

		n.Launch("--rules-dir=/run/rules.d")
		notReady(n, "ipv4 filter is not as declared: /run/rules.d/corp.v4:10 is refused")
		n.Want(1, "restore")
		foreign := strings.Join(n.Foreign(), "\n")
		if !strings.Contains(foreign, "CORP-NAT") || strings.Contains(foreign, "CORP-GUARD") {
			n.Errorf("want nat as declared, and nothing in filter:\n%s", foreign)
		}

		write(nat + filter + "COMMIT\n")
		n.Until("the node to be healthy", nodetest.Ready)
		if !strings.Contains(strings.Join(n.Foreign(), "\n"), "CORP-GUARD") {
			n.Error("the mended rules are not there")
		}
		n.Want(0, "render", append(flags, "--check")...)
		n.Want(0, "check")
	})
}
