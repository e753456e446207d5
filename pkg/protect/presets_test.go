package protect_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestEveryPresetNamesItsOwnersChainsAndNoOthers(t *testing.T) {
	const net12, net13 = "4f5a6b7c8d9e", "1D8721804F16F"
	tests := map[string]struct{ yes, no []string }{
		"docker": {
			[]string{"DOCKER", "DOCKER-USER", "DOCKER-FORWARD", "DOCKER-BRIDGE", "DOCKER-CT", "DOCKER-INTERNAL", "DOCKER-INGRESS", "DOCKER-ISOLATION-STAGE-1", "DOCKER-ISOLATION-STAGE-2"},
			[]string{"DOCKER-MINE", "DOCKER-ISOLATION-STAGE-3", "docker", "DOCKER-", "XDOCKER", "DOCKER-CANARY"},
		},
		"podman": {
			[]string{
				"NETAVARK_FORWARD", "NETAVARK_INPUT", "NETAVARK_ISOLATION_1", "NETAVARK_ISOLATION_2", "NETAVARK_ISOLATION_3",
				"NETAVARK-HOSTPORT-DNAT", "NETAVARK-HOSTPORT-SETMARK", "NETAVARK-HOSTPORT-MASQ", "NETAVARK-" + net13, "NETAVARK-DN-" + net13,
			},
			[]string{"NETAVARK-", "NETAVARK-" + net12, "NETAVARK-" + strings.ToLower(net13), "NETAVARK-DN-", "NETAVARK-SN-" + net13, "NETAVARK_OTHER"},
		},
		"libvirt": {
			[]string{"LIBVIRT_INP", "LIBVIRT_OUT", "LIBVIRT_FWO", "LIBVIRT_FWI", "LIBVIRT_FWX", "LIBVIRT_PRT"},
			[]string{"LIBVIRT_", "LIBVIRT_OTHER", "libvirt-in", "FI-vnet0"},
		},
		"tailscale": {[]string{"ts-input", "ts-forward", "ts-postrouting"}, []string{"ts-", "ts-output", "TS-INPUT"}},
	}
	for preset, test := range tests {
		s := selector(t, preset)
		for _, chain := range test.yes {
			if !s.Protects(chain) {
				t.Errorf("%s does not protect %s", preset, chain)
			}
			for _, other := range protect.PresetNames() {
				if other != preset && selector(t, other).Protects(chain) {
					t.Errorf("%s protects %s's %s", other, preset, chain)
				}
			}
		}
		for _, chain := range append(test.no, "KUBE-SERVICES", "CNI-FORWARD", "INPUT", "POSTROUTING") {
			if s.Protects(chain) {
				t.Errorf("%s protects %s", preset, chain)
			}
		}
	}
	for _, preset := range protect.PresetNames() {
		if _, err := protect.NewSelector([]string{preset}); err != nil {
			t.Error(err)
		}
	}
}

