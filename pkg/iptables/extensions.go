package iptables

import (
	"encoding/binary"
	"strings"
)

// This file lists the extensions of iptables, and the texts that each prints from a rule's
// bytes. The list is from the functions that save a rule in extensions/lib*.c of 1.8.9 and
// 1.8.11. 1.8.7 and 1.8.13 have the same extensions and print the same texts.

// A textField is a text within the data of an extension that iptables prints.
type textField struct {
	at, size int  // its offset, and its maximum length
	quoted   bool // iptables prints it in quotes, and a backslash before each quote
	// from is the first revision that has it there, and before the first that does not; 0 means
	// no end.
	from, before byte
	printedIf    func(data []byte) bool // nil: always
}

// extensions has all matches and targets of iptables by their kernel names, with the texts that
// each prints. Numbers, addresses, names from files of the node and names of ipsets do not count
// as texts of a rule's bytes. An extension that is missing here belongs to another project.
var extensions = allExtensions(`
	addrtype ah bpf cgroup cluster comment connbytes connlabel connlimit connmark conntrack cpu dccp devgroup dscp
	dst ecn esp eui64 frag hashlimit hbh helper hl icmp icmp6 ipcomp iprange ipv6header ipvs length limit mac mark mh
	multiport nfacct osf owner physdev pkttype policy quota rateest realm recent rpfilter rt sctp set socket srh state
	statistic string tcp tcpmss time tos ttl u32 udp

	AUDIT CHECKSUM CLASSIFY CLUSTERIP CONNMARK CONNSECMARK CT DNAT DNPT DSCP ECN HL HMARK IDLETIMER LED LOG MARK
	MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK RATEEST REDIRECT REJECT SECMARK SET SNAT SNPT SYNPROXY TCPMSS TCPOPTSTRIP
	TEE TOS TPROXY TRACE TTL ULOG
`)

// printedTexts are the texts of the extensions that print any (uapi/linux/netfilter/xt_*.h has
// their offsets).
var printedTexts = map[string][]textField{
	"bpf":       {{at: 8, size: 512, from: 1, printedIf: bpfIsPinned}},
	"cgroup":    {{at: 4, size: 4096, quoted: true, from: 1, before: 2, printedIf: cgroupHasPath}, {at: 4, size: 512, quoted: true, from: 2, printedIf: cgroupHasPath}},
	"comment":   {{size: commentSize, quoted: true}},
	"hashlimit": {{size: 16, before: 2}, {size: 255, from: 2}},
	"helper":    {{at: 4, size: 30, quoted: true}},
	"nfacct":    {{size: 32, quoted: true}},
	"osf":       {{size: 32}},
	"physdev":   {{size: 16}, {at: 32, size: 16}},
	"rateest":   {{size: 16}, {at: 16, size: 16}},
	"recent":    {{at: 10, size: 200}},
	"string":    {{at: 4, size: 16}}, // the algorithm; oddPattern has the pattern
	// Targets.
	"CT":        {{at: 12, size: 16}, {at: 28, size: 32, from: 1}},
	"IDLETIMER": {{at: 4, size: 28}},
	"LED":       {{at: 10, size: 17, quoted: true}}, // behind "netfilter-"
	"LOG":       {{at: 2, size: 30, quoted: true}},
	"NFLOG":     {{at: 12, size: 64, quoted: true}},
	"RATEEST":   {{size: 16}},
	"SECMARK":   {{at: 8, size: 256, before: 1}, {at: 1, size: 256, from: 1}},
	"TEE":       {{at: 16, size: 16}},
	"ULOG":      {{at: 24, size: 32, quoted: true}},
}

// allExtensions returns the texts for each name in a list, for oddExtension; nil for a name
// that prints none. A verdict is a target without a name.
func allExtensions(names string) map[string][]textField {
	all := map[string][]textField{"": nil}
	for name := range strings.FieldsSeq(names) {
		all[name] = printedTexts[name]
	}
	return all
}

// bpfIsPinned reports whether a match bpf names a file in bpffs (XT_BPF_MODE_PATH_PINNED).
// Otherwise the same bytes are a program.
func bpfIsPinned(data []byte) bool { return len(data) >= 2 && binary.NativeEndian.Uint16(data) == 1 }

// cgroupHasPath reports whether a match cgroup names a path. Otherwise the same bytes may be a
// class.
func cgroupHasPath(data []byte) bool { return len(data) > 0 && data[0] != 0 }

// printed reports whether an extension of that revision prints the text.
func (t textField) printed(revision byte, data []byte) bool {
	return revision >= t.from && (t.before == 0 || revision < t.before) && (t.printedIf == nil || t.printedIf(data))
}

// of returns the field in an extension's data, as far as these are long enough.
func (t textField) of(data []byte) []byte {
	if len(data) <= t.at {
		return nil
	}
	return data[t.at:min(len(data), t.at+t.size)]
}
