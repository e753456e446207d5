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
	// flushes says how a product that is no owner flushes.
	flushes string
	// word names the rules of a product that is no owner.
	word string
	// remark has the words that users search for, and hints.
	remark string
}

// products are the rows of owners, in their order.
var products = []product{
	{name: "Docker, Swarm, ufw-docker", owners: []string{"docker"}, remark: "`No chain/target/match by that name`; [bridges with other names](presets.md#what-the-presets-do-not-take)"},
	{name: "podman, netavark", owners: []string{"podman"}, remark: "By hand: `podman network reload --all`."},
	{name: "Kubernetes, kube-proxy", owners: []string{"kube-proxy", "kubelet"}, remark: "Services time out."},
	{name: "hostPort, portmap, Multus", owners: []string{"portmap", "ipmasq", "firewall"}, remark: "Host ports fail."},
	{name: "k3s", owners: []string{"kube-proxy", "flannel", "kube-router", "portmap"}},
	{name: "RKE2, Canal", owners: []string{"kube-proxy", "calico", "flannel", "portmap"}, remark: "Nodes become NotReady."},
	{name: "MicroK8s", owners: []string{"microk8s", "kube-proxy", "calico"}},
	{name: "OpenShift, OKD, CRI-O, MicroShift", owners: []string{"crio", "ovn-kubernetes", "openshift-sdn"}, remark: "Router ports 80 and 443 fail."},
	{name: "Calico", owners: []string{"calico"}, remark: "Policies open, or pods cut off."},
	{name: "EKS, amazon-vpc-cni", owners: []string{"aws-node"}},
	{name: "GKE, ip-masq-agent", owners: []string{"ip-masq-agent"}, remark: "Pods' addresses leave the cluster."},
	{name: "Istio ambient", owners: []string{"istio"}, remark: "Probes fail."},
	{name: "NodeLocal DNSCache", owners: []string{"node-local-dns"}, remark: "DNS fails or is slow."},
	{name: "kube2iam, kiam", owners: []string{"kube2iam"}, remark: "Pods get the node's role."},
	{name: "systemd-networkd, systemd-nspawn", owners: []string{"networkd"}, remark: "`IPMasquerade=`"},
	{name: "Antrea, Cilium, flannel, kube-ovn, kube-router, Tailscale, Weave Net", owners: []string{"antrea", "cilium", "flannel", "kube-ovn", "kube-router", "tailscale", "weave"}, remark: "The product's own word of these."},
	{name: "Incus, libvirt, LXD", owners: []string{"incus", "libvirt", "lxd"}, remark: "Likewise. Guests lose internet and DHCP."},
	{name: "CrowdSec, fail2ban", owners: []string{"crowdsec", "fail2ban"}, remark: "Likewise. Bans have no effect."},
	{name: "wg-quick, PostUp", owners: []string{"wg-quick"}, remark: "`canaryd detect` prints [the words](presets.md#words-that-detect-proposes). `PostDown` still works."},
	{name: "your own script", word: "`rule:TABLE:CHAIN:GLOB`", remark: "As wg-quick. Or declare chains with `--rules-dir`."},
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

// TestProducts: the tables of products in docs/troubleshoot.md are made from the table of owners, and
// lead to each owner. With -update they are written again.
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
	b.WriteString("| product | word | symptom, remark |\n|---|---|---|\n")
	for _, p := range products {
		word := p.word
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
		if len(words) > 0 {
			word = strings.Join(words, ", ")
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", p.name, word, p.remark)
	}
	b.WriteString("\nFirewall managers have no word. canaryd replays others' rules that they flush:\n\n")
	b.WriteString("| manager | flushes | remark |\n|---|---|---|\n")
	for _, m := range flushers {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", m.name, m.flushes, m.remark)
	}
	return b.String()
}

// distinct returns the values, each where it is first.
func distinct(values []string) []string {
	var all []string
	for _, v := range values {
		if !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	return all
}
