package protect_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestAuto: auto names the chains, rules and native tables of each owner that has a preset, and
// no chain of a firewall manager. Other words add chains or leave them out.
func TestAuto(t *testing.T) {
	all := []string{
		"KUBE-SERVICES", "KUBE-FIREWALL", "CNI-HOSTPORT-DNAT", "CNI-" + hash24, "KUBE-HOSTPORTS", "DOCKER", "DOCKER-USER",
		"NETAVARK_FORWARD", "LIBVIRT_FWI", "f2b-sshd", "ts-input", "cali-FORWARD", "FLANNEL-FWD", "KUBE-ROUTER-INPUT", "AWS-SNAT-CHAIN-0", "ISTIO_POSTRT",
		"CILIUM_FORWARD", "WEAVE-NPC", "IP-MASQ", "CROWDSEC_CHAIN",
	}
	never := []string{
		"ufw-user-input", "ufw6-user-input", "IN_public", "FWDI_public", "INPUT_direct", "PRE_public_allow", "POST_public", "net2fw", "fw2net", "eth0_in", "logdrop",
		"LOCALINPUT", "DENYIN", "neutron-filter-top", "INPUT", "KUBE-PROXY-CANARY", "WEAVE-CANARY", "OLD_CILIUM_FORWARD", "mine", "",
	}
	tests := []struct {
		list []string
		add  []string // chains that are protected besides all
		out  []string // chains of all that are not protected
	}{
		{list: []string{"auto"}},
		{list: []string{"auto", "docker"}},
		{list: []string{"auto", "-docker"}, out: []string{"DOCKER", "DOCKER-USER"}},
		{list: []string{"-kube", "auto", " -cni "}, out: []string{"KUBE-SERVICES", "KUBE-FIREWALL", "CNI-HOSTPORT-DNAT", "CNI-" + hash24}},
		{list: []string{"auto", "-kube-proxy"}, out: []string{"KUBE-SERVICES"}},
		{list: []string{"auto", "-docker", "DOCKER-USER"}, out: []string{"DOCKER"}},
		{list: []string{"auto", "neutron-*", "mine-*"}, add: []string{"neutron-filter-top"}},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.list, ","), func(t *testing.T) {
			s := selector(t, test.list...)
			want := map[string]bool{}
			for _, chain := range all {
				want[chain] = true
			}
			for _, chain := range never {
				want[chain] = false
			}
			for _, chain := range test.add {
				want[chain] = true
			}
			for _, chain := range test.out {
				want[chain] = false
			}
			got := map[string]bool{}
			for chain := range want {
				got[chain] = s.Protects(chain)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("protected (-want +got):\n%s", d)
			}
			if !s.Auto() {
				t.Error("it is not auto")
			}
		})
	}
	if selector(t, "kube", "cni").Auto() {
		t.Error("kube,cni is auto")
	}
}

// TestAutoIsTheSumOfAllPresets: auto must protect the same as all presets together.
func TestAutoIsTheSumOfAllPresets(t *testing.T) {
	auto, each := selector(t, protect.Auto), selector(t, protect.PresetNames()...)
	opts := cmp.AllowUnexported(protect.Selector{}, owners.Form{})
	same := func(a, b any) string { return cmp.Diff(a, b, opts) }
	if d := same(auto.NamedTables(), each.NamedTables()); d != "" {
		t.Errorf("native tables (-each +auto):\n%s", d)
	}
	for _, o := range owners.All() {
		for _, table := range o.Tables {
			for _, id := range table.IDs() {
				if got, want := auto.ProtectsTable(id), o.Preset != ""; got != want {
					t.Errorf("%s of %s: %t, want %t", id.NFT(), o.Name, got, want)
				}
			}
		}
	}
	for _, table := range []tableid.TableID{tableid.Inet.Table("firewalld"), tableid.Inet.Table("filter"), tableid.IPv4.Table("nat")} {
		if auto.ProtectsTable(table) {
			t.Errorf("%s is protected", table.NFT())
		}
	}
	if selector(t, "auto", "-docker").ProtectsTable(tableid.IPv4.Table("docker-bridges")) {
		t.Error("Docker's native table is protected although Docker is left out")
	}
	for _, rule := range []struct{ preset, table, chain, spec string }{
		{"kube2iam", rules.Nat, "PREROUTING", "-d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.1:8181"},
		{"docker", rules.Raw, "PREROUTING", "-d 127.0.0.1/32 ! -i lo -p tcp -m tcp --dport 8080 -j DROP"},
	} { // a person may have written them
		r, err := rules.ParseRule(rule.spec)
		if err != nil {
			t.Fatal(err)
		}
		for list, want := range map[string]bool{"auto": false, "auto," + rule.preset: true, rule.preset: true} {
			if got := selector(t, strings.Split(list, ",")...).MatchesPreset(rule.table, rule.chain, r); got != want {
				t.Errorf("%s names %s: %t", list, rule.spec, got)
			}
		}
	}
	masquerade, err := rules.ParseRule("-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE")
	if err != nil {
		t.Fatal(err)
	}
	for word, want := range map[string]bool{"auto": true, "auto,-docker": false, "auto,-podman": true} {
		if got := selector(t, strings.Split(word, ",")...).MatchesPreset(rules.Nat, "POSTROUTING", masquerade); got != want {
			t.Errorf("%s: Docker's MASQUERADE is named: %t", word, got)
		}
	}
}

