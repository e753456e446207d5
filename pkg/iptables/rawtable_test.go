package iptables

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// rawRules returns the bytes of the rules of these chains.
func rawRules(raw nft.RawTable, names nft.RawChains) map[string][]string {
	all := map[string][]string{}
	for name := range names.(nft.ChainMap) {
		c, found := raw.Chains.Chain(name)
		if !found {
			continue
		}
		all[name] = []string{}
		for r := range c.Rules {
			all[name] = append(all[name], string(r.Expressions))
		}
	}
	return all
}

// TestATableAsRawObjects: the mirror shows the same chains and rules as a dump.
// Only chains with other rules get another version.
func TestATableAsRawObjects(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		runTool(t, largeTable(100), program(NFT, rules.IPv4, "-restore"))
		k := openKernel(t, Config{Backend: NFT})
		conn, err := nft.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		id := rules.IPv4.Table(rules.Nat)
		versions := func() map[string]uint64 {
			t.Helper()
			found := map[string]uint64{}
			err := k.RawTable(t.Context(), id, func(raw nft.RawTable) error {
				want, _, err := conn.RawTable(id)
				if err != nil {
					return err
				}
				if diff := cmp.Diff(rawRules(want, want.Chains), rawRules(raw, want.Chains)); diff != "" {
					t.Errorf("(-dumped +mirrored):\n%.2000s", diff)
				}
				for name := range want.Chains.(nft.ChainMap) {
					c, _ := raw.Chains.Chain(name)
					found[name] = c.Version
					if (c.Base == nil) != (want.Chains.(nft.ChainMap)[name].Base == nil) || want.Genid != raw.Genid {
						t.Errorf("%s at genid %d is %+v, want %+v at %d", name, raw.Genid, c.Base, want.Chains.(nft.ChainMap)[name].Base, want.Genid)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return found
		}
		changed := func(before, now map[string]uint64) []string {
			var names []string
			for name, v := range now {
				if before[name] != v {
					names = append(names, name)
				}
			}
			slices.Sort(names)
			return names
		}
		first := versions()
		if again := versions(); len(changed(first, again)) > 0 || slices.Contains(slices.Collect(maps.Values(first)), 0) {
			t.Errorf("nothing happened, and versions changed: %v to %v", first, again)
		}
		runTool(t, "", program(NFT, rules.IPv4, ""), "-t", "nat", "-A", "MANY-3", "-j", "ACCEPT")
		second := versions()
		if diff := cmp.Diff([]string{"MANY-3"}, changed(first, second)); diff != "" {
			t.Errorf("chains with another version (-want +got):\n%s", diff)
		}
		mustRead(t, k, rules.IPv4) // its text is still needed
		runTool(t, "delete table ip nat", "nft", "-f", "-")
		if got := versions(); len(got) > 0 {
			t.Errorf("the table is gone, and has chains %v", got)
		}
		runTool(t, largeTable(100), program(NFT, rules.IPv4, "-restore"))
		if third := versions(); len(changed(second, third)) != len(third) {
			t.Errorf("of a new table only %v have a new version", changed(second, third))
		}
		oops := errors.New("oops")
		if err := k.RawTable(t.Context(), id, func(nft.RawTable) error { return oops }); !errors.Is(err, oops) {
			t.Errorf("got %v", err)
		}
		if err := k.RawTable(t.Context(), rules.IPv4.Table("kube-proxy"), nil); !errors.Is(err, ErrNoRaw) {
			t.Errorf("of a table that is not mirrored: %v", err)
		}
	})
}
