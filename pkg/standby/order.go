package standby

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file sorts rules of one chain where their order does not matter. kube-proxy leaves the order
// of services in KUBE-SERVICES and KUBE-NODEPORTS to chance, and writes both with every sync. If
// the copy had that order, each sync would write all of these rules. That takes the kernel 82 to
// 118 ms at 5,000 services.

// A key bounds the packets that a rule may match: to packets of one protocol to one port, and
// perhaps to one address. Rules with different keys of one shape match no packet in common.
type key struct {
	address  string // "" is any
	protocol uint8  // 0: the rule has no key
	port     uint16
}

func (k key) known() bool { return k.protocol != 0 }

// compare orders keys by address, protocol and port, for settle and for the set of services. It
// returns a negative number, 0 or a positive number, as strings.Compare does.
func (k key) compare(o key) int {
	if c := strings.Compare(k.address, o.address); c != 0 {
		return c
	}
	if k.protocol != o.protocol {
		return int(k.protocol) - int(o.protocol)
	}
	return int(k.port) - int(o.port)
}

// settle sorts each run of rules with keys of one shape by these keys, so that a sync in
// another order changes no digest. translator.chain calls it. Rules of the same key keep their
// order, and no rule leaves its run.
func settle(rules []reading) {
	for from := 0; from < len(rules); {
		to := from + 1
		for to < len(rules) && rules[from].key.known() && rules[to].key.known() && (rules[from].key.address == "") == (rules[to].key.address == "") {
			to++
		}
		sorting.Stable(rules[from:to], func(a, b reading) int { return a.key.compare(b.key) })
		from = to
	}
}

// A keyReader reads a rule's key from its expressions.
type keyReader struct {
	key      key
	hasPort  bool
	none     bool  // the rule gets no key
	loaded   field // the field that the last expression loaded
	register uint32
}

// A field is a part of a packet that counts for keys.
type field uint8

const (
	otherField field = iota
	destination
	protocol
	port
)

// take reads the next expression of a rule; reader.take calls it for each. A comparison gives
// the key a field only if the expression right before it loaded that field.
func (k *keyReader) take(e nft.Expression, family tableid.Family) {
	loaded := k.loaded
	k.loaded = otherField
	switch e.Name {
	case "payload":
		k.loaded, k.register = fieldOf(e.Data, family), nft.AttrNumber(e.Data, unix.NFTA_PAYLOAD_DREG)
	case "meta":
		if nft.AttrNumber(e.Data, unix.NFTA_META_KEY) == unix.NFT_META_L4PROTO {
			k.loaded, k.register = protocol, nft.AttrNumber(e.Data, unix.NFTA_META_DREG)
		}
	case "cmp":
		if nft.AttrNumber(e.Data, unix.NFTA_CMP_OP) == unix.NFT_CMP_EQ && nft.AttrNumber(e.Data, unix.NFTA_CMP_SREG) == k.register {
			k.compared(loaded, nft.AttrPath(e.Data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE), family)
		}
	case "match":
		k.match(e)
	}
}

// fieldOf returns the field that a payload expression loads. otherField: the load counts for no
// key, such as a source address or a part of an address.
func fieldOf(data []byte, family tableid.Family) field {
	base, offset, size := nft.AttrNumber(data, unix.NFTA_PAYLOAD_BASE), nft.AttrNumber(data, unix.NFTA_PAYLOAD_OFFSET), nft.AttrNumber(data, unix.NFTA_PAYLOAD_LEN)
	switch {
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && family == tableid.IPv4 && offset == 16 && size == 4,
		base == unix.NFT_PAYLOAD_NETWORK_HEADER && family == tableid.IPv6 && offset == 24 && size == 16:
		return destination
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == 2 && size == 2:
		return port
	}
	return otherField
}

// compared stores a field of the key that the rule compares with the value v. A value of
// another length than the field's is ignored, so the rule gets no key by it.
func (k *keyReader) compared(loaded field, v []byte, family tableid.Family) {
	switch {
	case loaded == destination && (family == tableid.IPv4 && len(v) == 4 || len(v) == 16):
		k.key.address = string(v)
	case loaded == protocol && len(v) == 1:
		k.key.protocol = v[0]
	case loaded == port && len(v) == 2:
		k.key.port, k.hasPort = binary.BigEndian.Uint16(v), true
	}
}

// match reads the destination port of struct xt_tcp and struct xt_udp, which begin alike: two
// source ports, two destination ports. Another match, an inverted one or a range of ports gives
// the key no port.
func (k *keyReader) match(e nft.Expression) {
	const invertsDestination = 2 // XT_TCP_INV_DSTPT, XT_UDP_INV_DSTPT
	flags := 0
	switch nft.String(attr(e.Data, unix.NFTA_MATCH_NAME)) {
	case "tcp":
		flags = 11
	case "udp":
		flags = 8
	default:
		return
	}
	info := attr(e.Data, unix.NFTA_MATCH_INFO)
	if len(info) <= flags || info[flags]&invertsDestination != 0 {
		return
	}
	if first := binary.NativeEndian.Uint16(info[4:]); first == binary.NativeEndian.Uint16(info[6:]) {
		k.key.port, k.hasPort = first, true
	}
}

// result returns the rule's key for settle and for the set of services. It has no protocol, and
// is not known, if the rule may match several protocols or ports.
func (k *keyReader) result() key {
	if k.none || !k.hasPort {
		return key{}
	}
	return k.key
}