// TestEachChainHasOneOwner: auto can be the sum of all presets because no two presets name the same
// chain, native table or rule. A row may share chains with another row of its preset.
func TestEachChainHasOneOwner(t *testing.T) {
	samples := func(form owners.Form) (names []string) {
		for _, digit := range []string{"2", "a", "A"} {
			for _, n := range []int{1, 13, 16, 24} {
				hash := strings.Repeat(digit, n)
				names = append(names, strings.NewReplacer("HASH", hash, "*", hash).Replace(form.String()))
			}
		}
		return names
	}
	rows := owners.All()
	for _, a := range rows {
		for _, b := range rows {
			if a.Name == b.Name || a.Preset == b.Preset {
				continue
			}
			for _, mine := range a.Chains {
				for _, theirs := range b.Chains {
					for _, form := range theirs.Names {
						for _, f := range mine.Names {
							if slices.ContainsFunc(samples(form), f.Matches) {
								t.Errorf("%s of %s is %s of %s", form, b.Name, f, a.Name)
							}
						}
					}
				}
			}
			for _, mine := range a.Tables {
				for _, theirs := range b.Tables {
					if mine.Name == theirs.Name {
						t.Errorf("table %s is of %s and %s", mine.Name, a.Name, b.Name)
					}
				}
			}
			for _, mine := range a.Straight {
				for _, theirs := range b.Straight {
					if mine.Matches(theirs.Table, theirs.Chain, theirs.Words) {
						t.Errorf("%v is of %s and %s", theirs.Words, a.Name, b.Name)
					}
				}
			}
		}
	}
}

// TestWordsThatLeaveOut: a word that leaves no owner out is an error that names the reason.
func TestWordsThatLeaveOut(t *testing.T) {
	for list, want := range map[string]string{
		"auto,-dockers":         `"-dockers" leaves out no owner: "dockers" is no preset (kube, `,
		"auto,-":                `"-" leaves out no owner`,
		"auto,-DOCKER-USER":     `"-DOCKER-USER" leaves out no owner`,
		"auto,-auto":            `"-auto" leaves out no owner`,
		"kube,cni,-cni":         `"-cni" leaves an owner out of auto, which is not named`,
		"-docker":               `name the owners that are to be guarded, or auto,-docker`,
		"auto,docker,-docker":   `"docker" and "-docker" contradict each other`,
		"auto,kube,-kube-proxy": `"kube" and "-kube-proxy" contradict each other`,
		"autos":                 `"autos" is no preset`,
	} {
		_, err := protect.NewSelector(strings.Split(list, ","))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, want one with %s", list, err, want)
		}
	}
}

// TestWordForChain: the word that names a chain is its owner's preset, the form of an owner
// without a preset, or the chain itself. The word must be neither a preset nor a glob by
// accident.
func TestWordForChain(t *testing.T) {
	for chain, want := range map[string]string{
		"DOCKER": "docker", "cali-FORWARD": "calico", "CILIUM_FORWARD": "cilium", "WEAVE-NPC": "weave", "IP-MASQ": "ip-masq-agent", "CROWDSEC_CHAIN": "crowdsec",
		"mine": "[m]ine", "auto": "[a]uto", "docker": "[d]ocker", "MINE": "MINE", "a-b": "a-b", "a*b": `a\*b`, "[x]": `\[x]`, "nft:ip:x": "nft?ip?x", "INPUT": "", "a,b": "", "": "", "ANY-CANARY": "", "µ": "",
	} {
		got := protect.WordForChain(chain)
		if got != want {
			t.Errorf("%q: %q, want %q", chain, got, want)
		}
		if got != "" && !selector(t, got).Protects(chain) {
			t.Errorf("%q does not protect %q", got, chain)
		}
	}
}
