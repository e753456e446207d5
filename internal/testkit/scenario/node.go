// Package scenario has the flushes that canaryd must survive, the rules that they flush, and the
// comparison of the rules before and after. Tests and the demo share it.
//
// [Load] writes the rules of a node, and [LoadOwners] those of other programs. After a flush
// [Tables] reads the tables, and [Compare] returns a line for each difference from the wanted
// rules.
package scenario

import (
	"context"
	"embed"
	"fmt"
	"path"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

//go:embed testdata
var testdata embed.FS

// A Part is one owner's rules of one family, as input of iptables-restore --noflush.
type Part struct {
	Name string
	Text string
}

// Protect is the value of --protect on the node.
var Protect = []string{"kube", "cni"}

// Cases returns the names of the kube-proxy rule sets of one family.
func Cases(family rules.Family) []string {
	if family == rules.IPv6 {
		return []string{"v6-small", "v6-medium"}
	}
	return []string{"v4-small", "v4-medium", "v4-affinity"}
}

// KubeProxy returns the rules that kube-proxy wrote in that case.
func KubeProxy(name string) string { return read("kube-proxy", name, "expected.rules") }

// Node returns the rules of a Kubernetes node, in the order of loading. The node has two
// containers with host ports, and a firewall of its administrator. Its kube-proxy rules are
// those of the named case.
func Node(family rules.Family, kubeProxy string) []Part {
	return []Part{
		node(family, "foreign-first"),
		node(family, "kubelet"),
		{Name: "kube-proxy", Text: KubeProxy(kubeProxy)},
		node(family, "cni"),
		node(family, "foreign-last"),
	}
}

// Load writes a Node of each family: the medium cases.
func Load(ctx context.Context, f Flusher, families ...rules.Family) error {
	for _, family := range families {
		name := "v4-medium"
		if family == rules.IPv6 {
			name = "v6-medium"
		}
		if err := LoadParts(ctx, f, family, Node(family, name)); err != nil {
			return err
		}
	}
	return nil
}

// LoadParts writes parts in their order, with one command, because an execution costs more than
// the rules. Each table of each part has a COMMIT of its own.
func LoadParts(ctx context.Context, f Flusher, family rules.Family, parts []Part) error {
	var text strings.Builder
	var names []string
	for _, part := range parts {
		text.WriteString(part.Text)
		names = append(names, part.Name)
	}
	if err := f.RestoreNoflush(ctx, family, text.String()); err != nil {
		return fmt.Errorf("loading the %s rules of %s: %w", family, strings.Join(names, ", "), err)
	}
	return nil
}

// SavedFilter returns an administrator's saved file with the table filter only.
func SavedFilter(family rules.Family) string { return node(family, "saved-filter").Text }

func node(family rules.Family, name string) Part {
	return Part{Name: name, Text: read("node", name+suffix(family))}
}

// suffix returns the end of the name of a file with a family's rules.
func suffix(family rules.Family) string {
	if family == rules.IPv6 {
		return ".v6.rules"
	}
	return ".v4.rules"
}

func read(elem ...string) string {
	name := path.Join(append([]string{"testdata"}, elem...)...)
	text, err := testdata.ReadFile(name)
	if err != nil {
		panic("scenario: no such rules: " + err.Error()) // embedded, so a mistake in the caller's source
	}
	return string(text)
}

// Owners returns the other programs that write rules to a node, by the names of their presets, in
// the order in which they would start.
func Owners() []string { return []string{"libvirt", "docker", "podman", "tailscale"} }

// TableOwners returns the owners of the table of owners whose rules are written as in their
// sources. These rules need ipsets or matches that not every machine has. Owner returns them.
func TableOwners() []string {
	return []string{
		"antrea", "aws-node", "calico", "cilium", "crio", "crowdsec", "fail2ban", "flannel", "incus", "ip-masq-agent", "istio", "kube-ovn", "kube-router",
		"kube2iam", "lxd", "microk8s", "node-local-dns", "openshift-sdn", "ovn-kubernetes", "swarm", "weave",
	}
}

// NativeOwners returns the owners that write only native tables.
func NativeOwners() []string { return []string{"networkd"} }

// Preset returns the word of --protect for one of the TableOwners. Swarm's is Docker's.
func Preset(owner string) string {
	if owner == "swarm" {
		return "docker"
	}
	return owner
}

// Owner returns the rules of one of the Owners or TableOwners. The text is empty if it writes
// none in that family.
func Owner(family rules.Family, name string) Part {
	text, err := testdata.ReadFile("testdata/owners/" + name + suffix(family))
	if err != nil {
		return Part{Name: name} // not every owner was recorded in both families
	}
	return Part{Name: name, Text: string(text)}
}

// LoadOwners writes the rules of all Owners, between foreign rules.
func LoadOwners(ctx context.Context, f Flusher, families ...rules.Family) error {
	for _, family := range families {
		parts := []Part{node(family, "foreign-first")}
		for _, name := range Owners() {
			if part := Owner(family, name); part.Text != "" {
				parts = append(parts, part)
			}
		}
		if err := LoadParts(ctx, f, family, append(parts, node(family, "foreign-last"))); err != nil {
			return err
		}
	}
	return nil
}
