package rules

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// address reads ADDRESS, ADDRESS/BITS or ADDRESS/MASK, as in -s and -d. It clears the host
// bits. An address without a mask gets all bits. False, for example for a host's name: the
// option keeps its text.
func address(text string) (string, bool) {
	host, mask, masked := strings.Cut(text, "/")
	a, err := netip.ParseAddr(host)
	if err != nil || a.Zone() != "" {
		return "", false
	}
	n := a.BitLen()
	if masked {
		wide, ok := number(mask, 16)
		if !ok {
			return maskedAddress(a, mask)
		}
		n = int(wide)
	}
	p, err := a.Prefix(n)
	if err != nil {
		return "", false
	}
	if s := p.String(); s != text {
		return s, true
	}
	return text, true
}

// maskedAddress is address for a mask such as 255.255.0.0. If the mask is a prefix, the
// result has its length. It need not be one: iptables keeps 255.0.255.0.
func maskedAddress(a netip.Addr, mask string) (string, bool) {
	m, err := netip.ParseAddr(mask)
	if err != nil || m.BitLen() != a.BitLen() || m.Zone() != "" {
		return "", false
	}
	host, wide := a.AsSlice(), m.AsSlice()
	ones, ended, prefix := 0, false, true
	for i, b := range wide {
		host[i] &= b
		lead := bits.LeadingZeros8(^b)
		if ended && b != 0 || b<<lead != 0 {
			prefix = false
		}
		if !ended {
			ones += lead
		}
		ended = ended || lead < 8
	}
	masked, _ := netip.AddrFromSlice(host)
	if prefix {
		return masked.String() + "/" + strconv.Itoa(ones), true
	}
	return masked.String() + "/" + m.String(), true
}

// plainAddress reads one address without a mask, such as that of --on-ip. False: it is no
// address or has a zone.
func plainAddress(text string) (string, bool) {
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return "", false
	}
	return a.String(), true
}

// addressRange reads FIRST or FIRST-LAST, as of iprange and NAT. A range of one address is
// that address. False: an end is no address.
func addressRange(text string) (string, bool) {
	first, last, ranged := strings.Cut(text, "-")
	first, ok := plainAddress(first)
	if !ok || !ranged {
		return first, ok
	}
	last, ok = plainAddress(last)
	if !ok || first == last {
		return first, ok
	}
	return first + "-" + last, true
}

// port reads a number or a service's name. It refuses octal numbers. Measured: 010 is port 8 for
// the matches tcp, udp, sctp and multiport and for NAT, and port 10 for dccp, conntrack and
// TPROXY.
func port(text string) (string, bool) {
	if len(text) > 1 && text[0] == '0' && text[1] != 'x' && text[1] != 'X' {
		return "", false
	}
	if n, ok := number(text, 16); ok {
		return strconv.FormatUint(n, 10), true
	}
	n, ok := services[text]
	return n, ok
}

// portRange reads PORT, FIRST:LAST, :LAST or FIRST:.
func portRange(text string) (string, bool) { return span(text, ":", "65535", port) }

// otherPorts returns all ports outside of a canonical range that begins at 0 or ends at
// 65535, so that "! 0:80" and "81:65535" have one Meaning. It is false for another range.
func otherPorts(text string) (string, bool) {
	first, last, ok := portBounds(text)
	switch {
	case !ok || first == 0 && last == 65535:
		return "", false
	case first == 0:
		return portRange(strconv.FormatUint(last+1, 10) + ":")
	case last == 65535:
		return portRange(":" + strconv.FormatUint(first-1, 10))
	}
	return "", false
}

// portBounds reads a canonical PORT or FIRST:LAST, for otherPorts and readPorts. False: it
// is a service's name.
func portBounds(text string) (first, last uint64, ok bool) {
	from, to, ranged := strings.Cut(text, ":")
	if !ranged {
		to = from
	}
	first, ok = number(from, 16)
	last, okToo := number(to, 16)
	return first, last, ok && okToo
}

// natPorts reads PORT or FIRST-LAST.
func natPorts(text string) (string, bool) { return span(text, "-", "", port) }

// portList reads multiport's list. Order and repetition have no meaning, because a packet
// matches if it has any of the ports (xt_multiport.c).
func portList(text string) (string, bool) {
	list := strings.Split(text, ",")
	for i := range list {
		p, ok := portRange(list[i])
		if !ok {
			return "", false
		}
		list[i] = p
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ","), true
}

// protocol returns a protocol's number as text, from its number or name, for -p and
// --ctproto. False: the name is unknown.
func protocol(text string) (string, bool) {
	if n, ok := number(text, 8); ok {
		return strconv.FormatUint(n, 10), true
	}
	n, ok := protocols[strings.ToLower(text)]
	return n, ok
}

// natAddress reads the value of DNAT and SNAT: [ADDRESS[-ADDRESS]][:PORTS]. An IPv6 address
// needs brackets before ports. PORTS may have a base port behind a slash (libxt_NAT.c).
func natAddress(text string) (string, bool) {
	addresses, ports, ported := text, "", false
	switch {
	case strings.HasPrefix(text, "["):
		rest, closed := "", false
		if addresses, rest, closed = strings.Cut(text[1:], "]"); !closed {
			return "", false
		}
		if ports, ported = strings.CutPrefix(rest, ":"); !ported && rest != "" {
			return "", false
		}
	case strings.Count(text, ":") == 1:
		addresses, ports, ported = strings.Cut(text, ":")
	}
	var ok bool
	if addresses != "" {
		if addresses, ok = addressRange(addresses); !ok {
			return "", false
		}
	}
	if !ported {
		return addresses, addresses != ""
	}
	first, base, based := strings.Cut(ports, "/")
	if ports, ok = natPorts(first); !ok {
		return "", false
	}
	if based {
		if base, ok = port(base); !ok {
			return "", false
		}
		ports += "/" + base
	}
	if strings.Contains(addresses, ":") {
		addresses = "[" + addresses + "]"
	}
	return addresses + ":" + ports, true
}

// hardware reads a MAC address.
func hardware(text string) (string, bool) {
	parts := strings.Split(text, ":")
	if len(parts) != 6 {
		return "", false
	}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 16, 8)
		if err != nil {
			return "", false
		}
		parts[i] = fmt.Sprintf("%02x", n)
	}
	return strings.Join(parts, ":"), true
}

// icmpType returns a value that reads TYPE, TYPE/CODE or a name of --icmp-type or
// --icmpv6-type; names has the canonical number of each name.
func icmpType(names map[string]string) func(string) (string, bool) {
	return func(text string) (string, bool) {
		if n, ok := names[strings.ToLower(text)]; ok {
			return n, true
		}
		kind, code, coded := strings.Cut(text, "/")
		n, ok := number(kind, 8)
		if !ok {
			return "", false
		}
		text = strconv.FormatUint(n, 10)
		if !coded {
			if all, ok := names[text]; ok {
				return all, true
			}
			return text, true
		}
		n, ok = number(code, 8)
		return text + "/" + strconv.FormatUint(n, 10), ok
	}
}
