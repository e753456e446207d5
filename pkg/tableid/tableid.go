// Package tableid names the kernel's tables, and keeps values by table.
//
// A [TableID] is a family and a name, such as "ipv4 nat". It is comparable, so values by table
// are a map[TableID]V. Such maps are values: [With] returns a changed copy, and no code changes
// a map that it has passed on. [Put] fills a map while it is being made. [Of] and [ByFamily]
// return it by family; [Marshal] and [Unmarshal] convert it to and from JSON.
//
// Families are the families of nf_tables, by the kernel's numbers. iptables has tables in IPv4
// and IPv6 only. Marshal and Unmarshal return the errors of encoding/json, and Unmarshal
// returns an error for an unknown family. Any goroutine may read a map that is no longer
// filled.
package tableid

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Family is a family of nf_tables, by the kernel's own number (NFPROTO_* in
// linux/netfilter.h). x_tables has tables in IPv4 and IPv6 only.
type Family uint8

// The families.
const (
	Inet   Family = 1 // IPv4 and IPv6 in one table
	IPv4   Family = 2
	ARP    Family = 3
	Netdev Family = 5
	Bridge Family = 7
	IPv6   Family = 10
)

// familyNames has two spellings of each family: for flags, labels and JSON, and for nft.
var familyNames = map[Family]struct{ name, nft string }{
	Inet: {"inet", "inet"}, IPv4: {"ipv4", "ip"}, ARP: {"arp", "arp"},
	Netdev: {"netdev", "netdev"}, Bridge: {"bridge", "bridge"}, IPv6: {"ipv6", "ip6"},
}

// String returns the spelling for flags, labels and JSON, such as "ipv4".
func (f Family) String() string {
	if n, known := familyNames[f]; known {
		return n.name
	}
	return fmt.Sprintf("family %d", uint8(f))
}

// NFT returns the spelling of the program nft, such as "ip", for words of --protect and
// names of native tables.
func (f Family) NFT() string {
	if n, known := familyNames[f]; known {
		return n.nft
	}
	return f.String()
}

// MarshalText writes the family's name: a Family may be the key of a JSON object.
func (f Family) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText reads the output of MarshalText, such as "ipv4", from JSON and requests.
// Another text is an error.
func (f *Family) UnmarshalText(text []byte) error {
	for family, n := range familyNames {
		if n.name == string(text) {
			*f = family
			return nil
		}
	}
	return fmt.Errorf("%q is not a family of tables; ipv4 is one, inet another", text)
}

// A TableID names a table of one network namespace. It is comparable.
type TableID struct {
	Family Family
	Name   string
}

// String returns the family and the name, such as "ipv4 nat".
func (t TableID) String() string { return t.Family.String() + " " + t.Name }

// Compare orders tables by family, then by name.
func (t TableID) Compare(o TableID) int {
	return cmp.Or(cmp.Compare(t.Family, o.Family), cmp.Compare(t.Name, o.Name))
}

// NFT returns the table's name as the program nft prints it, such as "ip kube-proxy". A name
// with unprintable characters is quoted as in Go. The kernel accepts any bytes, but a metric's
// label or a service manager does not.
func (t TableID) NFT() string { return t.Family.NFT() + " " + printable(t.Name) }

// printable returns a table's name as it is if it is plain text, and otherwise in Go's
// quotes.
func printable(name string) string {
	odd := func(r rune) bool { return !strconv.IsPrint(r) }
	if utf8.ValidString(name) && strings.IndexFunc(name, odd) < 0 {
		return name
	}
	return strconv.Quote(name)
}

// FamilyOfNFT returns the family with this name in the program nft: ip, ip6, inet, arp,
// bridge or netdev. For any other name it returns false. Package protect reads the words
// nft:FAMILY:NAME of --protect with it.
func FamilyOfNFT(name string) (Family, bool) {
	for family, n := range familyNames {
		if n.nft == name {
			return family, true
		}
	}
	return 0, false
}
