package kube

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// familyOf returns the family of an address, which must be valid and unmapped.
func familyOf(ip netip.Addr) rules.Family {
	if ip.Is4() {
		return rules.IPv4
	}
	return rules.IPv6
}

// parseIP reads an address as kube-proxy does (ParseIPSloppy of k8s.io/utils/net). Octets
// with leading zeros are decimal, an IPv4-mapped address is IPv4, and a zone is an error.
// False: the address is refused or skipped.
func parseIP(text string) (netip.Addr, bool) {
	ip, err := netip.ParseAddr(text)
	if err != nil {
		plain := withoutLeadingZeros(text)
		if plain == text {
			return netip.Addr{}, false
		}
		if ip, err = netip.ParseAddr(plain); err != nil {
			return netip.Addr{}, false
		}
	}
	return ip.Unmap(), ip.Zone() == ""
}

// spelled returns the usual spelling of an address that was parsed from text, as rules have
// it. It returns text itself if possible, to save memory.
func spelled(ip netip.Addr, text string) string {
	var usual [64]byte
	if string(ip.AppendTo(usual[:0])) == text {
		return text
	}
	return ip.String()
}

// parseCIDR reads a prefix as ParseCIDRSloppy does, and clears the bits behind it. False: it
// is no prefix; an option is then refused, a service's source range left out.
func parseCIDR(text string) (netip.Prefix, bool) {
	address, length, found := strings.Cut(text, "/")
	bits, err := strconv.ParseUint(length, 10, 8)
	if !found || err != nil {
		return netip.Prefix{}, false
	}
	ip, ok := parseIP(address)
	if !ok {
		return netip.Prefix{}, false
	}
	if ip.Is4() && strings.Contains(address, ":") { // IPv4-mapped
		if bits < 96 {
			return netip.Prefix{}, false
		}
		bits -= 96
	}
	cidr, err := ip.Prefix(int(bits))
	return cidr, err == nil
}

// withoutLeadingZeros removes leading zeros from the octets of an IPv4 address, or from the
// octets at the end of an IPv6 address. parseIP calls it for texts that netip refuses.
func withoutLeadingZeros(text string) string {
	head, tail := "", text
	if i := strings.LastIndexByte(text, ':'); i >= 0 {
		head, tail = text[:i+1], text[i+1:]
	}
	octets := strings.Split(tail, ".")
	if len(octets) != 4 {
		return text
	}
	for i, octet := range octets {
		for len(octet) > 1 && octet[0] == '0' {
			octet = octet[1:]
		}
		octets[i] = octet
	}
	return head + strings.Join(octets, ".")
}
