package native_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// These are small versions of owners' tables.
const (
	kubeProxy = `table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { 172.30.0.1, 172.30.0.2 }; }
	map service-ips { type ipv4_addr . inet_service : verdict; elements = { 172.30.0.1 . 80 : goto service-A/web, 172.30.0.2 . 53 : goto service-B/dns }; }
	map no-endpoint-services { type ipv4_addr . inet_service : verdict; elements = { 172.30.0.9 . 80 : drop, 172.30.0.8 . 80 : drop }; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; ip saddr 10.0.0.0/8 masquerade; }
	chain services { ip daddr . tcp dport vmap @service-ips; ip daddr . tcp dport vmap @no-endpoint-services; ip daddr @cluster-ips reject; }
	chain service-A/web { numgen random mod 2 vmap { 0 : goto endpoint-A1, 1 : goto endpoint-A2 }; }
	chain service-B/dns { numgen random mod 1 vmap { 0 : goto endpoint-B1 }; }
	chain endpoint-A1 { meta l4proto tcp dnat to 10.0.0.1:80; }
	chain endpoint-A2 { meta l4proto tcp dnat to 10.0.0.2:80; }
	chain endpoint-B1 { meta l4proto udp dnat to 10.0.0.3:53; }
}`
	docker = `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
	map filter-forward-out-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-out__docker0 }; }
	map nat-postrouting-in-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-in__docker0 }; }
	map nat-postrouting-out-jumps { type ifname : verdict; elements = { "docker0" : jump nat-postrouting-out__docker0 }; }
	chain filter-FORWARD { type filter hook forward priority 0; oifname vmap @filter-forward-in-jumps; iifname vmap @filter-forward-out-jumps; }
	chain nat-OUTPUT { type nat hook output priority -100; ip daddr != 127.0.0.0/8 fib daddr type local counter jump nat-prerouting-and-output; }
	chain nat-POSTROUTING { type nat hook postrouting priority srcnat; iifname vmap @nat-postrouting-out-jumps; oifname vmap @nat-postrouting-in-jumps; }
	chain nat-PREROUTING { type nat hook prerouting priority dstnat; fib daddr type local counter jump nat-prerouting-and-output; }
	chain nat-prerouting-and-output { iifname != "docker0" tcp dport 8080 counter dnat to 172.17.0.2:80 comment "DNAT"; }
	chain raw-PREROUTING { type filter hook prerouting priority raw; ip daddr 172.17.0.0/16 iifname != { "lo", "docker0" } counter drop comment "SUBNET DROP EXTERNAL"; }
	chain filter-forward-in__docker0 { ct state established,related counter accept; iifname "docker0" counter accept comment "ICC"; ip daddr 172.17.0.2 tcp dport 80 counter accept; counter drop comment "UNPUBLISHED PORT DROP"; }
	chain filter-forward-out__docker0 { ct state established,related counter accept; counter accept comment "OUTGOING"; }
	chain nat-postrouting-in__docker0 { fib saddr type local counter masquerade comment "MASQUERADE FROM HOST"; }
	chain nat-postrouting-out__docker0 { oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade comment "MASQUERADE"; }
}`
	netavark = `table inet netavark {
	chain INPUT { type filter hook input priority filter; ip saddr 10.88.0.0/16 meta l4proto { tcp, udp } th dport 53 accept; }
	chain FORWARD { type filter hook forward priority filter; ct state invalid drop; jump NETAVARK-ISOLATION-1; ip daddr 10.88.0.0/16 ct state established,related accept; ip saddr 10.88.0.0/16 accept; }
	chain POSTROUTING { type nat hook postrouting priority srcnat; meta mark and 0x2000 == 0x2000 masquerade; ip saddr 10.88.0.0/16 jump nv_1; }
	chain PREROUTING { type nat hook prerouting priority dstnat; fib daddr type local jump NETAVARK-HOSTPORT-DNAT; }
	chain OUTPUT { type nat hook output priority -100; fib daddr type local jump NETAVARK-HOSTPORT-DNAT; }
	chain NETAVARK-HOSTPORT-DNAT { tcp dport 8080 jump nv_1_dnat; }
	chain NETAVARK-HOSTPORT-SETMARK { meta mark set meta mark or 0x2000; }
	chain NETAVARK-ISOLATION-1 { iifname "podman1" oifname != "podman1" jump NETAVARK-ISOLATION-3; }
	chain NETAVARK-ISOLATION-2 { oifname "podman1" drop; }
	chain NETAVARK-ISOLATION-3 { jump NETAVARK-ISOLATION-2; }
	chain nv_1 { ip daddr 10.88.0.0/16 accept; ip daddr != 224.0.0.0/4 masquerade; }
	chain nv_1_dnat { ip saddr 10.88.0.0/16 tcp dport 8080 jump NETAVARK-HOSTPORT-SETMARK; tcp dport 8080 dnat ip to 10.88.0.2:80; }
}`
	portmap = `table ip cni_hostport {
	chain hostports { tcp dport 8080 dnat to 10.0.0.2:80 comment "pod1"; tcp dport 8081 dnat to 10.0.0.2:81 comment "pod1"; }
	chain hostip_hostports { ip daddr 192.0.2.1 tcp dport 8082 dnat to 10.0.0.3:80 comment "pod2"; }
	chain prerouting { type nat hook prerouting priority dstnat; jump hostip_hostports; jump hostports; }
	chain output { type nat hook output priority -100; jump hostip_hostports; fib daddr type local jump hostports; }
	chain masquerading { type nat hook postrouting priority srcnat; ip saddr 10.0.0.2 ip daddr 10.0.0.2 masquerade comment "pod1"; ip saddr 127.0.0.1 ip daddr 10.0.0.2 masquerade comment "pod1"; ip saddr 10.0.0.3 ip daddr 10.0.0.3 masquerade comment "pod2"; ip saddr 127.0.0.1 ip daddr 10.0.0.3 masquerade comment "pod2"; }
}`
	ipmasq = `table inet cni_plugins_masquerade {
	chain masq_checks { ip saddr 10.0.0.2 ip daddr != 10.0.0.0/24 masquerade comment "a-1"; ip saddr 10.0.0.3 ip daddr != 10.0.0.0/24 masquerade comment "a-2"; }
	chain postrouting { type nat hook postrouting priority srcnat; ip daddr 224.0.0.0/4 return; ip6 daddr ff00::/8 return; goto masq_checks; }
}`
	// The table has this content between the last pod's end and the next pod.
	ipmasqIdle = `table inet cni_plugins_masquerade {
	chain masq_checks { }
	chain postrouting { type nat hook postrouting priority srcnat; ip daddr 224.0.0.0/4 return; ip6 daddr ff00::/8 return; goto masq_checks; }
}`
	word = `table inet fw {
	set banned { type ipv4_addr; elements = { 192.0.2.1, 192.0.2.2 }; }
	chain input { type filter hook input priority 0; ip saddr @banned drop; tcp dport 23 drop; jump ours; }
	chain fw2 { type filter hook output priority 0; tcp dport 25 drop; }
	chain ours { tcp dport 22 accept; tcp dport 80 accept; }
}`
	seen = `table inet seen {
	counter hits { }
	set clients { type ipv4_addr; flags dynamic,timeout; timeout 1h; elements = { 10.0.0.2 }; }
	chain sub { counter name hits accept; }
	chain out { type filter hook output priority 0; update @clients { ip daddr counter }; jump sub; }
}`
	wordOne = `table inet fw {
	chain input { type filter hook input priority 0; tcp dport 23 drop; }
}`
	wordTwo = `table inet fw {
	chain input { type filter hook input priority 0; tcp dport 23 drop; tcp dport 25 drop; }
}`
	calico = `table ip calico {
	set cali40s-1 { type ipv4_addr; elements = { 10.1.0.1, 10.1.0.2 }; }
	chain filter-FORWARD { type filter hook forward priority 0; counter jump cali-FORWARD; }
	chain cali-FORWARD { ip saddr @cali40s-1 counter accept; counter drop; }
}`
	libvirt = `table ip libvirt_network {
	chain forward { type filter hook forward priority 0; counter jump guest_cross; counter jump guest_input; counter jump guest_output; }
	chain guest_output { ip saddr 192.168.122.0/24 iif "lo" counter accept; iif "lo" counter reject; }
	chain guest_input { oif "lo" ip daddr 192.168.122.0/24 ct state related,established counter accept; oif "lo" counter reject; }
	chain guest_cross { iif "lo" oif "lo" counter accept; }
	chain guest_nat { type nat hook postrouting priority srcnat; ip saddr 192.168.122.0/24 ip daddr 224.0.0.0/24 counter return; ip saddr 192.168.122.0/24 ip daddr != 192.168.122.0/24 counter masquerade; }
}`
	kindnet = `table inet kindnet-ipmasq {
	set noMasqV4 { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	chain postrouting { type nat hook postrouting priority srcnat; ip daddr @noMasqV4 return; masquerade; }
}`
)

