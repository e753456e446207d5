package ruleset

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads the matches and targets of service meshes, network policies and host
// firewalls (Istio, Calico, Cilium, kube-router, ufw). See wordsmatch.go for the sources.

// icmp adds the words of match icmp or icmp6 (name) from struct ipt_icmp or ip6t_icmp: a
// type, and one code or all codes. match calls it; false: no words. It refuses type 255,
// because versions of iptables print it in different ways.
func (d *decoder) icmp(name, typeOption string, x xtInfo) bool {
	const anyType, allCodes, invert = 0xff, 0xff, 1
	if len(x) != 8 || x[0] == anyType || x[3]&^invert != 0 || !x.zeroFrom(4) {
		return false
	}
	d.say(" -m " + name)
	d.matches = option(d.matches, x[3] == invert, typeOption, strconv.Itoa(int(x[0])))
	if x[1] != 0 || x[2] != allCodes {
		if x[1] != x[2] {
			return false
		}
		d.matches = strconv.AppendUint(append(d.matches, '/'), uint64(x[1]), 10)
	}
	return true
}

// owner adds the words of -m owner from its data, struct xt_owner_match_info; match calls
// it. False: it tests supplementary groups or is otherwise unknown, and the rule has no
// words.
func (d *decoder) owner(x xtInfo) bool {
	const user, group, socket = 1, 2, 4
	if len(x) != 24 || x[16] == 0 || x[16]&^(user|group|socket) != 0 || x[17]&^x[16] != 0 || !x.zeroFrom(18) {
		return false
	}
	d.say(" -m owner")
	if x[16]&socket != 0 {
		if x[17]&socket != 0 {
			d.say(" !")
		}
		d.say(" --socket-exists")
	}
	for i, name := range [2]string{"--uid-owner", "--gid-owner"} {
		first, last := x.u32(8*i), x.u32(8*i+4)
		if x[16]&(user<<i) == 0 {
			if first != 0 || last != 0 {
				return false
			}
			continue
		}
		d.matches = option(d.matches, x[17]&(user<<i) != 0, name, strconv.FormatUint(uint64(first), 10))
		if first != last {
			d.matches = strconv.AppendUint(append(d.matches, '-'), uint64(last), 10)
		}
	}
	return true
}

// physdev adds the words of -m physdev from its data, struct xt_physdev_info; match calls
// it. False: the rule has no words.
func (d *decoder) physdev(x xtInfo) bool {
	const invertAt, maskAt, in, out, bridged, isIn, isOut = 64, 65, 1, 2, 4, 8, 16
	if len(x) != 72 || !x.zeroFrom(maskAt+1) {
		return false
	}
	mask, invert := x[maskAt], x[invertAt]
	if mask == 0 || mask&^(in|out|bridged|isIn|isOut) != 0 || invert&^mask != 0 {
		return false
	}
	devices := [2]string{}
	for i, bit := range [2]byte{in, out} {
		name, plain := deviceName(x[32*i : 32*i+32])
		if plain != (mask&bit != 0) || !plain && !allZero(x[32*i:32*i+32]) {
			return false
		}
		devices[i] = name
	}
	d.say(" -m physdev")
	for _, o := range []struct {
		bit         byte
		name, value string
	}{
		{isIn, " --physdev-is-in", ""}, {in, " --physdev-in ", devices[0]},
		{isOut, " --physdev-is-out", ""}, {out, " --physdev-out ", devices[1]}, {bridged, " --physdev-is-bridged", ""},
	} {
		if mask&o.bit == 0 {
			continue
		}
		if invert&o.bit != 0 {
			d.say(" !")
		}
		d.say(o.name + o.value)
	}
	return true
}

// deviceName reads the name of an interface and the mask behind it, for physdev. The mask
// covers the whole name with its zero, or the beginning of names, which is printed with a +.
// plain is false for another mask or name, and for none.
func deviceName(x xtInfo) (name string, plain bool) {
	text, ended := untilZero(x[:unix.IFNAMSIZ])
	bare, begins := bytes.CutSuffix(text, []byte{'+'})
	masked := len(text) + 1
	if begins {
		masked = len(bare)
	}
	plain = ended && plainName(bare) && !bytes.ContainsAny(bare, "+/") &&
		allOnes(x[unix.IFNAMSIZ:unix.IFNAMSIZ+masked]) && x.zeroFrom(unix.IFNAMSIZ+masked)
	return string(text), plain
}

// pkttype adds the words of -m pkttype from its data, struct xt_pkttype_info; match calls
// it. False: the rule has no words.
func (d *decoder) pkttype(x xtInfo) bool {
	names := []string{"unicast", "broadcast", "multicast"} // PACKET_HOST, ... in linux/if_packet.h
	if len(x) != 8 || x.u32(0) >= uint32(len(names)) || x.u32(4) > 1 {
		return false
	}
	d.say(" -m pkttype")
	d.matches = option(d.matches, x.u32(4) == 1, "--pkt-type", names[x.u32(0)])
	return true
}

// flagged adds the words of match name (rpfilter, socket), whose data is a byte of flags.
// Each flag has an option, from the lowest bit on. False: it has other flags, and the rule
// has no words.
func (d *decoder) flagged(name string, x xtInfo, options ...string) bool {
	if len(x) != 8 || x[0]>>len(options) != 0 || !x.zeroFrom(1) {
		return false
	}
	d.say(" -m " + name)
	for i, o := range options {
		if x[0]&(1<<i) != 0 {
			d.say(" " + o)
		}
	}
	return true
}

// set adds the words of -m set from struct xt_set_info_match_v4; match calls it. It takes
// the set's name from d.sets. False: it has counters or flags of an entry, or no such name.
// Then the rule has no words.
func (d *decoder) set(x xtInfo) bool {
	const (
		taken    = 0xffff // in the place of the set's number; see Words
		invert   = 1
		mostDims = 6 // IPSET_DIM_MAX
	)
	if len(x) != 48 || x.u16(0) != taken || x[2] < 1 || x[2] > mostDims || x[3]>>(x[2]+1) != 0 || !x.zeroFrom(4) || len(d.sets) == 0 {
		return false
	}
	name := []byte(d.sets[0])
	d.sets = d.sets[1:]
	if !plainName(name) {
		return false
	}
	d.say(" -m set")
	d.matches = option(d.matches, x[3]&invert != 0, "--match-set", string(name))
	for i := range x[2] {
		separator := " "
		if i > 0 {
			separator = ","
		}
		d.say(separator + [2]string{"dst", "src"}[x[3]>>(i+1)&1])
	}
	return true
}

// tproxy adds the options of TPROXY from its data, struct xt_tproxy_target_info_v1; xtTarget
// calls it. False: the rule has no words.
func (d *decoder) tproxy(x xtInfo) bool {
	const addressAt, portAt = 8, 24
	size := 4
	if d.family == tableid.IPv6 {
		size = netip6Len
	}
	if len(x) != 32 || !allZero(x[addressAt+size:portAt]) || !x.zeroFrom(portAt+2) || d.protocol != unix.IPPROTO_TCP && d.protocol != unix.IPPROTO_UDP {
		return false
	}
	addr, _ := netip.AddrFromSlice(x[addressAt : addressAt+size])
	if !plainAddress(addr) && addr != netip.IPv6Unspecified() {
		return false
	}
	d.target = strconv.AppendUint(append(d.target, " --on-port "...), uint64(binary.BigEndian.Uint16(x[portAt:])), 10)
	d.target = append(append(d.target, " --on-ip "...), addr.String()...)
	d.sayMarks(" --tproxy-mark 0x", x.u32(4), "/0x", x.u32(0))
	return true
}
