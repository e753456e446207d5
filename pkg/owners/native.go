package owners

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Table is a native nftables table, in each family in which its owner makes one.
type Table struct {
	Name     string
	Families []tableid.Family
}

// both are the IP families, for an owner that makes a table in each.
var both = []tableid.Family{tableid.IPv4, tableid.IPv6}

// IDs returns the tables by family.
func (t Table) IDs() []tableid.TableID {
	var ids []tableid.TableID
	for _, f := range t.Families {
		ids = append(ids, f.Table(t.Name))
	}
	return ids
}

// PresetOf returns the word of --protect that names a native table; "" if no preset does.
func PresetOf(id tableid.TableID) string {
	for _, o := range table {
		for _, t := range o.Tables {
			if o.Preset != "" && t.Name == id.Name && slices.Contains(t.Families, id.Family) {
				return o.Preset
			}
		}
	}
	return ""
}