// again returns the way in which owners make their table again: it is created if it is not there,
// deleted, and created.
func again(text string) string {
	name := strings.TrimSpace(strings.SplitN(text, "{", 2)[0])
	return "add " + name + "\ndelete " + name + "\n" + text
}

// scenes are events in the life of a table. Commits are run one after the other.
var scenes = []struct {
	name    string
	table   string
	by      native.Committer
	commits []string
	want    native.Verdict
	remedy  native.Remedy
}{
	// Flushers do this.
	{"nft flush ruleset", kubeProxy, 0, []string{"flush ruleset"}, native.TableDeleted, native.ByCreate},
	{"nft flush ruleset ip", kubeProxy, 0, []string{"flush ruleset ip"}, native.TableDeleted, native.ByCreate},
	{"systemctl reload nftables", kubeProxy, 0, []string{"flush ruleset\ntable inet filter { chain input { type filter hook input priority 0; }; }"}, native.TableDeleted, native.ByCreate},
	{"systemctl reload nftables, with an old copy", kubeProxy, 0, []string{"flush ruleset\n" + strings.Replace(kubeProxy, "10.0.0.1:80", "10.0.0.7:80", 1)}, native.Replaced, native.ByReplace},
	{"systemctl restart nftables", kubeProxy, 0, []string{"flush ruleset", "table inet filter { }"}, native.TableDeleted, native.ByCreate},
	{"systemctl restart nftables, with an old copy", kubeProxy, native.NotOwner, []string{"flush ruleset", strings.Replace(kubeProxy, "10.0.0.1:80", "10.0.0.7:80", 1)}, native.Replaced, native.ByReplace},
	{"systemctl reload nftables, with the same", kubeProxy, 0, []string{"flush ruleset\n" + kubeProxy}, native.Intact, native.NoRemedy},
	{"nft -f saved, without flush", kubeProxy, 0, []string{kubeProxy}, native.Changed, native.NoRemedy},
	{"nft flush table", kubeProxy, 0, []string{"flush table ip kube-proxy"}, native.Emptied, native.ByRefill},
	{"nft flush table, then the owner's sync", kubeProxy, 0, []string{"flush table ip kube-proxy", "add chain ip kube-proxy endpoint-A1\nadd rule ip kube-proxy endpoint-A1 meta l4proto tcp dnat to 10.0.0.5:80"}, native.Emptied, native.ByRefill},
	{"nft flush table of netavark", netavark, 0, []string{"flush table inet netavark"}, native.Emptied, native.ByRefill},
	{"nft flush table of docker", docker, 0, []string{"flush table ip docker-bridges"}, native.Emptied, native.ByRefill},
	{"nft flush table of calico", calico, 0, []string{"flush table ip calico"}, native.Emptied, native.ByRefill},
	{"nft flush table of portmap", portmap, 0, []string{"flush table ip cni_hostport"}, native.Emptied, native.ByRefill},
	{"nft flush table of libvirt", libvirt, 0, []string{"flush table ip libvirt_network"}, native.Emptied, native.ByRefill},
	{"nft flush table of ipmasq, by a flusher", ipmasq, native.NotOwner, []string{"flush table inet cni_plugins_masquerade"}, native.Emptied, native.ByRefill},
	{"nft delete table", kubeProxy, 0, []string{"delete table ip kube-proxy"}, native.Unattributed, native.NoRemedy},
	{"nft delete table, by a flusher", kubeProxy, native.NotOwner, []string{"delete table ip kube-proxy"}, native.TableDeleted, native.ByCreate},
	{"nft flush chain, a base chain", kubeProxy, 0, []string{"flush chain ip kube-proxy nat-prerouting"}, native.Emptied, native.ByRefill},
	{"nft flush chain, a referenced chain", kubeProxy, 0, []string{"flush chain ip kube-proxy services"}, native.Emptied, native.ByRefill},
	{"nft flush chain, docker's base chain", docker, 0, []string{"flush chain ip docker-bridges nat-PREROUTING"}, native.Emptied, native.ByRefill},
	{"nft flush set", kubeProxy, 0, []string{"flush set ip kube-proxy cluster-ips"}, native.Emptied, native.ByRefill},
	{"nft flush map", kubeProxy, 0, []string{"flush map ip kube-proxy service-ips"}, native.Emptied, native.ByRefill},
	{"nft delete element", kubeProxy, 0, []string{"delete element ip kube-proxy cluster-ips { 172.30.0.1 }"}, native.Changed, native.NoRemedy},
	{"nft delete chain", kubeProxy, 0, []string{"flush chain ip kube-proxy nat-prerouting\ndelete chain ip kube-proxy nat-prerouting"}, native.Emptied, native.ByRefill},
	{"dormant", kubeProxy, 0, []string{"add table ip kube-proxy { flags dormant; }"}, native.Disabled, native.NoRemedy},
	{"dormant and back", kubeProxy, 0, []string{"add table ip kube-proxy { flags dormant; }", "add table ip kube-proxy"}, native.Intact, native.NoRemedy},
	{"reset counters", docker, 0, []string{"reset counters"}, native.Intact, native.NoRemedy},
	{"another table", kubeProxy, 0, []string{"add table ip other"}, native.Intact, native.NoRemedy},

	{"nft flush table of ipmasq while no pod runs", ipmasqIdle, 0, []string{"flush table inet cni_plugins_masquerade"}, native.Emptied, native.ByRefill},
	{"nft flush table of docker without a network", dockerIdle, 0, []string{"flush table ip docker-bridges"}, native.Emptied, native.ByRefill},
	{"nft flush table that a word names", word, 0, []string{"flush table inet fw"}, native.Emptied, native.ByRefill},
	{"nft flush table that a word names, of one chain", wordTwo, 0, []string{"flush table inet fw"}, native.Emptied, native.ByRefill},
	{"nft flush chain of a table that a word names", word, 0, []string{"flush chain inet fw input"}, native.Emptied, native.ByRefill},
	{"a unit's file deletes a chain of a table that a word names", word, native.NotOwner, []string{"delete chain inet fw fw2"}, native.Emptied, native.ByRefill},
	{"a script flushes libvirt's chain of one rule", libvirt, native.Shell, []string{"flush chain ip libvirt_network guest_cross"}, native.Emptied, native.ByRefill},
	{"a script flushes ipmasq's pods", ipmasq, native.Shell, []string{"flush chain inet cni_plugins_masquerade masq_checks"}, native.Emptied, native.ByRefill},
	{"a script flushes calico's set", calico, native.Shell, []string{"flush set ip calico cali40s-1"}, native.Emptied, native.ByRefill},
	{"a script deletes kube-proxy's table", kubeProxy, native.Shell, []string{"delete table ip kube-proxy"}, native.Unattributed, native.NoRemedy},

	{"one commit empties a map and adds an element", kubeProxy, 0, []string{"flush map ip kube-proxy service-ips\nadd element ip kube-proxy service-ips { 172.30.0.3 . 80 : drop }"}, native.Emptied, native.ByMerge},
	{"one commit empties a map and adds one of its elements", kubeProxy, 0, []string{"flush map ip kube-proxy service-ips\nadd element ip kube-proxy service-ips { 172.30.0.1 . 80 : goto service-A/web }"}, native.Emptied, native.ByMerge},
	{"one commit empties a map and adds an element, and empties a chain", kubeProxy, native.Shell, []string{"flush chain ip kube-proxy nat-prerouting\nflush map ip kube-proxy service-ips\nadd element ip kube-proxy service-ips { 172.30.0.1 . 80 : drop }"}, native.Emptied, native.ByMerge},

	// A person decides this.
	{"nft delete chain of a table that a word names", word, 0, []string{"delete chain inet fw fw2"}, native.Changed, native.NoRemedy},
	{"nft flush chain and delete chain in one commit", word, native.Shell, []string{"flush chain inet fw input\ndelete chain inet fw input"}, native.Changed, native.NoRemedy},
	{"nft delete rule, the only one of its chain", word, native.Shell, []string{"delete rule inet fw fw2 handle HANDLE-of-fw2"}, native.Changed, native.NoRemedy},
	{"nft delete rule, the only one of its table", wordOne, 0, []string{"delete rule inet fw input handle HANDLE-of-input"}, native.Changed, native.NoRemedy},
	{"nft delete rule, one after the other", wordTwo, 0, []string{"delete rule inet fw input handle HANDLE-of-input", "flush chain inet fw input"}, native.Changed, native.NoRemedy},
	{"nft delete rule, the only jump to a chain", word, native.Shell, []string{"delete rule inet fw input handle HANDLE-of-input"}, native.Changed, native.NoRemedy},
	{"nft delete rule, one of several", kubeProxy, native.Shell, []string{"delete rule ip kube-proxy services handle HANDLE-of-services"}, native.Changed, native.NoRemedy},

	{"nft delete rule, the only one of kube-proxy's chain", kubeProxy, native.Shell, []string{"delete rule ip kube-proxy nat-prerouting handle HANDLE-of-nat-prerouting"}, native.Changed, native.NoRemedy},
	{"nft delete chain of kube-proxy's", kubeProxy, native.Shell, []string{"delete chain ip kube-proxy nat-prerouting"}, native.Changed, native.NoRemedy},

	// Owners do this.
	{"kube-proxy: a service is added", kubeProxy, 0, []string{"add chain ip kube-proxy service-C\nadd rule ip kube-proxy service-C drop\nadd element ip kube-proxy service-ips { 172.30.0.3 . 80 : goto service-C }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: an endpoint goes", kubeProxy, 0, []string{"flush chain ip kube-proxy service-A/web\nadd rule ip kube-proxy service-A/web goto endpoint-A1\nflush chain ip kube-proxy endpoint-A2"}, native.Changed, native.NoRemedy},
	{"kube-proxy: a service goes", kubeProxy, 0, []string{"delete element ip kube-proxy service-ips { 172.30.0.2 . 53 }\ndelete element ip kube-proxy cluster-ips { 172.30.0.2 }\nflush chain ip kube-proxy service-B/dns\nflush chain ip kube-proxy endpoint-B1", "delete chain ip kube-proxy service-B/dns"}, native.Changed, native.NoRemedy},
	{"kube-proxy: its services are other ones", kubeProxy, 0, []string{"delete element ip kube-proxy service-ips { 172.30.0.1 . 80, 172.30.0.2 . 53 }\nflush chain ip kube-proxy service-A/web\nflush chain ip kube-proxy service-B/dns\nadd element ip kube-proxy service-ips { 172.30.0.3 . 80 : drop }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: services get endpoints", kubeProxy, 0, []string{"delete element ip kube-proxy no-endpoint-services { 172.30.0.9 . 80, 172.30.0.8 . 80 }\nadd element ip kube-proxy service-ips { 172.30.0.9 . 80 : goto service-A/web, 172.30.0.8 . 80 : goto service-A/web }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: services without endpoints go", kubeProxy, 0, []string{"delete element ip kube-proxy no-endpoint-services { 172.30.0.9 . 80, 172.30.0.8 . 80 }\ndelete element ip kube-proxy cluster-ips { 172.30.0.2 }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: flushed, and synced in full", kubeProxy, 0, []string{"flush ruleset", strings.Replace(kubeProxy, "10.0.0.1:80", "10.0.0.7:80", 1)}, native.Changed, native.NoRemedy},
	{"kube-proxy: --cleanup", kubeProxy, native.Owner, []string{"delete table ip kube-proxy"}, native.Changed, native.NoRemedy},
	{"docker: reload", docker, 0, []string{again(strings.Replace(docker, "8080", "9090", 1))}, native.Changed, native.NoRemedy},
	{"docker: its last port goes", docker, 0, []string{"flush chain ip docker-bridges nat-prerouting-and-output\n" + dockerPortless}, native.Changed, native.NoRemedy},
	{"docker: its last port of an unprotected network goes", strings.Replace(docker, "drop comment \"UNPUBLISHED PORT DROP\"", "accept comment \"UNPROTECTED\"", 1), 0, []string{"flush chain ip docker-bridges nat-prerouting-and-output"}, native.Changed, native.NoRemedy},
	{"docker: its last network goes", docker, 0, []string{dockerNetworkGoes}, native.Changed, native.NoRemedy},
	{"docker: writes onto a table that was flushed", docker, 0, []string{"flush ruleset", "table ip docker-bridges { map filter-forward-in-jumps { type ifname : verdict; }; chain nat-prerouting-and-output { tcp dport 9090 counter dnat to 172.17.0.3:80; }; }"}, native.Emptied, native.ByMerge},
	{"docker: makes its table again, which is flushed before a read", docker, 0, []string{again(docker), "flush table ip docker-bridges"}, native.Emptied, native.NoRemedy},
	{"netavark: a container more", netavark, 0, []string{"add rule inet netavark NETAVARK-HOSTPORT-DNAT tcp dport 9090 jump nv_1_dnat"}, native.Changed, native.NoRemedy},
	{"netavark: its last port goes", netavark, 0, []string{"flush chain inet netavark NETAVARK-HOSTPORT-DNAT\nflush chain inet netavark nv_1_dnat"}, native.Changed, native.NoRemedy},
	{"netavark: its last network goes", netavark, 0, []string{netavarkNetworkGoes}, native.Changed, native.NoRemedy},
	{"portmap: its last pods go", portmap, 0, []string{"flush chain ip cni_hostport hostports\nflush chain ip cni_hostport hostip_hostports\nflush chain ip cni_hostport masquerading"}, native.Changed, native.NoRemedy},
	{"portmap: the last pod with an address of the host goes", portmap, 0, []string{portmapSecondGoes}, native.Changed, native.NoRemedy},
	{"ipmasq: its last pod goes", ipmasq, 0, []string{"flush chain inet cni_plugins_masquerade masq_checks"}, native.Changed, native.NoRemedy},
	{"calico: makes its table again", calico, 0, []string{again(strings.Replace(calico, "10.1.0.2", "10.1.0.3", 1))}, native.Changed, native.NoRemedy},
	{"calico: a set loses its last pods", calico, 0, []string{"flush set ip calico cali40s-1"}, native.Changed, native.NoRemedy},
	{"libvirt: a network goes", libvirt, 0, []string{"delete rule ip libvirt_network guest_nat handle HANDLE-of-guest_nat", "flush chain ip libvirt_network guest_nat", "flush chain ip libvirt_network guest_cross"}, native.Changed, native.NoRemedy},
	{"kindnet: syncs", kindnet, 0, []string{again(strings.Replace(kindnet, "10.0.0.0", "11.0.0.0", 1))}, native.Changed, native.NoRemedy},
	{"an owner's file makes a table with counters and clients again", seen, 0, []string{again(seen)}, native.Intact, native.NoRemedy},
	{"an owner's file flushes its table and fills it", seen, 0, []string{"table inet seen\nflush table inet seen\n" + strings.Replace(seen, "jump sub", "goto sub", 1)}, native.Changed, native.NoRemedy},
	{"a chain gets another name", seen, 0, []string{"rename chain inet seen sub sub2"}, native.Changed, native.NoRemedy},
	{"counters with names are reset", seen, 0, []string{"reset counters"}, native.Intact, native.NoRemedy},
	{"elements of clients come and go", seen, 0, []string{"add element inet seen clients { 10.0.0.1 }", "delete element inet seen clients { 10.0.0.1, 10.0.0.2 }"}, native.Intact, native.NoRemedy},
	{"an owner makes the same again", calico, 0, []string{again(calico)}, native.Intact, native.NoRemedy},
	{"renamed: deleted and made under another name", calico, 0, []string{"delete table ip calico\ntable ip calico2 { }"}, native.Unattributed, native.NoRemedy},
}

// saidOf names the large removals of a scene that counts as the owner's doing. They are reported
// unless the process is known to be the owner.
var saidOf = map[string][]string{
	"docker: its last port goes":                             {"chain nat-prerouting-and-output: 1 gone, 0 left"},
	"docker: its last port of an unprotected network goes":   {"chain nat-prerouting-and-output: 1 gone, 0 left"},
	"docker: its last network goes":                          {"chain raw-PREROUTING: 1 gone, 0 left"},
	"netavark: its last port goes":                           {"chain NETAVARK-HOSTPORT-DNAT: 1 gone, 0 left"},
	"netavark: its last network goes":                        {"chain INPUT: 1 gone, 0 left", "chain NETAVARK-ISOLATION-1: 1 gone, 0 left", "chain NETAVARK-ISOLATION-2: 1 gone, 0 left"},
	"portmap: its last pods go":                              {"chain hostports: 2 gone, 0 left", "chain hostip_hostports: 1 gone, 0 left", "chain masquerading: 4 gone, 0 left"},
	"portmap: the last pod with an address of the host goes": {"chain hostip_hostports: 1 gone, 0 left"},
	"ipmasq: its last pod goes":                              {"chain masq_checks: 2 gone, 0 left"},
	"calico: a set loses its last pods":                      {"set cali40s-1: 2 gone, 0 left"},
	"libvirt: a network goes":                                {"chain guest_cross: 1 gone, 0 left", "chain guest_nat: 2 gone, 0 left"},
	"nft delete chain of a table that a word names":          {"chain fw2: 1 gone, 0 left"},
	"nft flush chain and delete chain in one commit":         {"chain input: 3 gone, 0 left"},
	"nft delete rule, the only one of its chain":             {"chain fw2: 1 gone, 0 left"},
	"nft delete rule, the only jump to a chain":              {"rule ours: 1 gone, 0 left"},
	"nft delete rule, the only one of its table":             {"chain input: 1 gone, 0 left"},
	"nft delete rule, one after the other":                   {"chain input: 2 gone, 0 left"},
	"nft delete rule, the only one of kube-proxy's chain":    {"chain nat-prerouting: 1 gone, 0 left"},
	"nft delete chain of kube-proxy's":                       {"chain nat-prerouting: 1 gone, 0 left"},
}

const (
	// dockerPortless are the chains of a network without its port, as Docker writes them again.
	dockerPortless = `flush chain ip docker-bridges filter-forward-in__docker0
add rule ip docker-bridges filter-forward-in__docker0 ct state established,related counter accept
add rule ip docker-bridges filter-forward-in__docker0 counter drop comment "UNPUBLISHED PORT DROP"`
	dockerNetworkGoes = `delete element ip docker-bridges filter-forward-in-jumps { "docker0" }
delete element ip docker-bridges filter-forward-out-jumps { "docker0" }
delete element ip docker-bridges nat-postrouting-in-jumps { "docker0" }
delete element ip docker-bridges nat-postrouting-out-jumps { "docker0" }
flush chain ip docker-bridges raw-PREROUTING
flush chain ip docker-bridges filter-forward-in__docker0
flush chain ip docker-bridges filter-forward-out__docker0
flush chain ip docker-bridges nat-postrouting-in__docker0
flush chain ip docker-bridges nat-postrouting-out__docker0
delete chain ip docker-bridges filter-forward-in__docker0
delete chain ip docker-bridges filter-forward-out__docker0
delete chain ip docker-bridges nat-postrouting-in__docker0
delete chain ip docker-bridges nat-postrouting-out__docker0`
	dockerIdle = `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; }
	chain filter-FORWARD { type filter hook forward priority 0; oifname vmap @filter-forward-in-jumps; }
	chain raw-PREROUTING { type filter hook prerouting priority raw; }
}`
	netavarkNetworkGoes = `flush chain inet netavark INPUT
delete rule inet netavark FORWARD handle HANDLE-of-FORWARD
delete rule inet netavark POSTROUTING handle HANDLE-of-POSTROUTING
flush chain inet netavark NETAVARK-ISOLATION-1
flush chain inet netavark NETAVARK-ISOLATION-2
flush chain inet netavark nv_1
delete chain inet netavark nv_1`
	portmapSecondGoes = `flush chain ip cni_hostport hostip_hostports
flush chain ip cni_hostport masquerading
add rule ip cni_hostport masquerading ip saddr 10.0.0.2 ip daddr 10.0.0.2 masquerade comment "pod1"
add rule ip cni_hostport masquerading ip saddr 127.0.0.1 ip daddr 10.0.0.2 masquerade comment "pod1"`
)

// TestJudgeOfCommits runs each scene on the kernel, and judges it by its notifications.
func TestJudgeOfCommits(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		for _, s := range scenes {
			t.Run(s.name, func(t *testing.T) {
				was, id := stage(t, conn, s.table)
				genid, err := conn.Genid()
				if err != nil {
					t.Fatal(err)
				}
				heard := listen(t, genid)
				for _, commit := range s.commits {
					nstest.CommandInput(t, byHandle(was, commit), "nft", "-f", "-")
				}
				now := capture(t, conn)
				e := native.Evidence{Was: was, Now: now.Tables[id], Habits: owners.HabitsOf(id)}
				for _, deeds := range heard.upTo(t, now.Genid) {
					if d := deeds[id]; d != nil {
						d.By, d.ByName = s.by, s.by == native.Shell && strings.HasPrefix(s.commits[0], "delete ")
						e.Deeds = append(e.Deeds, d)
					}
				}
				f := native.Judge(e)
				if f.Verdict != s.want || f.Remedy != s.remedy {
					t.Errorf("%s (%s), remedy %d; want %s, %d\n%v\n%v", f.Verdict, f.Why, f.Remedy, s.want, s.remedy, f.Changes, e.Deeds)
				}
				if f.Remedy != native.NoRemedy {
					remedied(t, conn, was, now, f)
				}
				if s.want == native.Changed && s.by != native.Shell { // canaryd must never undo an owner's change unasked
					e := native.Evidence{Was: was, Now: now.Tables[id], Missed: true, Habits: owners.HabitsOf(id)}
					if missed := native.Judge(e); missed.Remedy != native.NoRemedy {
						t.Errorf("where the commit was missed: %s (%s), remedy %d", missed.Verdict, missed.Why, missed.Remedy)
					}
				}
				if f.Verdict != native.Changed || e.Now == nil {
					return
				}
				var said []string
				for _, r := range native.LargeRemovals(was, e.Now, e.Deeds) {
					said = append(said, fmt.Sprintf("%s %s: %d gone, %d left", r.Kind, r.Name, r.Gone, r.Left))
					if r.By == nil {
						t.Errorf("it is not known who took from %s", r.Name)
					}
				}
				if diff := cmp.Diff(saidOf[s.name], said); diff != "" {
					t.Errorf("what is reported (-want +got):\n%s", diff)
				}
			})
		}
	})
}

// TestPolicies: commits change the policies of base chains. canaryd must read the policies, and
// hear of the chains that a commit has closed.
func TestPolicies(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, id := dial(t), tableid.Inet.Table("t")
		nstest.CommandInput(t, `table inet t {
			chain input { type filter hook input priority 0; policy accept; }
			chain forward { type filter hook forward priority 0; policy drop; }
			chain own { accept; }
		}`, "nft", "-f", "-")
		for _, test := range []struct {
			commit   string
			policies map[string]string
			closed   map[string]int
		}{
			{"chain inet t own { drop; }", map[string]string{"input": "ACCEPT", "forward": "DROP"}, nil},
			{"chain inet t input { policy drop; }", map[string]string{"input": "DROP", "forward": "DROP"}, map[string]int{"input": 1}},
			{"chain inet t forward { policy accept; }", map[string]string{"input": "DROP", "forward": "ACCEPT"}, nil},
			{"chain inet t output { type filter hook output priority 0; policy drop; }", map[string]string{"input": "DROP", "forward": "ACCEPT", "output": "DROP"}, map[string]int{"output": 1}},
		} {
			genid, err := conn.Genid()
			if err != nil {
				t.Fatal(err)
			}
			heard := listen(t, genid)
			nstest.CommandInput(t, test.commit+"\n", "nft", "-f", "-")
			now := capture(t, conn)
			chains, policies := now.Tables[id].Policies()
			if diff := cmp.Diff(test.policies, policies); diff != "" || len(chains) != len(policies) {
				t.Errorf("%s: policies of %v (-want +got):\n%s", test.commit, chains, diff)
			}
			var closed map[string]int
			for _, deeds := range heard.upTo(t, now.Genid) {
				if d := deeds[id]; d != nil {
					closed = d.Closed
				}
			}
			if diff := cmp.Diff(test.closed, closed); diff != "" {
				t.Errorf("%s closes (-want +got):\n%s", test.commit, diff)
			}
		}
	})
}

