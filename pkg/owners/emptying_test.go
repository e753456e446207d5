package owners_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestEmptyingOf(t *testing.T) {
	type place struct {
		table rules.TableName
		chain string
	}
	want := map[place]owners.Emptying{
		{rules.Nat, "KUBE-SERVICES"}:                   owners.EmptyNever,
		{rules.Filter, "KUBE-SERVICES"}:                owners.EmptyOften, // rejects for services without endpoints
		{rules.Nat, "KUBE-NODEPORTS"}:                  owners.EmptyOften,
		{rules.Filter, "KUBE-FORWARD"}:                 owners.EmptyNever,
		{rules.Mangle, "KUBE-FORWARD"}:                 owners.EmptyOften,
		{rules.Nat, "KUBE-SEP-QRSTUVWXYZ234567"}:       owners.EmptyUnreferenced,
		{rules.Nat, "KUBE-SVC-QRSTUVWXYZ234567"}:       owners.EmptyUnreferenced,
		{rules.Nat, "KUBE-MARK-DROP"}:                  owners.EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-MASQ"}:               owners.EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-SETMARK"}:            owners.EmptyUnreferenced,
		{rules.Nat, "CNI-HOSTPORT-DNAT"}:               owners.EmptyOften,
		{rules.Nat, "CNI-HOSTPORT-SNAT"}:               owners.EmptyOften,
		{rules.Nat, "CNI-HOSTPORT-NEW"}:                owners.EmptyOften, // from a later version
		{rules.Nat, "NETAVARK-HOSTPORT-NEW"}:           owners.EmptyOften,
		{rules.Nat, "CNI-DN-31C7AF326E67A1A733E30"}:    owners.EmptyBriefly, // with another hash
		{rules.Nat, "KUBE-SVC-1234"}:                   owners.EmptyUnreferenced,
		{rules.Nat, "KUBE-SVC-"}:                       owners.EmptyOften,
		{rules.Nat, "CNI-DN-31c7af326e67a1a733e30"}:    owners.EmptyBriefly,
		{rules.Nat, "CNI-27c2f15bd9d43ae9b0aa5cdc"}:    owners.EmptyBriefly,
		{rules.Filter, "CNI-FORWARD"}:                  owners.EmptyUnreferenced,
		{rules.Filter, "CNI-ISOLATION-STAGE-1"}:        owners.EmptyUnreferenced,
		{rules.Filter, "CNI-ADMIN"}:                    owners.EmptyOften,
		{rules.Nat, "DOCKER"}:                          owners.EmptyOften,
		{rules.Filter, "DOCKER"}:                       owners.EmptyOften,
		{rules.Filter, "DOCKER-USER"}:                  owners.EmptyOften,
		{rules.Filter, "DOCKER-CT"}:                    owners.EmptyOften,
		{rules.Filter, "DOCKER-FORWARD"}:               owners.EmptyBriefly,
		{rules.Nat, "DOCKER-INGRESS"}:                  owners.EmptyBriefly,
		{rules.Nat, "NETAVARK-HOSTPORT-MASQ"}:          owners.EmptyUnreferenced,
		{rules.Nat, "NETAVARK-HOSTPORT-DNAT"}:          owners.EmptyOften,
		{rules.Nat, "NETAVARK-DN-1D8721804F16F"}:       owners.EmptyBriefly,
		{rules.Filter, "NETAVARK_FORWARD"}:             owners.EmptyOften,
		{rules.Filter, "LIBVIRT_FWI"}:                  owners.EmptyOften,
		{rules.Filter, "ts-input"}:                     owners.EmptyBriefly,
		{rules.Nat, "ts-postrouting"}:                  owners.EmptyOften,
		{rules.Nat, "FLANNEL-POSTRTG"}:                 owners.EmptyBriefly,
		{rules.Nat, "KUBE-HP-QRSTUVWXYZ234567"}:        owners.EmptyUnreferenced,
		{rules.Nat, "KUBE-HOSTPORTS"}:                  owners.EmptyOften,
		{rules.Filter, "KUBE-POD-FW-ABCDEFGHIJKLMNOP"}: owners.EmptyUnreferenced,
		{rules.Filter, "cali-FORWARD"}:                 owners.EmptyOften,
		{rules.Nat, "corp"}:                            owners.EmptyOften,
	}
	got := map[place]owners.Emptying{}
	for p := range want {
		got[p] = owners.EmptyingOf(p.table, p.chain)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
