package ruleset

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// This file reads the targets that host firewalls and hypervisors use; see wordshosts.go.

// hostTarget adds the options of such a target, whose name is in d.target, from its data x.
// xtTarget calls it last. False: the target or its data are unknown, and the rule has no
// words.
func (d *decoder) hostTarget(name string, revision uint32, x xtInfo) bool {
	switch {
	case name == "CHECKSUM" && revision == 0:
		d.target = append(d.target, " --checksum-fill"...)
		return len(x) == 8 && x[0] == 1 && x.zeroFrom(1)
	case name == "DSCP" && revision == 0:
		d.target = fmt.Appendf(d.target, " --set-dscp 0x%02x", first(x))
		return len(x) == 8 && x[0] <= maxDSCP && x.zeroFrom(1)
	case name == "TOS" && revision == 1 && len(x) == 8:
		d.target = fmt.Appendf(d.target, " --set-tos 0x%02x/0x%02x", x[0], x[1])
		return x.zeroFrom(2)
	case (name == "TTL" || name == "HL") && revision == 0:
		return d.setHops(map[string]string{"TTL": "--ttl", "HL": "--hl"}[name], x)
	case name == "NFQUEUE" && revision == 3:
		return d.queue(x)
	case name == "NFLOG" && revision == 0:
		return d.nflog(x)
	case name == "TEE" && revision == 1:
		return d.tee(x)
	}
	return false
}

// first returns the first byte of an extension's data, or 0; hostTarget checks the length
// afterwards.
func first(x xtInfo) byte {
	if len(x) == 0 {
		return 0
	}
	return x[0]
}

// setHops adds the options of TTL or HL, which begin with name, from its data, struct
// ipt_TTL_info or ip6t_HL_info. hostTarget calls it. False: the rule has no words.
func (d *decoder) setHops(name string, x xtInfo) bool {
	modes := []string{"-set ", "-inc ", "-dec "}
	if len(x) != 8 || int(x[0]) >= len(modes) || !x.zeroFrom(2) {
		return false
	}
	d.target = strconv.AppendUint(append(d.target, " "+name+modes[x[0]]...), uint64(x[1]), 10)
	return true
}

// queue adds the options of NFQUEUE from its data, struct xt_NFQ_info_v3; hostTarget calls
// it. False: the rule has no words.
func (d *decoder) queue(x xtInfo) bool {
	const bypass, fanout = 1, 2
	if len(x) != 8 || x.u16(2) == 0 || x.u16(4)&^(bypass|fanout) != 0 || !x.zeroFrom(6) {
		return false
	}
	queue, count := uint64(x.u16(0)), uint64(x.u16(2))
	if count == 1 {
		d.target = strconv.AppendUint(append(d.target, " --queue-num "...), queue, 10)
	} else {
		d.target = fmt.Appendf(d.target, " --queue-balance %d:%d", queue, queue+count-1)
	}
	if x.u16(4)&bypass != 0 {
		d.target = append(d.target, " --queue-bypass"...)
	}
	if x.u16(4)&fanout != 0 {
		d.target = append(d.target, " --queue-cpu-fanout"...)
	}
	return queue+count <= 1<<16
}

// nflog adds the options of target NFLOG from its data, struct xt_nflog_info. hostTarget
// calls it. False: the rule has --nflog-range or is otherwise unknown, and has no words.
func (d *decoder) nflog(x xtInfo) bool {
	const lengthAt, groupAt, thresholdAt, flagsAt, padAt, prefixAt, end, copies = 0, 4, 6, 8, 10, 12, 76, 1
	if len(x) != 80 || !x.zeroFrom(end) || x.u16(padAt) != 0 || x.u16(flagsAt) > copies || x.u16(flagsAt) == 0 && x.u32(lengthAt) != 0 {
		return false
	}
	prefix, ended := untilZero(x[prefixAt:end])
	d.sayNFLOG(prefix, x.u16(groupAt), x.u16(flagsAt) == copies, x.u32(lengthAt), x.u16(thresholdAt))
	return ended && printable(prefix)
}

// log adds -j NFLOG from the expression that iptables-nft 1.8.8 and later write for it.
// expression calls it. False: the rule has no words.
func (d *decoder) log(data *fields) bool {
	const longest = 64
	var prefix string
	if data.has(unix.NFTA_LOG_PREFIX) {
		if prefix = data.text(unix.NFTA_LOG_PREFIX); prefix == "" || len(prefix) >= longest || !printable([]byte(prefix)) {
			return false
		}
	}
	group := data.bytes(unix.NFTA_LOG_GROUP, 2)
	copies, length := data.has(unix.NFTA_LOG_SNAPLEN), uint32(0)
	if copies {
		length = data.number(unix.NFTA_LOG_SNAPLEN)
	}
	threshold := []byte{0, 0}
	if data.has(unix.NFTA_LOG_QTHRESHOLD) {
		if threshold = data.bytes(unix.NFTA_LOG_QTHRESHOLD, 2); allZero(threshold) {
			return false
		}
	}
	if !data.done() || copies && length == 0 {
		return false
	}
	d.target = append(d.target, " -j NFLOG"...)
	d.sayNFLOG([]byte(prefix), binary.BigEndian.Uint16(group), copies, length, binary.BigEndian.Uint16(threshold))
	return true
}

// sayNFLOG adds the options of NFLOG, for nflog and log. copies says that length, the number
// of bytes to copy of a packet, is given. An empty prefix and zeros are not printed.
func (d *decoder) sayNFLOG(prefix []byte, group uint16, copies bool, length uint32, threshold uint16) {
	if len(prefix) > 0 {
		d.target = appendQuoted(append(d.target, " --nflog-prefix"...), prefix)
	}
	if group != 0 {
		d.target = strconv.AppendUint(append(d.target, " --nflog-group "...), uint64(group), 10)
	}
	if copies {
		d.target = strconv.AppendUint(append(d.target, " --nflog-size "...), uint64(length), 10)
	}
	if threshold != 0 {
		d.target = strconv.AppendUint(append(d.target, " --nflog-threshold "...), uint64(threshold), 10)
	}
}

// tee adds the options of TEE from its data, struct xt_tee_tginfo; hostTarget calls it.
// False: the rule has no words.
func (d *decoder) tee(x xtInfo) bool {
	const deviceAt, end = 16, 32
	if len(x) != 40 || !x.zeroFrom(end) {
		return false
	}
	gateway, plain := d.address(x[:deviceAt])
	device, ended := untilZero(x[deviceAt:end])
	if !plain || !ended || len(device) > 0 && !plainName(device) {
		return false
	}
	d.target = append(append(d.target, " --gateway "...), gateway...)
	if len(device) > 0 {
		d.target = append(append(d.target, " --oif "...), device...)
	}
	return true
}
