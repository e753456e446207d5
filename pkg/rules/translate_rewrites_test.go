package rules

import "testing"

// TestRewrites: each target that translates counts, in a built-in chain and in others. A mark,
// a jump, and a rule of another family or table do not count.
func TestRewrites(t *testing.T) {
	rule := func(spec string) Rule {
		r, err := ParseRule(spec)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	chain := func(spec string) Section {
		return Section{Chains: []Chain{{Name: "KUBE-X", Rules: []Rule{rule(spec)}}}}
	}
	jump := func(spec string) Section {
		return Section{Jumps: []Jump{{Chain: "POSTROUTING", Rule: rule(spec), Named: true}}}
	}
	translates := map[string]string{
		"DNAT": "-p tcp -j DNAT --to-destination 10.0.0.1:80", "SNAT": "-j SNAT --to-source 192.0.2.1", "MASQUERADE": "-j MASQUERADE --random-fully",
		"REDIRECT": "-p tcp -j REDIRECT --to-ports 8080", "NETMAP": "-j NETMAP --to 10.0.0.0/24",
	}
	for name, spec := range translates {
		for where, section := range map[string]Section{"chain": chain(spec), "built-in chain": jump(spec)} {
			g := Generation{IPv4.Table(Nat): section}
			if !g.Rewrites(IPv4) {
				t.Errorf("%s in a %s is said to translate nothing", name, where)
			}
			if g.Rewrites(IPv6) || (Generation{IPv4.Table(Filter): section}).Rewrites(IPv4) {
				t.Errorf("%s of another family or table counts", name)
			}
		}
	}
	for _, spec := range []string{"-j MARK --set-xmark 0x4000/0x4000", "-j RETURN", "-j KUBE-MARK-MASQ", "-j KUBE-DNAT", "-p tcp"} {
		if (Generation{IPv4.Table(Nat): chain(spec)}).Rewrites(IPv4) {
			t.Errorf("%s is said to translate", spec)
		}
	}
	if (Generation)(nil).Rewrites(IPv4) {
		t.Error("no generation at all translates")
	}
}