func TestRulesThatDockerPutsIntoBuiltInChainsAreToldByTheirForm(t *testing.T) {
	type place struct {
		table rules.TableName
		chain string
	}
	post, forward := place{rules.Nat, "POSTROUTING"}, place{rules.Filter, "FORWARD"}
	raw, input, output := place{rules.Raw, "PREROUTING"}, place{rules.Filter, "INPUT"}, place{rules.Mangle, "OUTPUT"}
	const vni = `-m u32 --u32 "0xc&0xffffff00=0x100100"`
	tests := []struct {
		at   place
		spec string
		want bool
	}{
		{post, "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE", true},
		{post, "-s fd00:1234::/64 ! -o br-4f5a6b7c8d9e -j MASQUERADE", true},
		{post, "-s 172.18.0.0/16 ! -o docker_gwbridge -j MASQUERADE", true},
		{post, "-s 172.18.0.0/16 ! -o br-4f5a6b7c8d9e -j SNAT --to-source 192.0.2.1", true},
		{post, "-o docker0 -m addrtype --src-type LOCAL -j MASQUERADE", true},
		{post, "-s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE", true},
		{post, "-s 172.17.0.2/32 -d 172.17.0.2/32 -p sctp -m sctp --dport 80 -j MASQUERADE", true},
		{forward, "-o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", true},
		{forward, "-i br-4f5a6b7c8d9e ! -o br-4f5a6b7c8d9e -j ACCEPT", true},
		{forward, "-i docker0 -o docker0 -j DROP", true},

		{raw, "-d 172.17.0.2/32 ! -i docker0 -j DROP", true},
		{raw, "-d fd00:1234::2/128 ! -i br-4f5a6b7c8d9e -j DROP", true},
		{raw, "-d 127.0.0.1/32 ! -i lo -p tcp -m tcp --dport 8080 -j DROP", true},
		{output, "-p udp -m udp --dport 4789 " + vni + " -j MARK --set-xmark 0xd0c4e3/0xffffffff", true},
		{input, "-p udp -m udp --dport 4789 " + vni + " -m policy --dir in --pol ipsec -j ACCEPT", true},
		{input, "-p udp -m udp --dport 4789 " + vni + " -j DROP", true},

		{raw, "-d 172.17.0.2/32 ! -i eth0 -j DROP", false},
		{raw, "-d 172.17.0.2/32 -i docker0 -j DROP", false},
		{raw, "-d 192.0.2.1/32 ! -i lo -p tcp -m tcp --dport 8080 -j DROP", false},
		{input, "-p udp -m udp --dport 4789 -j DROP", false},
		{output, "-p udp -m udp --dport 4789 " + vni + " -j MARK --set-xmark 0x1/0xffffffff", false},
		{post, "-s 10.8.0.0/24 ! -o tun0 -j MASQUERADE", false},    // OpenVPN's
		{post, "-s 10.8.0.0/24 ! -o br-lan -j MASQUERADE", false},  // a router's
		{post, "-s 172.17.0.0/16 -o docker0 -j MASQUERADE", false}, // not negated
		{post, "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE --random", false},
		{post, "-s 172.17.0.2/32 -d 172.17.0.3/32 -p tcp -m tcp --dport 80 -j MASQUERADE", false},
		{post, "-s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m udp --dport 80 -j MASQUERADE", false},
		{post, "-j MASQUERADE", false},
		{post, "", false},
		{post, `-m comment --comment "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE" -j MASQUERADE`, false},
		{forward, "-i docker0 -o docker_gwbridge -j ACCEPT", false},
		{forward, "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE", false},
		{place{rules.Filter, "INPUT"}, "-i docker0 -o docker0 -j ACCEPT", false},
		{place{rules.Mangle, "POSTROUTING"}, "-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE", false},
	}
	docker, all := selector(t, "docker"), selector(t, "kube", "cni", "podman", "libvirt", "tailscale", "*")
	for _, test := range tests {
		r, err := rules.ParseRule(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := docker.MatchesPreset(test.at.table, test.at.chain, r); got != test.want {
			t.Errorf("%v %s is named: %t", test.at, test.spec, got)
		}
		if all.MatchesPreset(test.at.table, test.at.chain, r) {
			t.Errorf("%v %s is named by another preset", test.at, test.spec)
		}
	}
}

func TestANamedRuleIsAJumpWithAnAnchorAndNoNeighbour(t *testing.T) {
	text := `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -o eth0 -j MASQUERADE
-A POSTROUTING -s 172.18.0.0/16 ! -o br-4f5a6b7c8d9e -j MASQUERADE
-A POSTROUTING -o eth1 -j MASQUERADE
-A POSTROUTING -m comment --comment "canaryd-witness:1"
-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE
COMMIT
`
	tables := savefile.Tables(t, text)
	mark := func(r rules.Rule) bool { return strings.Contains(r.Spec, "canaryd-") }
	got := selector(t, "docker").Protection().Extract(tables[rules.Nat], mark)
	rule := func(spec string) rules.Rule { r, _ := rules.ParseRule(spec); return r }
	want := []rules.Jump{
		{Chain: "PREROUTING", Rule: rule("-m addrtype --dst-type LOCAL -j DOCKER"), Anchor: rules.Anchor{Position: rules.Top}},
		{Chain: "POSTROUTING", Rule: rule("-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"), Anchor: rules.Anchor{Position: rules.Top}, Named: true},
		{
			Chain: "POSTROUTING", Rule: rule("-s 172.18.0.0/16 ! -o br-4f5a6b7c8d9e -j MASQUERADE"), Named: true,
			Anchor: rules.Anchor{Position: rules.Behind, Neighbour: rule("-o eth0 -j MASQUERADE")},
		},
		{
			Chain: "POSTROUTING", Rule: rule("-s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE"),
			Anchor: rules.Anchor{Position: rules.Bottom}, Named: true,
		},
	}
	if d := cmp.Diff(want, got.Jumps); d != "" {
		t.Errorf("jumps (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"DOCKER", "", "", ""}, []string{got.Jumps[0].Into(), got.Jumps[1].Into(), got.Jumps[2].Into(), got.Jumps[3].Into()}); d != "" {
		t.Errorf("they lead into (-want +got):\n%s", d)
	}
	own, rest := got.Split(func(string) bool { return true })
	if len(own.Jumps) != 1 || len(rest.Jumps) != 3 {
		t.Errorf("a declared source that claims every chain claims %d jumps and leaves %d, want 1 and 3", len(own.Jumps), len(rest.Jumps))
	}
}

// TestRulesOfNodeLocalDNS: the preset must recognise each rule of the cache by its comment, but
// no rule that only resembles it.
func TestRulesOfNodeLocalDNS(t *testing.T) {
	const skip, allow = `-m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK`, `-m comment --comment "NodeLocal DNS Cache: allow DNS traffic" -j ACCEPT`
	s := selector(t, "node-local-dns")
	for _, test := range []struct {
		table, chain, spec string
		want               bool
	}{
		{rules.Raw, "PREROUTING", "-d 169.254.20.10/32 -p udp -m udp --dport 53 " + skip, true},
		{rules.Raw, "PREROUTING", "-d fd00::10/128 -p tcp -m tcp --dport 53 " + skip, true},
		{rules.Raw, "OUTPUT", "-s 169.254.20.10/32 -p udp -m udp --sport 53 " + skip, true},
		{rules.Raw, "OUTPUT", "-d 169.254.20.10/32 -p udp -m udp --dport 53 " + skip, true},
		{rules.Raw, "OUTPUT", "-d 169.254.20.10/32 -p tcp -m tcp --dport 8080 " + skip, true},
		{rules.Raw, "OUTPUT", "-s 169.254.20.10/32 -p tcp -m tcp --sport 8080 " + skip, true},
		{rules.Filter, "INPUT", "-d 169.254.20.10/32 -p tcp -m tcp --dport 53 " + allow, true},
		{rules.Filter, "OUTPUT", "-s 169.254.20.10/32 -p udp -m udp --sport 53 " + allow, true},

		{rules.Raw, "PREROUTING", "-d 169.254.20.10/32 -p udp -m udp --dport 53 -j NOTRACK", false},
		{rules.Raw, "PREROUTING", "-s 169.254.20.10/32 -p udp -m udp --sport 53 " + skip, false},
		{rules.Raw, "PREROUTING", "-d 169.254.20.10/32 -p udp -m tcp --dport 53 " + skip, false},
		{rules.Raw, "PREROUTING", "-d 169.254.20.10/32 -p udp -m udp --dport 53 " + allow, false},
		{rules.Mangle, "PREROUTING", "-d 169.254.20.10/32 -p udp -m udp --dport 53 " + skip, false},
		{rules.Filter, "FORWARD", "-d 169.254.20.10/32 -p tcp -m tcp --dport 53 " + allow, false},
		{rules.Filter, "INPUT", "-p tcp -m tcp --dport 53 " + allow, false},
	} {
		r, err := rules.ParseRule(test.spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.MatchesPreset(test.table, test.chain, r); got != test.want {
			t.Errorf("%s %s %s is named: %t", test.table, test.chain, test.spec, got)
		}
	}
	if s.Protects("KUBE-SERVICES") {
		t.Error("it protects chains")
	}
}
