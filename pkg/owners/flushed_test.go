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

const flushedDoc = "../../docs/my-rules-were-flushed.md"

// A product is a section of docs/my-rules-were-flushed.md, with the words that its users search
// for.
type product struct {
	name string
	// says has the words of users' reports.
	says string
	// owners are the rows of its rules; none: note says all.
	owners []string
	// note completes the rows.
	note string
}

// products are the sections, in their order.
var products = []product{
	{"Docker", `"iptables: No chain/target/match by that name", published ports and containers without internet after firewalld or a firewall script restarted`, []string{"docker"},
		"The operator's rules in `DOCKER-USER` come back too. Bridges with names of your own: see [presets](presets.md#what-the-presets-do-not-take)."},
	{"Docker Swarm", "the routing mesh is dead on one node, `DOCKER-INGRESS` is empty, encrypted overlay networks send VXLAN in clear", []string{"docker"},
		"The marks of encrypted overlays in mangle `OUTPUT`, and the ACCEPT and DROP in filter `INPUT`, are part of the preset."},
	{"ufw-docker", "`ufw reload` and `DOCKER-USER`: ports are open that were closed, or all are closed", []string{"docker"},
		"Chains of ufw that `DOCKER-USER` leads to [come back with it](presets.md#chains-that-protected-rules-lead-to). ufw writes its own rules itself."},
	{"podman, netavark", "published ports refuse after `firewall-cmd --reload`, until `podman network reload --all`", []string{"podman"}, ""},
	{"Kubernetes, kube-proxy", "Services time out, \"connection refused\" for ClusterIPs, `KUBE-SERVICES` is gone after `iptables -F`", []string{"kube-proxy", "kubelet"},
		"kube-proxy notices by its canary in mangle only: a flush of nat alone lasts until its next full sync."},
	{"containerd, hostPort, portmap", "`hostPort` is dead after a flush, and only a new pod helps", []string{"portmap", "ipmasq", "firewall"}, ""},
	{"k3s", "pods have no internet, Services fail, network policies are gone after ufw or iptables-services restarted", []string{"kube-proxy", "flannel", "kube-router", "portmap"},
		"k3s writes the rules of kube-proxy, flannel and kube-router itself."},
	{"RKE2, Canal", "nodes NotReady, `cali-` chains missing after a firewall started", []string{"kube-proxy", "calico", "flannel", "portmap"}, ""},
	{"MicroK8s", "`iptables -P FORWARD ACCEPT` again after each restart of a firewall", []string{"microk8s", "kube-proxy", "calico"},
		"A policy of a chain is not put back, and canaryd says that it changed."},
	{"OpenShift, OKD, CRI-O, MicroShift", "the router's host ports 80 and 443 are closed after `systemctl restart iptables`, `OPENSHIFT-FIREWALL-ALLOW` and `KUBE-HOSTPORTS` are empty", []string{"crio", "ovn-kubernetes", "openshift-sdn"}, ""},
	{"Calico", "\"cali-FORWARD\" is empty, policies are not enforced, or all pods are cut off for a minute or three", []string{"calico"},
		"Felix refreshes its rules of iptables. In nftables mode it leaves out the rules that it appends."},
	{"flannel", "`FLANNEL-FWD` and `FLANNEL-POSTRTG` are missing, pods reach no other node", []string{"flannel"}, ""},
	{"kube-router", "after a flush policies are open for five minutes, `KUBE-POD-FW-` chains are gone", []string{"kube-router"},
		"kube-router restores the whole table filter: rules that another program wrote in that moment are lost."},
	{"Cilium", "pods have no internet after a flush, `CILIUM_POST_nat` is empty until the agent restarts", []string{"cilium"},
		"With `bpf.masquerade` and without kube-proxy little of Cilium is in iptables. The start of an agent renames its chains, and canaryd leaves it to it."},
	{"Weave Net", "pods cannot talk after `iptables -F`, \"WEAVE-NPC\" is gone", []string{"weave"}, "Its canary `WEAVE-CANARY` is left to Weave."},
	{"Antrea", "NodePorts and egress fail for a minute, `ANTREA-POSTROUTING` is gone", []string{"antrea"}, ""},
	{"kube-ovn", "pods have no way out, `OVN-POSTROUTING` is gone", []string{"kube-ovn"}, ""},
	{"Multus", "secondary networks lost their masquerade", []string{"ipmasq", "firewall"}, "Multus writes no rules. The plugins that it calls do. Rules inside of a pod's network namespace are not canaryd's."},
	{"Istio ambient", "probes fail with strict mTLS, `ISTIO_POSTRT` is gone", []string{"istio"}, "Rules of sidecars are in the pods' network namespaces."},
	{"AWS, EKS, amazon-vpc-cni", "pods have no internet, `AWS-SNAT-CHAIN-0` is gone, node ports answer from the wrong interface", []string{"aws-node"}, ""},
	{"GKE, ip-masq-agent", "`IP-MASQ` is gone, traffic has pods' addresses", []string{"ip-masq-agent"}, ""},
	{"NodeLocal DNSCache", "DNS fails or is slow, NOTRACK rules for 169.254.20.10 are gone", []string{"node-local-dns"}, ""},
	{"kube2iam, kiam", "pods get the node's role: the DNAT of 169.254.169.254 is gone", []string{"kube2iam"}, ""},
	{"libvirt, virt-manager", "guests have no internet and no DHCP after `nft flush ruleset` or firewalld", []string{"libvirt"}, ""},
	{"LXD", "containers get no address and no internet, table `inet lxd` is gone", []string{"lxd"}, ""},
	{"Incus", "containers get no address and no internet, table `inet incus` is gone", []string{"incus"}, ""},
	{"systemd-networkd, systemd-nspawn", "`IPMasquerade=` does nothing any more, table `io.systemd.nat` is gone after `nftables.service` restarted", []string{"networkd"}, ""},
	{"Tailscale", "subnet routes and exit nodes are dead, `ts-forward` is gone until `tailscaled` restarts", []string{"tailscale"},
		"The preset holds in its nftables mode too, where canaryd guards the backend nft."},
	{"fail2ban", "\"Failed to execute ban jail 'sshd'\", bans are without effect after a reload of the firewall", []string{"fail2ban"}, ""},
	{"CrowdSec", "bans are shown and do nothing: the rule that looks up `crowdsec-blacklists` is gone", []string{"crowdsec"}, ""},
	{"wg-quick, WireGuard", "`PostUp = iptables -A FORWARD -i %i -j ACCEPT; iptables -t nat -A POSTROUTING ... -j MASQUERADE` is gone, clients connect and reach nothing", []string{"wg-quick"},
		"`canaryd detect` prints the word for each rule. Words of your own may name several: `--protect='rule:filter:FORWARD:*-i wg0*'` and `--protect='rule:nat:POSTROUTING:-s 10.66.66.0/24 *'`, see [words for rules](presets.md#rules-of-built-in-chains). `PostDown` is obeyed."},
	{"rules of your own script", "`iptables -A INPUT ...` of rc.local or cron is gone", nil,
		"Name them by the words that `canaryd detect` prints, or declare them with `--rules-dir`, if they are in chains of their own."},
	{"Puppet, puppetlabs-firewall", "each run of the agent purges Kubernetes' and Docker's rules with `iptables -D`", nil,
		"It is no owner. Rules of others that it purges come back: canaryd knows a purge by its own marks that go with it. Better: `purge => false`, or `ignore` for these chains."},
	{"Ansible, iptables_raw, harden scripts", "a role runs `iptables -F`, sets policies to DROP, and writes its own rules", nil,
		"Rules of others that it flushed come back, next to its own rules. canaryd sets no policy, and says that it changed."},
	{"CSF, ConfigServer Firewall", "`csf -r` takes Docker's rules away", nil, "Rules of others that its hundreds of commands flush come back when these are done. Its own rules are its own."},
	{"ferm, iptables-services, netfilter-persistent, Shorewall", "`systemctl restart iptables` restores a saved file, and all else is gone or is old", nil,
		"Rules that the file lacks come back. Old copies of others' rules in the file are replaced by the present ones."},
	{"firewalld, ufw, nftables.service", "a reload takes containers' rules away", nil,
		"They write their own rules, which are never guarded unless a word names them. Rules of others that they flush come back: [which firewalls were tried](measured.md#firewalls)."},
}

