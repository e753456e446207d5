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
	"github.com/canaryd/canaryd/pkg/tableid"
)

// What owners write, in small.
const (
	kubeProxy = `table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { 172.30.0.1, 172.30.0.2 }; }
	map service-ips { type ipv4_addr . inet_service : verdict; elements = { 172.30.0.1 . 80 : goto service-A/web, 172.30.0.2 . 53 : goto service-B/dns }; }
	map no-endpoint-services { type ipv4_addr . inet_service : verdict; elements = { 172.30.0.9 . 80 : drop, 172.30.0.8 . 80 : drop }; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; ip saddr 10.0.0.0/8 masquerade; }
	chain services { ip daddr . tcp dport vmap @service-ips; ip daddr @cluster-ips reject; }
	chain service-A/web { numgen random mod 2 vmap { 0 : goto endpoint-A1, 1 : goto endpoint-A2 }; }
	chain service-B/dns { numgen random mod 1 vmap { 0 : goto endpoint-B1 }; }
	chain endpoint-A1 { meta l4proto tcp dnat to 10.0.0.1:80; }
	chain endpoint-A2 { meta l4proto tcp dnat to 10.0.0.2:80; }
	chain endpoint-B1 { meta l4proto udp dnat to 10.0.0.3:53; }
}`
	docker = `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
	chain filter-FORWARD { type filter hook forward priority 0; oifname vmap @filter-forward-in-jumps; }
	chain nat-PREROUTING { type nat hook prerouting priority dstnat; fib daddr type local counter jump nat-prerouting-and-output; }
	chain nat-prerouting-and-output { iifname != "docker0" tcp dport 8080 counter dnat to 172.17.0.2:80; }
	chain filter-forward-in__docker0 { counter ct state established accept; counter drop; }
}`
	netavark = `table inet netavark {
	chain POSTROUTING { type nat hook postrouting priority srcnat; ip saddr 10.88.0.0/16 jump nv_1; }
	chain PREROUTING { type nat hook prerouting priority dstnat; fib daddr type local jump NETAVARK-HOSTPORT-DNAT; }
	chain NETAVARK-HOSTPORT-DNAT { tcp dport 8080 jump nv_1_dnat; }
	chain nv_1 { ip daddr 10.88.0.0/16 accept; masquerade; }
	chain nv_1_dnat { tcp dport 8080 dnat ip to 10.88.0.2:80; }
}`
	portmap = `table ip cni_hostport {
	chain prerouting { type nat hook prerouting priority dstnat; fib daddr type local jump hostports; }
	chain hostports { tcp dport 8080 dnat to 10.0.0.2:80 comment "pod"; }
}`
	ipmasq = `table inet cni_plugins_masquerade {
	chain masq_checks { type nat hook postrouting priority srcnat; ip saddr 10.0.0.2 ip daddr != 10.0.0.0/24 masquerade comment "pod"; ip saddr 10.0.0.3 masquerade comment "pod"; }
}`
	calico = `table ip calico {
	set cali40s-1 { type ipv4_addr; elements = { 10.1.0.1, 10.1.0.2 }; }
	chain filter-FORWARD { type filter hook forward priority 0; counter jump cali-FORWARD; }
	chain cali-FORWARD { ip saddr @cali40s-1 counter accept; counter drop; }
}`
	libvirt = `table ip libvirt_network {
	chain forward { type filter hook forward priority 0; counter jump guest_input; }
	chain guest_nat { type nat hook postrouting priority srcnat; ip saddr 192.168.122.0/24 counter masquerade; }
	chain guest_input { oif "lo" counter accept; }
}`
	kindnet = `table inet kindnet-ipmasq {
	set noMasqV4 { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
	chain postrouting { type nat hook postrouting priority srcnat; ip daddr @noMasqV4 return; masquerade; }
}`
)

// again is how owners make their table again: created if it is not there, deleted, created.
func again(text string) string {
	name := strings.TrimSpace(strings.SplitN(text, "{", 2)[0])
	return "add " + name + "\ndelete " + name + "\n" + text
}

