package owners

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/golden"
)

const troubleshootDoc = "../../docs/troubleshoot.md"

// A product is a row of the tables of products in docs/troubleshoot.md.
type product struct {
	name string
	// owners write its rules. Their rows in the table of owners have the word of --protect.
	owners []string
	// flushes describes the flush of a product that is no owner.
	flushes string
	// remark has the words that users search for, and hints.
	remark string
}

// products are the rows of owners, in their order.
var products = []product{
	{name: "Docker, Swarm, ufw-docker", owners: []string{"docker"}, remark: "`No chain/target/match by that name`"},
	{name: "podman, netavark", owners: []string{"podman"}},
	{name: "Kubernetes, kube-proxy", owners: []string{"kube-proxy", "kubelet"}},
	{name: "hostPort, portmap, Multus", owners: []string{"portmap", "ipmasq", "firewall"}},
	{name: "k3s", owners: []string{"kube-proxy", "flannel", "kube-router", "portmap"}},
	{name: "RKE2, Canal", owners: []string{"kube-proxy", "calico", "flannel", "portmap"}, remark: "Nodes become NotReady."},
	{name: "MicroK8s", owners: []string{"microk8s", "kube-proxy", "calico"}},
	{name: "OpenShift, OKD, CRI-O, MicroShift", owners: []string{"crio", "ovn-kubernetes", "openshift-sdn"}, remark: "Router ports 80 and 443 fail."},
	{name: "EKS, amazon-vpc-cni", owners: []string{"aws-node"}},
	{name: "GKE, ip-masq-agent", owners: []string{"ip-masq-agent"}, remark: "Pods' addresses leave the cluster."},
	{name: "Istio ambient", owners: []string{"istio"}},
	{name: "NodeLocal DNSCache", owners: []string{"node-local-dns"}, remark: "DNS fails or is slow."},
	{name: "kube2iam, kiam", owners: []string{"kube2iam"}},
	{name: "systemd-networkd, systemd-nspawn", owners: []string{"networkd"}},
	{name: "Antrea, Calico, Cilium, CrowdSec, fail2ban, flannel, Incus, kube-ovn, kube-router, libvirt, LXD, Tailscale, Weave Net", remark: "Use the product's own word.",
		owners: []string{"antrea", "calico", "cilium", "crowdsec", "fail2ban", "flannel", "incus", "kube-ovn", "kube-router", "libvirt", "lxd", "tailscale", "weave"}},
	{name: "wg-quick, PostUp, your own script", owners: []string{"wg-quick"}, remark: "`canaryd detect` prints [the words](presets.md#words-that-detect-proposes). `PostDown` still works."},
}

// flushers are the rows of programs that flush others' rules and have no word.
var flushers = []product{
	{name: "Puppet (puppetlabs-firewall)", flushes: "purges rules with `iptables -D`", remark: "Set `purge => false`, or `ignore` for others' chains. canaryd recognizes [most purges](measured.md#purges)."},
	{name: "Ansible, hardening scripts", flushes: "`iptables -F`, policies to DROP", remark: "Its own rules stay next to the replayed ones."},
	{name: "CSF", flushes: "`csf -r`, hundreds of commands", remark: "canaryd replays after the last command."},
	{name: "ferm, iptables-services, netfilter-persistent, Shorewall", flushes: "tables of its saved file", remark: "canaryd replaces old copies of others' rules."},
	{name: "firewalld", flushes: "all tables at start, reload and stop", remark: "Its direct rules land above the jumps."},
	{name: "ufw", flushes: "own rules; whole tables with `MANAGE_BUILTINS=yes`", remark: "With that, set [`--settle`](measured.md#a-replay-between-two-commands)."},
	{name: "nftables.service", flushes: "`flush ruleset`, all of nft", remark: "iptables-legacy keeps its rules."},
}

// TestProducts: the tables of products in docs/troubleshoot.md must match the table of owners, and
// lead to each owner. With -update the test writes them again.
func TestProducts(t *testing.T) {
	has, err := os.ReadFile(troubleshootDoc)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := "<!-- products: go test ./pkg/owners -update -->\n", "<!-- end -->\n"
	before, rest, begun := strings.Cut(string(has), begin)
	_, after, ended := strings.Cut(rest, end)
	if !begun || !ended {
		t.Fatalf("%s lacks the lines between which the table is:\n%s%s", troubleshootDoc, begin, end)
	}
	text := before + begin + productTable() + end + after
	if golden.Update() {
		if err := os.WriteFile(troubleshootDoc, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		has = []byte(text)
	}
	if diff := cmp.Diff(text, string(has)); diff != "" {
		t.Errorf("%s is not made from the table of owners (-table +document); -update writes it:\n%s", troubleshootDoc, diff)
	}
	for _, o := range All() {
		if !slices.ContainsFunc(products, func(p product) bool { return slices.Contains(p.owners, o.Name) }) {
			t.Errorf("no row leads to %s", o.Name)
		}
	}
}

func productTable() string {
	var b strings.Builder
	b.WriteString("| product | word, remark |\n|---|---|\n")
	for _, p := range products {
		var presets, words []string
		for _, name := range p.owners {
			if o := row(name); o.Preset != "" {
				presets = append(presets, o.Preset)
			} else {
				words = append(words, wordsFor(o))
			}
		}
		if len(presets) > 0 {
			words = append([]string{code(strings.Join(distinct(presets), ","))}, words...)
		}
		cell := strings.Join(words, ", ")
		if p.remark != "" {
			cell += ". " + p.remark
		}
		fmt.Fprintf(&b, "| %s | %s |\n", p.name, cell)
	}
	b.WriteString("\nFirewall managers have no word. canaryd replays others' rules that they flush:\n\n")
	b.WriteString("| manager | flushes |\n|---|---|\n")
	for _, m := range flushers {
		fmt.Fprintf(&b, "| %s | %s. %s |\n", m.name, m.flushes, m.remark)
	}
	return b.String()
}

// distinct returns each value once, at its first place.
func distinct(values []string) []string {
	var all []string
	for _, v := range values {
		if !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return all
}
