package nft

import (
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads objects of every kind without understanding them, for callers
// that keep whole tables as bytes.

// An ObjectKind is a kind of nf_tables object, by the message that creates one.
// The message that reads one has the next number.
type ObjectKind uint16

// The kinds of objects. Elements are the contents of one set, several in one
// message.
const (
	Tables     ObjectKind = unix.NFT_MSG_NEWTABLE
	Chains     ObjectKind = unix.NFT_MSG_NEWCHAIN
	Rules      ObjectKind = unix.NFT_MSG_NEWRULE
	Sets       ObjectKind = unix.NFT_MSG_NEWSET
	Elements   ObjectKind = unix.NFT_MSG_NEWSETELEM
	Objects    ObjectKind = unix.NFT_MSG_NEWOBJ
	Flowtables ObjectKind = unix.NFT_MSG_NEWFLOWTABLE
)

// EachObject calls f with the attributes of every object of a kind in the
// family's tables, in the kernel's order. The kernel filters by only some of the
// attributes in asked, so f must check the names. f's argument is valid until f
// returns. The error is ErrInterrupted if f may have got a mixture of two states.
func (c *Conn) EachObject(kind ObjectKind, family tableid.Family, asked []StringAttr, f func(attrs []byte) error) error {
	attrs, f := Strings(asked...), withoutHeader(f)
	var err error
	if kind == Chains {
		err = c.dumpChains(family, attrs, f)
	} else {
		err = c.dump(uint16(kind)+1, uint16(kind), family, attrs, f)
	}
	return Wrap(fmt.Sprintf("reading the %ss", kind), err)
}

// Object calls f with the attributes of one object; false if it does not exist.
func (c *Conn) Object(kind ObjectKind, family tableid.Family, asked []StringAttr, f func(attrs []byte) error) (bool, error) {
	found, err := c.one(uint16(kind)+1, family, asked, withoutHeader(f))
	return found, Wrap(fmt.Sprintf("reading a %s", kind), err)
}

// HasElement reports whether a set has an element with that key; an expired element does not
// count. It waits for no transaction. The standby looks so whether a knock has opened a
// gate.
func (c *Conn) HasElement(family tableid.Family, table, set string, key []byte) (bool, error) {
	element := AppendAttr(nil, unix.NFTA_SET_ELEM_KEY|unix.NLA_F_NESTED, AppendAttr(nil, unix.NFTA_DATA_VALUE, key, 0), 0)
	asked := Strings(StringAttr{unix.NFTA_SET_ELEM_LIST_TABLE, table}, StringAttr{unix.NFTA_SET_ELEM_LIST_SET, set})
	asked = AppendAttr(asked, unix.NFTA_SET_ELEM_LIST_ELEMENTS|unix.NLA_F_NESTED,
		AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, element, 0), 0)
	err := c.each(unix.NFT_MSG_GETSETELEM, family, asked, func(netlink.Message) error { return nil })
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil, Wrap("asking for an element of set "+set, err)
}

// withoutHeader returns a function for dump and one, which calls f with the data after the
// struct nfgenmsg.
func withoutHeader(f func(attrs []byte) error) func(data []byte) error {
	return func(data []byte) error {
		if len(data) < nfgenmsgLen {
			return errShort
		}
		return f(data[nfgenmsgLen:])
	}
}

// Raw writes encoded attributes, with their headers and padding.
func (b *Batch) Raw(attrs []byte) {
	last := len(b.chunks) - 1
	b.chunks[last] = append(b.chunks[last], attrs...)
}

// Messages returns the number of messages in the batch.
func (b *Batch) Messages() int { return int(b.count) }

var kindNames = map[ObjectKind]string{
	Tables: "table", Chains: "chain", Rules: "rule", Sets: "set", Elements: "set element",
	Objects: "stateful object", Flowtables: "flowtable",
}

// String returns the kind's name, for people.
func (k ObjectKind) String() string {
	if name, known := kindNames[k]; known {
		return name
	}
	return fmt.Sprintf("object of kind %d", uint16(k))
}

// describeObject names the object of a message, for people. For other messages it
// returns "a transaction". Every kind's first attribute is the table's name; a
// table has no other name.
func describeObject(kind ObjectKind, family tableid.Family, attrs []byte) string {
	table := String(AttrPath(attrs, unix.NFTA_TABLE_NAME))
	name := String(AttrPath(attrs, unix.NFTA_SET_NAME)) // also NFTA_OBJ_NAME and the like
	switch kind {
	case Tables:
		return fmt.Sprintf("table %s %s", family, table)
	case Sets, Objects, Flowtables:
		return fmt.Sprintf("%s %s of %s %s", kind, name, family, table)
	case Elements:
		if name == "" {
			return fmt.Sprintf("elements of a set of %s %s", family, table)
		}
		return fmt.Sprintf("elements of set %s of %s %s", name, family, table)
	}
	return "a transaction"
}
