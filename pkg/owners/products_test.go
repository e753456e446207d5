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

// A product is a row of the table of products in docs/troubleshoot.md.
type product struct {
	name string
	// owners write its rules. Their rows in the table of owners have the word of --protect, and
	// the way in which each removes rules.
	owners []string
	// flushes describes the flush of a product that is no owner.
	flushes string
	// word names the rules of a product that is no owner.
	word string
	// remark has the words that users search for, and hints.
	remark string
}

// products are the rows, in their order.
var products = []product{
	{name: "Docker, Swarm, ufw-docker", owners: []string{"docker"},
		remark: "`No chain/target/match by that name`. The preset includes `DOCKER-USER`, ufw's chains behind it, encrypted overlays. [Bridges with other names](presets.md#what-the-presets-do-not-take)"},
	{name: "podman, netavark", owners: []string{"podman"}, remark: "By hand: `podman network reload --all`."},
	{name: "Kubernetes, kube-proxy", owners: []string{"kube-proxy", "kubelet"}, remark: "Services time out. kube-proxy notices a flush of nat at its next full sync."},
	{name: "hostPort, portmap, Multus", owners: []string{"portmap", "ipmasq", "firewall"}, remark: "Without canaryd, only a new pod helps."},
	{name: "k3s", owners: []string{"kube-proxy", "flannel", "kube-router", "portmap"}, remark: "k3s itself writes all but portmap's."},
	{name: "RKE2, Canal", owners: []string{"kube-proxy", "calico", "flannel", "portmap"}, remark: "Nodes become NotReady."},
	{name: "MicroK8s", owners: []string{"microk8s", "kube-proxy", "calico"}, remark: "canaryd reports the policy of FORWARD, and does not set it."},
	{name: "OpenShift, OKD, CRI-O, MicroShift", owners: []string{"crio", "ovn-kubernetes", "openshift-sdn"}, remark: "Router ports 80 and 443; `KUBE-HOSTPORTS`."},
	{name: "Calico", owners: []string{"calico"}, remark: "Policies open, or pods cut off, for up to 3 minutes."},
	{name: "flannel", owners: []string{"flannel"}, remark: "`FLANNEL-FWD`, `FLANNEL-POSTRTG`"},
	{name: "kube-router", owners: []string{"kube-router"}, remark: "Its restore loses rules that others write meanwhile."},
	{name: "Cilium", owners: []string{"cilium"}, remark: "Few rules with `bpf.masquerade` and without kube-proxy."},
	{name: "Weave Net", owners: []string{"weave"}, remark: "canaryd leaves `WEAVE-CANARY` to Weave."},
	{name: "Antrea", owners: []string{"antrea"}, remark: "`ANTREA-POSTROUTING`"},
	{name: "kube-ovn", owners: []string{"kube-ovn"}, remark: "`OVN-POSTROUTING`"},
	{name: "Istio ambient", owners: []string{"istio"}, remark: "Probes fail under strict mTLS. canaryd guards no rules of sidecars."},
	{name: "EKS, amazon-vpc-cni", owners: []string{"aws-node"}, remark: "`AWS-SNAT-CHAIN-0`"},
	{name: "GKE, ip-masq-agent", owners: []string{"ip-masq-agent"}, remark: "Pods' addresses leave the cluster."},
	{name: "NodeLocal DNSCache", owners: []string{"node-local-dns"}, remark: "DNS fails or is slow; NOTRACK of 169.254.20.10."},
	{name: "kube2iam, kiam", owners: []string{"kube2iam"}, remark: "Pods get the node's role. `auto` omits it."},
	{name: "libvirt", owners: []string{"libvirt"}, remark: "Guests lose internet and DHCP."},
	{name: "LXD", owners: []string{"lxd"}, remark: "Containers lose addresses and internet."},
	{name: "Incus", owners: []string{"incus"}, remark: "As LXD."},
	{name: "systemd-networkd, systemd-nspawn", owners: []string{"networkd"}, remark: "`IPMasquerade=`, table `io.systemd.nat`"},
	{name: "Tailscale", owners: []string{"tailscale"}, remark: "Subnet routes, exit nodes. In its nftables mode only on the backend nft."},
	{name: "fail2ban", owners: []string{"fail2ban"}, remark: "`f2b-*`; bans have no effect."},
	{name: "CrowdSec", owners: []string{"crowdsec"}, remark: "As fail2ban."},
	{name: "wg-quick, PostUp", owners: []string{"wg-quick"}, remark: "`canaryd detect` prints [the words](presets.md#rules-of-built-in-chains). `PostDown` still works."},
	{name: "your own script", flushes: "its commands", word: "`rule:TABLE:CHAIN:GLOB`", remark: "As wg-quick. Or declare chains with `--rules-dir`."},
	{name: "Puppet (puppetlabs-firewall)", flushes: "purges rules with `iptables -D`", remark: "Set `purge => false`, or `ignore` for others' chains. canaryd recognizes [most purges](measured.md#purges)."},
	{name: "Ansible, hardening scripts", flushes: "`iptables -F`, policies to DROP", remark: "Its own rules stay next to the replayed ones."},
	{name: "CSF", flushes: "`csf -r`, hundreds of commands", remark: "canaryd replays after the last command."},
	{name: "ferm, iptables-services, netfilter-persistent, Shorewall", flushes: "tables of its saved file", remark: "canaryd replaces old copies of others' rules."},
	{name: "firewalld", flushes: "all tables at start, reload and stop", remark: "Its direct rules land above the jumps."},
	{name: "ufw", flushes: "own rules; whole tables with `MANAGE_BUILTINS=yes`", remark: "With that, set [`--settle`](measured.md#a-replay-between-two-commands)."},
	{name: "nftables.service", flushes: "`flush ruleset`, all of nft", remark: "iptables-legacy keeps its rules. [Measurements](measured.md#firewalls)"},
}

// TestProducts: the table of products in docs/troubleshoot.md must match the table of owners
// and name each owner. With -update the test writes it again.
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
	b.WriteString("| product | it flushes at most | word | symptom, remark |\n|---|---|---|---|\n")
	for _, p := range products {
		flushes, word := p.flushes, p.word
		if flushes == "" {
			flushes = "own rules"
		}
		var presets, words []string
		for _, name := range p.owners {
			o := row(name)
			if o.Removes == WholeTable {
				flushes = "a whole table"
			}
			if o.Preset != "" {
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
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", p.name, flushes, word, p.remark)
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