// byHandle replaces HANDLE-of-CHAIN in a text by the handle of the chain's last rule.
func byHandle(was *native.Table, text string) string {
	for _, c := range was.Chains {
		if n := len(c.Rules); n > 0 {
			text = strings.ReplaceAll(text+"\n", "HANDLE-of-"+c.Name+"\n", fmt.Sprintf("%d\n", c.Rules[n-1].Handle))
		}
	}
	return text
}

// stage makes one table and the witnesses, and nothing else.
func stage(t *testing.T, conn *nft.Conn, text string) (*native.Table, tableid.TableID) {
	t.Helper()
	nstest.CommandInput(t, "flush ruleset\n"+text, "nft", "-f", "-")
	var was *native.Table
	for _, table := range capture(t, conn).Tables {
		was = table
	}
	b := nft.NewBatch()
	for _, f := range []tableid.Family{tableid.IPv4, tableid.Inet} {
		if err := native.PlantWitness(b, f, "nonce"); err != nil {
			t.Fatal(err)
		}
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	return was, was.ID
}

// remedied applies a finding's remedy and wants nothing lost.
func remedied(t *testing.T, conn *nft.Conn, was *native.Table, now *native.Ruleset, f native.Finding) {
	t.Helper()
	b := nft.NewBatch()
	b.Guard(now.Genid)
	var err error
	switch f.Remedy {
	case native.ByCreate:
		_, err = was.Create(b, native.Options{})
	case native.ByReplace:
		_, err = was.Replace(b, native.Options{})
	case native.ByRefill:
		_, err = was.Refill(b, now.Tables[was.ID], native.Options{})
	case native.ByMerge:
		_, err = was.Merge(b, now.Tables[was.ID], native.Options{})
	}
	if err != nil {
		t.Fatal(err)
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes(t, conn, was) {
		// The owner's later changes are its own.
		if c.Gone || c.Empty || c.Lost > 0 && c.New == 0 {
			t.Errorf("after the replay: %v", c)
		}
	}
}

// TestJudgeOfWhatWasMissed: without notifications, the witness shows a flush that a read cannot
// show.
func TestJudgeOfWhatWasMissed(t *testing.T) {
	rule := native.Rule{Attrs: nft.AppendAttr(nil, 4, []byte{}, 0)}
	chain := func(name string, base bool, rules int) native.Chain {
		return native.Chain{Name: name, Base: base, Rules: slices.Repeat([]native.Rule{rule}, rules)}
	}
	table := func(handle uint64, chains ...native.Chain) *native.Table {
		return &native.Table{ID: tableid.IPv4.Table("t"), Handle: handle, Chains: chains}
	}
	was := table(1, chain("base", true, 2), chain("other", true, 1))
	for _, c := range []struct {
		name        string
		now         *native.Table
		witnessLost bool
		replayed    bool
		want        native.Verdict
		remedy      native.Remedy
	}{
		{"gone with the witness", nil, true, false, native.TableDeleted, native.ByCreate},
		{"gone without the witness", nil, false, false, native.Unattributed, native.NoRemedy},
		{"made again, the same", table(2, was.Chains...), true, false, native.Intact, native.NoRemedy},
		{"made again, the witness stands", table(2, chain("base", true, 1)), false, false, native.Changed, native.NoRemedy},
		{"flushed and made again, different", table(2, chain("base", true, 1), chain("other", true, 3)), true, false, native.Changed, native.NoRemedy},
		{"flushed and made again in part", table(2, chain("new", false, 1)), true, false, native.Emptied, native.ByMerge},
		{"made by canaryd, and then a base chain was emptied", table(2, chain("base", true, 0), chain("other", true, 3)), false, true, native.Emptied, native.NoRemedy},
		{"made by canaryd, and then changed", table(2, chain("base", true, 1), chain("other", true, 3)), false, true, native.Changed, native.NoRemedy},
		{"all rules gone", table(1, chain("base", true, 0), chain("other", true, 0)), false, false, native.Emptied, native.ByRefill},
		{"some rules gone", table(1, chain("base", true, 0), chain("other", true, 1)), false, false, native.Emptied, native.NoRemedy},
	} {
		f := native.Judge(native.Evidence{Was: was, Now: c.now, Missed: true, WitnessLost: c.witnessLost, Replayed: c.replayed})
		if f.Verdict != c.want || f.Remedy != c.remedy {
			t.Errorf("%s: %s (%s), remedy %d; want %s, %d", c.name, f.Verdict, f.Why, f.Remedy, c.want, c.remedy)
		}
	}
}
