package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Table is a table as nf_tables names it.
type Table struct {
	Family tableid.Family
	Name   string
	Owner  uint32 // the netlink address of the owning socket; 0: none
	// Dormant: the table's chains get no packets.
	Dormant bool
}

// nftaTableOwner is NFTA_TABLE_OWNER of linux/netfilter/nf_tables.h (Linux 5.12), for
// which golang.org/x/sys has no name.
const nftaTableOwner = 7

// parseTable reads NFT_MSG_NEWTABLE, as the answer to a request for one table or all.
func parseTable(data []byte) (t Table, err error) {
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_TABLE_NAME:
			t.Name = String(value)
		case unix.NFTA_TABLE_FLAGS:
			var flags uint32
			flags, err = AttrUint32(value)
			t.Dormant = flags&unix.NFT_TABLE_F_DORMANT != 0
		case nftaTableOwner:
			t.Owner, err = AttrUint32(value)
		}
		return err
	})
	if err == nil {
		t.Family = tableid.Family(data[0])
	}
	return t, err
}

// EachTable calls f for every table of every family. The error is ErrInterrupted if f may
// have got a mixture of two states.
func (c *Conn) EachTable(f func(Table) error) error { return c.eachTableOf(unix.AF_UNSPEC, f) }

// eachTableOf is EachTable for one family, for the mirror's list.
func (c *Conn) eachTableOf(family tableid.Family, f func(Table) error) error {
	err := c.dump(unix.NFT_MSG_GETTABLE, unix.NFT_MSG_NEWTABLE, family, nil, func(data []byte) error {
		t, err := parseTable(data)
		if err != nil {
			return err
		}
		return f(t)
	})
	return Wrap("listing the tables", err)
}

// Table reads one table; false if it does not exist. The standby looks so whether another
// process has taken its table.
func (c *Conn) Table(family tableid.Family, name string) (t Table, ok bool, err error) {
	ok, err = c.one(unix.NFT_MSG_GETTABLE, family, []StringAttr{{unix.NFTA_TABLE_NAME, name}}, func(data []byte) (err error) {
		t, err = parseTable(data)
		return err
	})
	return t, ok, Wrap(fmt.Sprintf("asking for table %s", name), err)
}
