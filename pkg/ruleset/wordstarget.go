package ruleset

import (
	"bytes"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file reads verdicts and targets; see wordsmatch.go for the sources.

// longestName is XT_EXTENSION_MAXNAMELEN without the zero, and the longest chain name that
// iptables accepts.
const longestName = 28

// targetNames cannot be names of chains in words: "-j MASQUERADE" is the target.
const targetNames = " ACCEPT DROP RETURN QUEUE CONTINUE AUDIT CHECKSUM CLASSIFY CLUSTERIP CONNMARK CONNSECMARK CT DNAT DNPT DSCP ECN HL HMARK" +
	" IDLETIMER LED LOG MARK MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK RATEEST REDIRECT REJECT SECMARK SET SNAT SNPT SYNPROXY TCPMSS" +
	" TCPOPTSTRIP TEE TOS TPROXY TRACE TTL ULOG "

// verdict adds -j or -g of an immediate verdict; expression calls it. False: the verdict has
// no counterpart in iptables, or its chain no plain name. Then the rule has no words.
func (d *decoder) verdict(data *fields) bool {
	const drop, accept = 0, 1
	into := data.number(unix.NFTA_IMMEDIATE_DREG)
	outer := data.nested(unix.NFTA_IMMEDIATE_DATA)
	v := outer.nested(unix.NFTA_DATA_VERDICT)
	code := int32(v.number(unix.NFTA_VERDICT_CODE))
	chain, option := "", " -j "
	switch code {
	case drop:
		chain = "DROP"
	case accept:
		chain = "ACCEPT"
	case unix.NFT_RETURN:
		chain = "RETURN"
	case unix.NFT_JUMP, unix.NFT_GOTO:
		if chain = v.text(unix.NFTA_VERDICT_CHAIN); len(chain) > longestName || !plainName([]byte(chain)) ||
			strings.Contains(targetNames, " "+chain+" ") {
			return false
		}
		if code == unix.NFT_GOTO {
			option = " -g "
		}
	default:
		return false
	}
	if d.isEntry && d.goes != (code == unix.NFT_GOTO) {
		return false
	}
	d.goes = false
	d.target = append(append(d.target, option...), chain...)
	return into == unix.NFT_REG_VERDICT && outer.done() && v.done()
}

// xtTarget adds the words of a target of x_tables; expression calls it. False: the target,
// its revision or its data are unknown. Then Words has no words for the rule.
func (d *decoder) xtTarget(data *fields) bool {
	name, revision := data.text(unix.NFTA_TARGET_NAME), data.number(unix.NFTA_TARGET_REV)
	x := xtInfo(data.bytes(unix.NFTA_TARGET_INFO, anyLength))
	if data.bad {
		return false
	}
	d.target = append(append(d.target, " -j "...), name...)
	v4 := d.family == tableid.IPv4
	switch {
	case name == "MARK" && revision == 2:
		return d.setMark(x)
	case name == "CONNMARK" && revision == 2:
		return d.connmark(x)
	case name == "LOG" && revision == 0:
		return d.xtLog(x)
	case name == "REJECT" && revision == 0:
		return d.reject(x)
	case name == "TCPMSS" && revision == 0:
		return d.tcpmss(x)
	case name == "TPROXY" && revision == 1:
		return d.tproxy(x)
	case name == "CT" && revision == 2:
		return d.notrack(x)
	case name == "TRACE" && revision == 0:
		return len(x) == 0
	case name == "DNAT" && (revision == 2 || revision == 0 && v4 || revision == 1 && !v4):
		return d.nat(x, revision, "--to-destination", natAddresses|natPorts|natRandom|natPersistent)
	case name == "SNAT" && (revision == 0 && v4 || revision == 1 && !v4):
		return d.nat(x, revision, "--to-source", natAddresses|natPorts|natRandom|natPersistent|natRandomFully)
	case name == "MASQUERADE" && revision == 0:
		return d.nat(x, revision, "", natPorts|natRandom|natRandomFully)
	case name == "REDIRECT" && revision == 0: // 1.8.7 prints --random next to ports only
		return d.nat(x, revision, "", natPorts)
	}
	return d.hostTarget(name, revision, x)
}

// setMark adds the options of MARK from its data, struct xt_mark_tginfo2; xtTarget calls it.
// False: the rule has no words.
func (d *decoder) setMark(x xtInfo) bool {
	if len(x) != 8 {
		return false
	}
	d.sayMarks(" --set-xmark 0x", x.u32(0), "/0x", x.u32(4))
	return true
}

func (d *decoder) sayMarks(before string, one uint32, between string, other uint32) {
	d.target = strconv.AppendUint(append(d.target, before...), uint64(one), 16)
	d.target = strconv.AppendUint(append(d.target, between...), uint64(other), 16)
}

// connmark adds the options of CONNMARK from its data, struct xt_connmark_tginfo2. xtTarget
// calls it. False: it shifts bits, or mixes modes, and the rule has no words.
func (d *decoder) connmark(x xtInfo) bool {
	const shiftAt, modeAt, size = 12, 14, 16
	const set, save, restore = 0, 1, 2
	if len(x) != size || x.u16(shiftAt) != 0 || x[modeAt+1] != 0 {
		return false
	}
	mark, mask, packetMask := x.u32(0), x.u32(4), x.u32(8)
	switch mode := x[modeAt]; {
	case mode == set && packetMask == ^uint32(0):
		d.sayMarks(" --set-xmark 0x", mark, "/0x", mask)
	case mode == save && mark == 0:
		d.sayMarks(" --save-mark --nfmask 0x", packetMask, " --ctmask 0x", mask)
	case mode == restore && mark == 0:
		d.sayMarks(" --restore-mark --nfmask 0x", packetMask, " --ctmask 0x", mask)
	default:
		return false
	}
	return true
}

// logFlags are LOG's options for additions to a line, by the bits of xt_log.h. Other bits have
// none.
var logFlags = []string{" --log-tcp-sequence", " --log-tcp-options", " --log-ip-options", " --log-uid", "", " --log-macdecode"}

// xtLog adds the options of LOG from its data, struct xt_log_info; xtTarget calls it. False:
// the rule has no words.
func (d *decoder) xtLog(x xtInfo) bool {
	const prefixAt, size, usualLevel = 2, 32, 4
	if len(x) != size || x[0] > 7 {
		return false
	}
	prefix, ended := untilZero(x[prefixAt:])
	if !ended || !printable(prefix) {
		return false
	}
	if len(prefix) > 0 {
		d.target = appendQuoted(append(d.target, " --log-prefix"...), prefix)
	}
	if x[0] != usualLevel {
		d.target = strconv.AppendUint(append(d.target, " --log-level "...), uint64(x[0]), 10)
	}
	flags := x[1]
	for i, name := range logFlags {
		if bit := byte(1) << i; flags&bit != 0 && name != "" {
			d.target = append(d.target, name...)
			flags &^= bit
		}
	}
	return flags == 0
}

// rejectedWith are the answers of struct ipt_reject_info and ip6t_reject_info that have a name
// in each version.
var rejectedWith = map[tableid.Family][]string{
	tableid.IPv4: {
		"icmp-net-unreachable", "icmp-host-unreachable", "icmp-proto-unreachable", "icmp-port-unreachable", "",
		"icmp-net-prohibited", "icmp-host-prohibited", "tcp-reset", "icmp-admin-prohibited",
	},
	tableid.IPv6: {"icmp6-no-route", "icmp6-adm-prohibited", "", "icmp6-addr-unreachable", "icmp6-port-unreachable", "", "tcp-reset"},
}

// reject adds --reject-with of REJECT from its data, struct ipt_reject_info or
// ip6t_reject_info. xtTarget calls it. False: the rule has no words.
func (d *decoder) reject(x xtInfo) bool {
	if len(x) != 8 || !x.zeroFrom(4) {
		return false
	}
	names, with := rejectedWith[d.family], x.u32(0)
	if uint64(with) >= uint64(len(names)) || names[with] == "" || names[with] == "tcp-reset" && d.protocol != unix.IPPROTO_TCP {
		return false
	}
	d.target = append(append(d.target, " --reject-with "...), names[with]...)
	return true
}

// tcpmss adds the options of TCPMSS from its data, struct xt_tcpmss_info; xtTarget calls it.
// False: the rule has no words.
func (d *decoder) tcpmss(x xtInfo) bool {
	if len(x) != 8 || !x.zeroFrom(2) || d.protocol != unix.IPPROTO_TCP {
		return false
	}
	if x.u16(0) == 0xffff {
		d.target = append(d.target, " --clamp-mss-to-pmtu"...)
	} else {
		d.target = strconv.AppendUint(append(d.target, " --set-mss "...), uint64(x.u16(0)), 10)
	}
	return true
}

// notrack adds --notrack of CT, or the target's name NOTRACK, from struct
// xt_ct_target_info_v1. xtTarget calls it. False: it has another option, and the rule has no
// words.
func (d *decoder) notrack(x xtInfo) bool {
	const notrack, alias, size = 1, 2, 72
	if len(x) != size || !x.zeroFrom(2) {
		return false
	}
	switch x.u16(0) {
	case notrack:
		d.target = append(d.target, " --notrack"...)
	case notrack | alias:
		d.target = append(d.target[:0], " -j NOTRACK"...)
	default:
		return false
	}
	return true
}

// The flags of struct nf_nat_range (NF_NAT_RANGE_*).
const (
	natAddresses   = 1
	natPorts       = 2
	natRandom      = 4
	natPersistent  = 8
	natRandomFully = 16
)

// nat adds the options of DNAT, SNAT, MASQUERADE and REDIRECT for xtTarget; false: no words.
// It reads nf_nat_ipv4_multi_range_compat for IPv4, nf_nat_range for IPv6, and nf_nat_range2
// for revision 2. to is the option of addresses, "" for none; may has the permitted flags.
func (d *decoder) nat(x xtInfo, revision uint32, to string, may uint32) bool {
	addressLen, size := 16, 40
	switch {
	case revision == 2:
		size = 48
	case d.family == tableid.IPv4:
		if addressLen, size = 4, 20; len(x) != 24 || x.u32(0) != 1 {
			return false
		}
		x = x[4:]
	}
	if len(x) != size {
		return false
	}
	flags, portsAt := x.u32(0), 4+2*addressLen
	low, high := x[4:4+addressLen], x[4+addressLen:portsAt]
	first, last := x.port(portsAt), x.port(portsAt+2)
	if flags&^may != 0 || !x.zeroFrom(portsAt+4) || first > last {
		return false
	}
	if flags&natPorts == 0 && last != 0 || flags&natPorts != 0 && (first == 0 || !d.hasPorts()) {
		return false
	}
	if to == "" {
		if !allZero(low) || !allZero(high) {
			return false
		}
		to = "--to-ports"
	} else if flags&natAddresses == 0 || !d.natAddresses(low, high, flags, to) {
		return false
	}
	if flags&natPorts != 0 {
		if flags&natAddresses == 0 {
			d.target = append(append(append(d.target, ' '), to...), ' ')
		} else {
			d.target = append(d.target, ':')
		}
		d.target = strconv.AppendUint(d.target, uint64(first), 10)
		if first != last {
			d.target = strconv.AppendUint(append(d.target, '-'), uint64(last), 10)
		}
	}
	if flags&natRandom != 0 {
		d.target = append(d.target, " --random"...)
	}
	if flags&natRandomFully != 0 {
		d.target = append(d.target, " --random-fully"...)
	}
	if flags&natPersistent != 0 {
		d.target = append(d.target, " --persistent"...)
	}
	return true
}

// natAddresses appends the new address of packets, or the range from low to high, behind
// option to. nat calls it. IPv6 addresses are in brackets before ports. False: the rule has
// no words.
func (d *decoder) natAddresses(low, high []byte, flags uint32, to string) bool {
	text, plain := d.address(low)
	if !bytes.Equal(low, high) {
		last, too := d.address(high)
		text, plain = text+"-"+last, plain && too
	}
	if d.family == tableid.IPv6 && flags&natPorts != 0 {
		text = "[" + text + "]"
	}
	d.target = append(append(append(append(d.target, ' '), to...), ' '), text...)
	return plain
}
