package protect_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestProtectsTable: words protect the tables that they name, but never tables of iptables and
// canaryd.
func TestProtectsTable(t *testing.T) {
	s := selector(t, "tailscale", "KUBE-*", "nft:ip:*", "nft:inet:net[a]vark", "nft:bridge:b?", "nft:*:their*")
	if !s.Native() || selector(t, "tailscale", "MY-*").Native() {
		t.Error("whether native tables are named is not what the words say")
	}
	for id, want := range map[tableid.TableID]bool{
		tableid.IPv4.Table("kube-proxy"):      true,
		tableid.IPv4.Table("docker-bridges"):  true,
		tableid.IPv6.Table("kube-proxy"):      false,
		tableid.Inet.Table("netavark"):        true,
		tableid.Inet.Table("netavarks"):       false,
		tableid.Bridge.Table("br"):            true,
		tableid.IPv4.Table("nat"):             false,
		tableid.IPv4.Table("security"):        false,
		tableid.IPv4.Table("canaryd-witness"): false,
		tableid.IPv4.Table("canaryd-keeper"):  false,
		tableid.IPv4.Table("a/b"):             true,
		tableid.ARP.Table("their/own"):        true,
		tableid.Netdev.Table("their/own"):     true,
		tableid.IPv4.Table("mangle"):          false,
	} {
		if got := s.ProtectsTable(id); got != want {
			t.Errorf("%s is protected: %t, want %t", id.NFT(), got, want)
		}
	}
	if s.Protects("nft:ip:nat") || !s.Protects("KUBE-SERVICES") {
		t.Error("a word for native tables says something of chains")
	}
}

// TestNativeWords: an error names the bad word and its fault.
func TestNativeWords(t *testing.T) {
	for word, want := range map[string]string{
		"nft:":                   "is not nft:FAMILY:NAME",
		"nft:ip":                 "is not nft:FAMILY:NAME",
		"nft:ip:":                "is not nft:FAMILY:NAME",
		"nft:ipv4:kube-proxy":    "names no family",
		"nft:ip:a[":              "is not a glob of table names",
		"nft:ip:nat":             "is a table of iptables",
		"nft:ip6:filter":         "is a table of iptables",
		"nft:inet:canaryd-other": "is a table of canaryd's own",
	} {
		_, err := protect.NewSelector([]string{"cni", word})
		if err == nil || !strings.Contains(err.Error(), `"`+word+`" `+want) {
			t.Errorf("%s: %v, want that it %s", word, err, want)
		}
	}
	selector(t, "nft:inet:nat", "nft:arp:filter", "nft:netdev:*", "nft:*:*", "nft:*:mine")
}

// TestNamedTables: words and presets name tables exactly; globs and words for all families do
// not.
func TestNamedTables(t *testing.T) {
	got := selector(t, "podman", "nft:ip:*", "nft:inet:a/b", "nft:*:mine", "nft:inet:[c]").NamedTables()
	if diff := cmp.Diff([]tableid.TableID{tableid.Inet.Table("netavark"), tableid.Inet.Table("a/b")}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestPresetsNameTheirOwnersTables: each preset names the tables that its owner writes with
// nftables, and no tables of other owners.
func TestPresetsNameTheirOwnersTables(t *testing.T) {
	tables := map[string][]tableid.TableID{
		"kube":      {tableid.IPv4.Table("kube-proxy"), tableid.IPv6.Table("kube-proxy")},
		"cni":       {tableid.IPv4.Table("cni_hostport"), tableid.IPv6.Table("cni_hostport"), tableid.Inet.Table("cni_plugins_masquerade")},
		"docker":    {tableid.IPv4.Table("docker-bridges"), tableid.IPv6.Table("docker-bridges")},
		"podman":    {tableid.Inet.Table("netavark")},
		"libvirt":   {tableid.IPv4.Table("libvirt_network"), tableid.IPv6.Table("libvirt_network")},
		"calico":    {tableid.IPv4.Table("calico"), tableid.IPv6.Table("calico"), tableid.ARP.Table("calico-arp")},
		"crio":      {tableid.IPv4.Table("crio-hostports"), tableid.IPv6.Table("crio-hostports")},
		"lxd":       {tableid.Inet.Table("lxd")},
		"incus":     {tableid.Inet.Table("incus")},
		"networkd":  {tableid.IPv4.Table("io.systemd.nat"), tableid.IPv6.Table("io.systemd.nat")},
		"crowdsec":  {tableid.IPv4.Table("crowdsec"), tableid.IPv6.Table("crowdsec6")},
		"aws-node":  {tableid.IPv4.Table("aws-cni")},
		"flannel":   {tableid.IPv4.Table("flannel-ipv4"), tableid.IPv6.Table("flannel-ipv6")},
		"tailscale": nil, "fail2ban": nil, "kube-router": nil, "istio": nil, "cilium": nil, "weave": nil, "kube-ovn": nil,
		"openshift-sdn": nil, "antrea": nil, "ip-masq-agent": nil, "microk8s": nil, "kube2iam": nil, "node-local-dns": nil,
		"ovn-kubernetes": {tableid.Inet.Table("ovn-kubernetes")},
	}
	for _, preset := range protect.PresetNames() {
		want, known := tables[preset]
		if !known {
			t.Errorf("the test does not know %s", preset)
		}
		s := selector(t, preset)
		if s.Native() != (len(want) > 0) {
			t.Errorf("%s names native tables: %t", preset, s.Native())
		}
		for owner, ids := range tables {
			for _, id := range ids {
				if word := protect.WordFor(id); word != owner {
					t.Errorf("%s is named by %s", id.NFT(), word)
				}
				if got := s.ProtectsTable(id); got != (owner == preset) {
					t.Errorf("%s protects %s: %t", preset, id.NFT(), got)
				}
			}
		}
		if s.ProtectsTable(tableid.Inet.Table("kube-proxy")) || s.ProtectsTable(tableid.IPv4.Table("nat")) {
			t.Errorf("%s protects a table that is no owner's", preset)
		}
	}
	other := tableid.Inet.Table("mine")
	if word := protect.WordFor(other); word != "nft:inet:mine" || !selector(t, word).ProtectsTable(other) {
		t.Errorf("%s is named by %s", other.NFT(), word)
	}
}
