package iptables

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// These names are for tests outside of this package, which may import pkg/reload.
var (
	OnBoth     = onBoth
	OpenKernel = openKernel
	Program    = program
	TryTool    = tryTool
	DirectSeed = directSeed
	NamedLines = namedLines
)

// RuleBytes returns the bytes of each rule of these chains, in their order,
// without counters, and on legacy without the kernel's private bytes.
func RuleBytes(t *testing.T, backend Backend, family rules.Family, tables rules.Ruleset) map[Place][]string {
	t.Helper()
	found := map[Place][]string{}
	if backend == NFT {
		conn := dialTest(t)
		for name, table := range tables {
			for _, c := range table.Chains {
				place := Place{Table: name, Chain: c.Name}
				err := conn.EachRule(family, name, c.Name, func(m nft.RuleMessage) error {
					if family == rules.IPv4 {
						maskWideOfNFT(t, m.Rule)
					}
					found[place] = append(found[place], string(m.Rule.Expressions)+"\x00"+string(m.Rule.Userdata))
					return nil
				})
				if err != nil {
					t.Fatalf("reading %v: %v", place, err)
				}
			}
		}
		return found
	}
	socket, err := openXT(family)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.close()
	err = socket.walk(t.Context(), nil, func(table rules.TableName, info xtInfo, data []byte) error {
		var place Place
		return walkEntries(family, info, data, xtVisitor{
			chain: func(name string, _ int) { place = Place{Table: table, Chain: name} },
			rule: func(r xtRule) {
				if tables[table].Chain(place.Chain) == nil {
					return
				}
				whole := r.entry.whole
				if r.entry.isStandard {
					whole = whole[:len(whole)-xtStandardLen+xtExtDataAt]
				}
				found[place] = append(found[place], string(whole))
			},
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// maskWideOfNFT clears the unused ends of wide addresses in a rule of IPv4, as
// the walk of x_tables does.
func maskWideOfNFT(t *testing.T, rule nft.Rule) {
	t.Helper()
	err := rule.Each(func(e nft.Expression) error {
		if e.Name == "match" || e.Name == "target" {
			revision := nft.AttrPath(e.Data, unix.NFTA_MATCH_REV)
			maskWideIn(nft.String(nft.AttrPath(e.Data, unix.NFTA_MATCH_NAME)), revision[3], nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