// scenes are what may happen to a table. Commits are run one after the other.
var scenes = []struct {
	name    string
	table   string
	by      native.Committer
	commits []string
	want    native.Verdict
	remedy  native.Remedy
}{
	// What flushers do.
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

	// What owners do.
	{"kube-proxy: a service is added", kubeProxy, 0, []string{"add chain ip kube-proxy service-C\nadd rule ip kube-proxy service-C drop\nadd element ip kube-proxy service-ips { 172.30.0.3 . 80 : goto service-C }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: an endpoint goes", kubeProxy, 0, []string{"flush chain ip kube-proxy service-A/web\nadd rule ip kube-proxy service-A/web goto endpoint-A1\nflush chain ip kube-proxy endpoint-A2"}, native.Changed, native.NoRemedy},
	{"kube-proxy: a service goes", kubeProxy, 0, []string{"delete element ip kube-proxy service-ips { 172.30.0.2 . 53 }\ndelete element ip kube-proxy cluster-ips { 172.30.0.2 }\nflush chain ip kube-proxy service-B/dns\nflush chain ip kube-proxy endpoint-B1", "delete chain ip kube-proxy service-B/dns"}, native.Changed, native.NoRemedy},
	{"kube-proxy: services without endpoints go", kubeProxy, 0, []string{"delete element ip kube-proxy no-endpoint-services { 172.30.0.9 . 80, 172.30.0.8 . 80 }\ndelete element ip kube-proxy cluster-ips { 172.30.0.2 }"}, native.Changed, native.NoRemedy},
	{"kube-proxy: flushed, and synced in full", kubeProxy, 0, []string{"flush ruleset", strings.Replace(kubeProxy, "10.0.0.1:80", "10.0.0.7:80", 1)}, native.Changed, native.NoRemedy},
	{"kube-proxy: --cleanup", kubeProxy, native.Owner, []string{"delete table ip kube-proxy"}, native.Changed, native.NoRemedy},
	{"docker: reload", docker, 0, []string{again(strings.Replace(docker, "8080", "9090", 1))}, native.Changed, native.NoRemedy},
	{"docker: its last port goes", docker, 0, []string{"flush chain ip docker-bridges nat-prerouting-and-output"}, native.Changed, native.NoRemedy},
	{"docker: its last network goes", docker, 0, []string{"delete element ip docker-bridges filter-forward-in-jumps { \"docker0\" }\nflush chain ip docker-bridges filter-forward-in__docker0\ndelete chain ip docker-bridges filter-forward-in__docker0"}, native.Changed, native.NoRemedy},
	{"docker: writes onto a table that was flushed", docker, 0, []string{"flush ruleset", "table ip docker-bridges { map filter-forward-in-jumps { type ifname : verdict; }; chain nat-prerouting-and-output { tcp dport 9090 counter dnat to 172.17.0.3:80; }; }"}, native.Emptied, native.ByRefill},
	{"netavark: a container more", netavark, 0, []string{"add rule inet netavark NETAVARK-HOSTPORT-DNAT tcp dport 9090 jump nv_1_dnat"}, native.Changed, native.NoRemedy},
	{"netavark: its last network goes", netavark, 0, []string{"flush chain inet netavark POSTROUTING\nflush chain inet netavark NETAVARK-HOSTPORT-DNAT\nflush chain inet netavark nv_1\ndelete chain inet netavark nv_1"}, native.Changed, native.NoRemedy},
	{"portmap: its last pod goes", portmap, 0, []string{"flush chain ip cni_hostport hostports"}, native.Changed, native.NoRemedy},
	{"ipmasq: its last pod goes", ipmasq, 0, []string{"flush chain inet cni_plugins_masquerade masq_checks"}, native.Changed, native.NoRemedy},
	{"calico: makes its table again", calico, 0, []string{again(strings.Replace(calico, "10.1.0.2", "10.1.0.3", 1))}, native.Changed, native.NoRemedy},
	{"calico: a set loses its last pods", calico, 0, []string{"flush set ip calico cali40s-1"}, native.Changed, native.NoRemedy},
	{"libvirt: a network goes", libvirt, 0, []string{"flush chain ip libvirt_network guest_nat"}, native.Changed, native.NoRemedy},
	{"kindnet: syncs", kindnet, 0, []string{again(strings.Replace(kindnet, "10.0.0.0", "11.0.0.0", 1))}, native.Changed, native.NoRemedy},
	{"an owner makes the same again", calico, 0, []string{again(calico)}, native.Intact, native.NoRemedy},
	{"renamed: deleted and made under another name", calico, 0, []string{"delete table ip calico\ntable ip calico2 { }"}, native.Unattributed, native.NoRemedy},
}

// saidOf names the large removals of a scene that counts as the owner's doing. They are reported
// unless the process is known to be the owner.
var saidOf = map[string][]string{
	"docker: its last port goes":        {"chain nat-prerouting-and-output: 1 gone, 0 left"},
	"netavark: its last network goes":   {"chain POSTROUTING: 1 gone, 0 left", "chain NETAVARK-HOSTPORT-DNAT: 1 gone, 0 left"},
	"portmap: its last pod goes":        {"chain hostports: 1 gone, 0 left"},
	"ipmasq: its last pod goes":         {"chain masq_checks: 2 gone, 0 left"},
	"calico: a set loses its last pods": {"set cali40s-1: 2 gone, 0 left"},
	"libvirt: a network goes":           {"chain guest_nat: 1 gone, 0 left"},
}

// TestJudgeOfCommits has each of them done on the kernel and judged by its notifications.
func TestJudgeOfCommits(t *testing.T) {
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
					nstest.CommandInput(t, commit, "nft", "-f", "-")
				}
				now := capture(t, conn)
				e := native.Evidence{Was: was, Now: now.Tables[id], Habits: native.HabitsOf(id)}
				for _, deeds := range heard.upTo(t, now.Genid) {
					if d := deeds[id]; d != nil {
						d.By = s.by
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

// stage makes one table and the witnesses, and nothing else.
func stage(t *testing.T, conn *nft.Conn, text string) (*native.Table, tableid.TableID) {
	t.Helper()
	nstest.Command(t, "nft", "flush", "ruleset")
	nstest.CommandInput(t, text, "nft", "-f", "-")
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

// remedied does what a finding asks for and wants nothing lost.
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
	}
	if err != nil {
		t.Fatal(err)
	}
	b.Finish()
	if err := b.Send(); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes(t, conn, was) {
		// What the owner wrote since is its own.
		if c.Gone || c.Empty || c.Lost > 0 && c.New == 0 {
			t.Errorf("after the replay: %v", c)
		}
	}
}

// TestJudgeOfWhatWasMissed: without notifications the witness says what a reading cannot.
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
		want        native.Verdict
		remedy      native.Remedy
	}{
		{"gone with the witness", nil, true, native.TableDeleted, native.ByCreate},
		{"gone without the witness", nil, false, native.Unattributed, native.NoRemedy},
		{"made again, the same", table(2, was.Chains...), true, native.Intact, native.NoRemedy},
		{"made again, the witness stands", table(2, chain("base", true, 1)), false, native.Changed, native.NoRemedy},
		{"flushed and made again, different", table(2, chain("base", true, 1), chain("other", true, 3)), true, native.Changed, native.NoRemedy},
		{"flushed and made again in part", table(2, chain("new", false, 1)), true, native.Emptied, native.ByRefill},
		{"all rules gone", table(1, chain("base", true, 0), chain("other", true, 0)), false, native.Emptied, native.ByRefill},
		{"some rules gone", table(1, chain("base", true, 0), chain("other", true, 1)), false, native.Changed, native.NoRemedy},
	} {
		f := native.Judge(native.Evidence{Was: was, Now: c.now, Missed: true, WitnessLost: c.witnessLost})
		if f.Verdict != c.want || f.Remedy != c.remedy {
			t.Errorf("%s: %s (%s), remedy %d; want %s, %d", c.name, f.Verdict, f.Why, f.Remedy, c.want, c.remedy)
		}
	}
}
