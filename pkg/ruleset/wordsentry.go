package ruleset

import (
	"bytes"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// EntryHead is the first expression of a rule of x_tables. The kernel does not know it.
	EntryHead = "canaryd-entry"
	// EntryConditions is its attribute: struct ipt_entry or ip6t_entry up to target_offset,
	// which are the conditions of iptables without an extension.
	EntryConditions = 1
)

// An entryLayout has the offsets in struct ipt_entry or ip6t_entry
// (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h).
type entryLayout struct {
	address  int // the length of an address; four are at the beginning
	protocol int // u16
	flags    int // u8; the inverted conditions follow
	pad      int // where the struct of the conditions is padded
	cache    int // nfcache, which the kernel ignores
	goes     byte
}

// entryLayouts are the layouts by family.
var entryLayouts = map[tableid.Family]entryLayout{
	tableid.IPv4: {address: 4, protocol: 80, flags: 82, pad: 84, cache: 84, goes: 2},
	tableid.IPv6: {address: 16, protocol: 128, flags: 131, pad: 133, cache: 136, goes: 4},
}

// The inverted conditions (IPT_INV_*, which IPv6 shares).
const (
	notIn          = 1
	notOut         = 2
	notSource      = 8
	notDestination = 16
	notFragment    = 32
	notProtocol    = 64
)

// entryHead adds the words of an entry's own conditions; expression calls it. False: one of them
// has no words. Then Words has none for the rule, and Label shows the others.
func (d *decoder) entryHead(data *fields) bool {
	const fragment, hasProtocol = 1, 1 // IPT_F_FRAG, IP6T_F_PROTO
	at := entryLayouts[d.family]
	x := xtInfo(data.bytes(EntryConditions, at.cache+4))
	if x == nil || d.isEntry || !d.atHead() {
		return false
	}
	d.isEntry = true
	protocol, flags, not := x.u16(at.protocol), x[at.flags], x[at.flags+1]
	d.goes = flags&at.goes != 0
	known, allowed := at.goes, byte(notIn|notOut|notSource|notDestination|notProtocol)
	plain := true
	if d.family == tableid.IPv4 {
		known, allowed = known|fragment, allowed|notFragment
		if flags&fragment != 0 {
			d.fragments = bytes.TrimSuffix(option(nil, not&notFragment != 0, "-f", ""), []byte(" "))
		} else {
			plain = not&notFragment == 0
		}
	} else {
		known |= hasProtocol
		plain = (flags&hasProtocol != 0) == (protocol != 0) && x[at.protocol+2] == 0
	}
	plain = plain && flags&^known == 0 && not&^allowed == 0 && protocol <= 0xff && allZero(x[at.pad:at.cache])
	if protocol == 0 {
		plain = plain && not&notProtocol == 0
	} else {
		plain = d.compareProtocol(not&notProtocol != 0, []byte{byte(protocol)}) && plain
	}
	in, out := x[4*at.address:], x[4*at.address+unix.IFNAMSIZ:]
	plain = d.entryAddress(&d.source, "-s", not&notSource != 0, x, at.address) && plain
	plain = d.entryAddress(&d.destination, "-d", not&notDestination != 0, x[at.address:], at.address) && plain
	plain = d.entryInterface(&d.in, "-i", not&notIn != 0, in) && plain
	return d.entryInterface(&d.out, "-o", not&notOut != 0, out) && plain
}

// entryAddress adds -s or -d (name) for entryHead. x begins with the address, of that size, and
// has its mask two addresses later. not means "!".
func (d *decoder) entryAddress(words *[]byte, name string, not bool, x xtInfo, size int) bool {
	address, mask := x[:size], x[2*size:3*size]
	if allZero(mask) {
		return allZero(address) && !not
	}
	return d.sayAddress(words, name, not, address, prefixOf(mask), size)
}

// entryInterface adds -i or -o (name) for entryHead. x begins with the interface, and has its
// mask two interfaces later. The mask covers the zero behind a whole name. iptables leaves the +
// behind the beginning of names, where the mask does not cover it. not means "!".
func (d *decoder) entryInterface(words *[]byte, name string, not bool, x xtInfo) bool {
	value, mask := x[:unix.IFNAMSIZ], x[2*unix.IFNAMSIZ:3*unix.IFNAMSIZ]
	length := len(bytes.TrimRight(mask, "\x00"))
	if !allOnes(mask[:length]) {
		return false
	}
	covered, behind := value[:length], value[length:]
	if length == 0 {
		return !not && allZero(behind)
	}
	if covered[length-1] != 0 && len(behind) > 0 && behind[0] == '+' {
		behind = behind[1:]
	}
	return allZero(behind) && d.compareInterface(words, name, not, covered)
}