// TestFlushedDocument: docs/my-rules-were-flushed.md is made from the table of owners, and has each
// owner.
func TestFlushedDocument(t *testing.T) {
	text := flushedPage()
	if golden.Update() {
		if err := os.WriteFile(flushedDoc, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	has, err := os.ReadFile(flushedDoc)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(text, string(has)); diff != "" {
		t.Errorf("%s is not made from the table of owners (-table +document); -update writes it:\n%s", flushedDoc, diff)
	}
	for _, o := range All() {
		if !slices.ContainsFunc(products, func(p product) bool { return slices.Contains(p.owners, o.Name) }) {
			t.Errorf("no section leads to %s", o.Name)
		}
	}
}

func flushedPage() string {
	var b strings.Builder
	b.WriteString(`# My rules were flushed: I use ...

<!-- go test ./pkg/owners -update writes this page from the table of owners -->

Find your product. "Without canaryd" says when its rules come back by themselves, and "word" names
them for ` + "`--protect`" + `. Presets know an owner's chains, rules and native tables exactly:
[presets](presets.md). canaryd notices a flush within milliseconds, puts the lost rules back, reads
them again, and says which process took them: ` + "`canaryd status --flush 1`" + `. Rules that their
owner deletes by name stay away. [Guarantees](guarantees.md) has the limits.

`)
	for _, p := range products {
		fmt.Fprintf(&b, "## %s\n\n%s\n\n", p.name, wrap("Reports: "+p.says+"."))
		var words []string
		if len(p.owners) > 0 {
			b.WriteString("| rules of | a flush breaks | without canaryd they come back | word |\n|---|---|---|---|\n")
		}
		for _, name := range p.owners {
			o := row(name)
			word := wordsFor(o)
			fmt.Fprintf(&b, "| [%s](%s) | %s | %s | %s |\n", o.Title, o.Docs, o.Breaks, o.Heals, word)
			if o.Preset != "" && !slices.Contains(words, o.Preset) {
				words = append(words, o.Preset)
			}
		}
		if len(words) > 0 {
			fmt.Fprintf(&b, "\n    canaryd run --protect=%s\n", strings.Join(words, ","))
		}
		if len(p.owners) > 0 {
			b.WriteString("\n")
		}
		if p.note != "" {
			b.WriteString(wrap(p.note) + "\n\n")
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// wrap breaks a paragraph at 100 columns.
func wrap(text string) string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > 100 {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return strings.Join(append(lines, line), "\n")
}
