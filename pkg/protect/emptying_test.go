package protect

import (
	"path"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

func TestEmptyingOf(t *testing.T) {
	type place struct {
		table rules.TableName
		chain string
	}
	want := map[place]Emptying{
		{rules.Nat, "KUBE-SERVICES"}:                   EmptyNever,
		{rules.Filter, "KUBE-SERVICES"}:                EmptyOften, // rejects for services without endpoints
		{rules.Nat, "KUBE-NODEPORTS"}:                  EmptyOften,
		{rules.Filter, "KUBE-FORWARD"}:                 EmptyNever,
		{rules.Mangle, "KUBE-FORWARD"}:                 EmptyOften,
		{rules.Nat, "KUBE-SEP-QRSTUVWXYZ234567"}:       EmptyUnreferenced,
		{rules.Nat, "KUBE-SVC-QRSTUVWXYZ234567"}:       EmptyUnreferenced,
		{rules.Nat, "KUBE-MARK-DROP"}:                  EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-MASQ"}:               EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-SETMARK"}:            EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-DNAT"}:               EmptyOften,
		{rules.Nat, "CNI-HOSTPORT-SNAT"}:               EmptyOften,
		{rules.Nat, "CNI-DN-31c7af326e67a1a733e30"}:    EmptyBriefly,
		{rules.Nat, "CNI-27c2f15bd9d43ae9b0aa5cdc"}:    EmptyBriefly,
		{rules.Filter, "CNI-FORWARD"}:                  EmptyUnreferenced,
		{rules.Filter, "CNI-ISOLATION-STAGE-1"}:        EmptyUnreferenced,
		{rules.Filter, "CNI-ADMIN"}:                    EmptyOften,
		{rules.Nat, "DOCKER"}:                          EmptyOften,
		{rules.Filter, "DOCKER"}:                       EmptyOften,
		{rules.Filter, "DOCKER-USER"}:                  EmptyOften,
		{rules.Filter, "DOCKER-CT"}:                    EmptyOften,
		{rules.Filter, "DOCKER-FORWARD"}:               EmptyBriefly,
		{rules.Nat, "DOCKER-INGRESS"}:                  EmptyBriefly,
		{rules.Nat, "NETAVARK-HOSTPORT-MASQ"}:          EmptyUnreferenced,
		{rules.Nat, "NETAVARK-HOSTPORT-DNAT"}:          EmptyOften,
		{rules.Nat, "NETAVARK-DN-1D8721804F16F"}:       EmptyBriefly,
		{rules.Filter, "NETAVARK_FORWARD"}:             EmptyOften,
		{rules.Filter, "LIBVIRT_FWI"}:                  EmptyOften,
		{rules.Filter, "ts-input"}:                     EmptyBriefly,
		{rules.Nat, "ts-postrouting"}:                  EmptyOften,
		{rules.Nat, "FLANNEL-POSTRTG"}:                 EmptyBriefly,
		{rules.Nat, "KUBE-HP-QRSTUVWXYZ234567"}:        EmptyUnreferenced,
		{rules.Nat, "KUBE-HOSTPORTS"}:                  EmptyOften,
		{rules.Filter, "KUBE-POD-FW-ABCDEFGHIJKLMNOP"}: EmptyUnreferenced,
		{rules.Filter, "cali-FORWARD"}:                 EmptyOften,
		{rules.Nat, "corp"}:                            EmptyOften,
	}
	got := map[place]Emptying{}
	for p := range want {
		got[p] = EmptyingOf(p.table, p.chain)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, h := range habits {
		for _, glob := range h.chains {
			if _, err := path.Match(glob, ""); err != nil {
				t.Errorf("%q: %v", glob, err)
			}
		}
	}
}
