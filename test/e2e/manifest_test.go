package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/nstest"
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
func (n *node) declare(text string) {
	n.Helper()
	n.must(os.MkdirAll("/run/manifest", 0o755))
	next := filepath.Join("/run/manifest", ".next")
	n.must(os.WriteFile(next, []byte(text), 0o600))
	n.must(os.Rename(next, "/run/manifest/cluster.yaml"))
}

// holds reports whether a protected rule holds text.
func (n *node) holds(text string) bool {
	n.Helper()
	return slices.ContainsFunc(n.protected(), func(l string) bool { return strings.Contains(l, text) })
}

// shows waits until a protected rule holds text, or none does.
func (n *node) shows(text string, want bool) {
	n.Helper()
	n.within(healsIn, fmt.Sprintf("%q in the rules: %t", text, want), func() error {
		if got := n.holds(text); got != want {
			return fmt.Errorf("it is %t", got)
		}
		return ready()
	})
}

// TestManifest: with a declared source canaryd is the owner. It writes the
// rules into empty tables, follows the files, keeps the last good ones when a
// file is broken, and repairs flushes and drift alike.
func TestManifest(t *testing.T) {
	onBoth(t, func(n *node) {
		n.declare(manifest("10.1.0.5", "fd00:10::5"))
		n.must(os.MkdirAll("/run/rules.d", 0o755))
		n.must(os.WriteFile("/run/rules.d/corp.v4", []byte("*filter\n:CORP-GUARD - [0:0]\n-A FORWARD -j CORP-GUARD\n-A CORP-GUARD -s 192.0.2.0/24 -j DROP\nCOMMIT\n"), 0o600))
		flags := []string{"--source=manifest", "--manifest=/run/manifest", "--rules-dir=/run/rules.d"}
		d := n.start(flags...)
		n.shows("--to-destination 10.1.0.5:8080", true)
		n.shows("--to-destination [fd00:10::5]:8080", true)
		corp := func() bool {
			return slices.ContainsFunc(n.foreign(), func(l string) bool { return strings.HasSuffix(l, "CORP-GUARD 0000 -s 192.0.2.0/24 -j DROP") })
		}
		if !corp() {
			n.Error("the operator's own rules are not there")
		}
		if flushes := n.status().Flushes; len(flushes) > 0 {
			n.Errorf("writing what is declared is told as %d flushes", len(flushes))
		}

		n.declare(manifest("10.1.0.6", "fd00:10::6"))
		n.shows("--to-destination 10.1.0.6:8080", true)
		n.shows("--to-destination [fd00:10::6]:8080", true)
		n.shows("10.1.0.5", false)

		before := n.protected()
		n.declare("apiVersion: v1\nkind: Service\nmetadata: {name: [\n")
		n.within(healsIn, "the broken manifest to be counted", func() error {
			if !strings.Contains(n.get("/metrics"), `canaryd_source_errors_total{source="manifest"} 1`) {
				return errors.New("it is not")
			}
			return nil
		})
		d.wantLog("cluster.yaml")
		n.same("rules beside a broken manifest", before, n.protected())
		n.declare(manifest("10.1.0.6", "fd00:10::6"))

		n.flush()
		n.healed(1)
		n.same("rules after a flush", before, n.protected())
		if !corp() {
			n.Error("the operator's own rules did not come back")
		}

		records := len(n.status().Flushes)
		n.must(n.programs.RestoreNoflush(n.Context(), rules.IPv4, "*nat\n-I KUBE-SERVICES -j RETURN\nCOMMIT\n"))
		if r := n.healed(records + 1); r.Kind != "drifted" {
			n.Errorf("a stranger's rule inside a claimed chain is %s, want drifted", r.Kind)
		}
		n.same("rules after drift", before, n.protected())
		d.stop()
		n.same("rules after SIGTERM", before, n.protected())
	})
}

// TestManifestRefuses: two owners of one chain undo each other for ever.
func TestManifestRefuses(t *testing.T) {
	onBoth(t, func(n *node) {
		n.load() // kube-proxy is at work here
		n.declare(manifest("10.1.0.5", "fd00:10::5"))
		flags := []string{"--source=manifest", "--manifest=/run/manifest"}
		_, stderr := n.want(2, "run", flags...)
		if !strings.Contains(stderr, "KUBE-PROXY-CANARY") {
			n.Errorf("the refusal does not say why: %s", stderr)
		}
		n.must(os.WriteFile("/run/manifest/more.yaml", []byte(manifest("10.1.0.5", "fd00:10::5")), 0o600))
		_, stderr = n.want(2, "run", append(flags, "--hostname-override=node-a")...)
		if !strings.Contains(stderr, "more.yaml") || !strings.Contains(stderr, "shop/web") {
			n.Errorf("a service that stands there twice is refused with: %s", stderr)
		}
	})
}

// TestRenderManifest: render needs no kernel, and what it prints loads.
func TestRenderManifest(t *testing.T) {
	onBoth(t, func(n *node) {
		n.declare(manifest("10.1.0.5", "fd00:10::5"))
		for _, f := range n.families {
			text, _ := n.want(0, "render", "--source=manifest", "--manifest=/run/manifest", "--ip-family="+f.String())
			tool := map[rules.Family]string{rules.IPv4: "iptables-", rules.IPv6: "ip6tables-"}[f] + string(n.programs.With) + "-restore"
			nstest.CommandInput(n.T, text, tool)
			again, _ := n.want(0, "render", "--source=manifest", "--manifest=/run/manifest", "--ip-family="+f.String())
			if again != text {
				n.Error("the same objects give other text the second time")
			}
		}
		if !n.holds("--to-destination 10.1.0.5:8080") {
			n.Error("what was loaded does not lead to the endpoint")
		}
	})
}
