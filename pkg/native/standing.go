package native

import (
	"cmp"
	"slices"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Standing is a table that exists in the kernel.
type Standing struct {
	ID tableid.TableID
	// Immune: one process owns it, and no other can write to it.
	Immune bool
}

// AllStanding returns the existing tables of all families that wanted accepts, in the order of
// their names. canaryd finds tables to guard by it, and names those that it does not guard. It
// does not read their content. A kernel without nf_tables has no tables.
func AllStanding(wanted func(tableid.TableID) bool) ([]Standing, error) {
	conn, _, err := nft.DialIfAny()
	if conn == nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }() // it was only read from
	var found []Standing
	err = conn.EachTable(func(t nft.Table) error {
		if id := t.Family.Table(t.Name); wanted(id) {
			found = append(found, Standing{id, t.Owner != 0})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	sorting.Stable(found, func(a, b Standing) int { return cmp.Compare(a.ID.NFT(), b.ID.NFT()) })
	return slices.Compact(found), nil
}
