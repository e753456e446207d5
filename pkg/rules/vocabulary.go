package rules

// A vocabulary is the knowledge of this package about one match or target: its options, how
// their values are compared, and the defaults.
type vocabulary struct {
	name    string
	options map[string]*option
	// short are the beginnings of option names that people write. iptables accepts any
	// beginning that only one option has.
	short map[string]string
	// defaults are the values that mean the same as no option. iptables-save adds such options
	// or leaves them out.
	defaults map[string][]string
	// pure says that the match only compares: it changes nothing and never drops a packet by
	// itself. So the order of neighbouring pure matches has no meaning.
	pure bool
	// merges says that two of these matches in a row mean the same as a single match with the
	// options of both. iptables-nft prints a single match, iptables-legacy prints two.
	merges bool
}

// An option is one option of an extension.
type option struct {
	// name is the option's full name, if this is an alias.
	name string
	args int // the number of values that follow
	// values has one reader for each value. If a reader fails, the option is compared in its
	// original spelling, under its own name.
	values []value
	// means are the options that this option is short for. Each has the values that were read,
	// or the values that follow the name here.
	means []string
	// opposite turns a canonical value behind "!" into a value that means the same without "!".
	// It fails if there is no such value.
	opposite value
}

// A value is a function that returns a value's canonical spelling; ok is false if it cannot read
// the value.
type value func(text string) (canonical string, ok bool)

func asIs(text string) (string, bool) { return text, true }

// The constructors return pointers: to fill a map with structs takes 17 KB more of the program.
func flag() *option                { return &option{} }
func one(v value) *option          { return &option{args: 1, values: []value{v}} }
func two(v, w value) *option       { return &option{args: 2, values: []value{v, w}} }
func alias(name string) *option    { return &option{name: name} }
func as(n string, v value) *option { return &option{args: 1, values: []value{v}, means: []string{n}} }

// matches and targets are the known extensions, by every name under which iptables loads them.
// kube-proxy, kubelet, the CNI plugins, Docker, flannel, Kilo and Istio use no others. The
// printed form of each option was measured with iptables 1.8.9 on both backends.
var (
	matches = index(matchList, map[string]string{"icmpv6": "icmp6", "ipv6-icmp": "icmp6"})
	targets = index(targetList, nil)
)

// exactTargets are the targets that have options, and so are no chains, but whose options are
// compared word by word.
var exactTargets = []string{
	"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNSECMARK", "DNPT", "DSCP", "ECN", "HL", "HMARK", "IDLETIMER", "LED",
	"RATEEST", "SECMARK", "SET", "SNPT", "SYNPROXY", "TCPOPTSTRIP", "TEE", "TOS", "TRACE", "TTL", "ULOG",
}

// index completes the aliases in the list, and returns the vocabularies by name. others are
// further names of matches, with their full names.
func index(list []vocabulary, others map[string]string) map[string]*vocabulary {
	byName := make(map[string]*vocabulary, len(list))
	for i := range list {
		v := &list[i]
		for name, o := range v.options {
			if o.name != "" {
				full := *v.options[o.name]
				full.name = o.name
				v.options[name] = &full
			}
		}
		byName[v.name] = v
	}
	for other, name := range others {
		byName[other] = byName[name]
	}
	return byName
}

// protocolMatch names the match that iptables loads for a protocol's number when a rule uses an
// option of the match without -m.
var protocolMatch = map[string]string{"1": "icmp", "6": "tcp", "17": "udp", "33": "dccp", "58": "icmp6", "132": "sctp"}

// protocols are the numbers of protocols by name, from xtables_chain_protos (xtables.c) and
// Debian's /etc/protocols, as far as rules of nodes name them.
var protocols = map[string]string{
	"all": "0", "icmp": "1", "igmp": "2", "ipencap": "4", "ipv4": "4", "tcp": "6", "udp": "17", "dccp": "33", "ipv6": "41",
	"gre": "47", "esp": "50", "ipv6-crypt": "50", "ah": "51", "ipv6-auth": "51", "ipv6-icmp": "58", "icmpv6": "58",
	"ospf": "89", "ospfigp": "89", "ipip": "94", "ipcomp": "108", "vrrp": "112", "sctp": "132", "mh": "135", "ipv6-mh": "135",
	"mobility-header": "135", "udplite": "136",
}

// services are the ports by name that nodes commonly serve, from IANA's list.
var services = map[string]string{
	"ftp-data": "20", "ftp": "21", "ssh": "22", "telnet": "23", "smtp": "25", "domain": "53", "bootps": "67", "bootpc": "68",
	"tftp": "69", "http": "80", "kerberos": "88", "pop3": "110", "sunrpc": "111", "ntp": "123", "imap2": "143", "snmp": "161",
	"bgp": "179", "ldap": "389", "https": "443", "syslog": "514", "submission": "587", "ldaps": "636", "imaps": "993",
	"pop3s": "995", "nfs": "2049", "mysql": "3306", "postgresql": "5432",
}

// icmpNames and icmp6Names are from libipt_icmp.c and libip6t_icmp6.c. Type
// 255 matches every ICMP message (struct ipt_icmp, icmp_type_code_match).
var icmpNames = map[string]string{
	"any": "any", "255": "any", "echo-reply": "0", "pong": "0", "destination-unreachable": "3",
	"network-unreachable": "3/0", "host-unreachable": "3/1", "protocol-unreachable": "3/2", "port-unreachable": "3/3",
	"fragmentation-needed": "3/4", "source-route-failed": "3/5", "network-unknown": "3/6", "host-unknown": "3/7",
	"network-prohibited": "3/9", "host-prohibited": "3/10", "communication-prohibited": "3/13", "source-quench": "4",
	"redirect": "5", "network-redirect": "5/0", "host-redirect": "5/1", "echo-request": "8", "ping": "8",
	"router-advertisement": "9", "router-solicitation": "10", "time-exceeded": "11", "ttl-exceeded": "11",
	"ttl-zero-during-transit": "11/0", "ttl-zero-during-reassembly": "11/1", "parameter-problem": "12",
	"timestamp-request": "13", "timestamp-reply": "14", "address-mask-request": "17", "address-mask-reply": "18",
}

var icmp6Names = map[string]string{
	"destination-unreachable": "1", "no-route": "1/0", "communication-prohibited": "1/1", "beyond-scope": "1/2",
	"address-unreachable": "1/3", "port-unreachable": "1/4", "failed-policy": "1/5", "reject-route": "1/6", "packet-too-big": "2",
	"time-exceeded": "3", "ttl-exceeded": "3", "ttl-zero-during-transit": "3/0", "ttl-zero-during-reassembly": "3/1",
	"parameter-problem": "4", "bad-header": "4/0", "unknown-header-type": "4/1", "unknown-option": "4/2",
	"echo-request": "128", "ping": "128", "echo-reply": "129", "pong": "129", "router-solicitation": "133",
	"router-advertisement": "134", "neighbour-solicitation": "135", "neighbor-solicitation": "135",
	"neighbour-advertisement": "136", "neighbor-advertisement": "136", "redirect": "137",
}

// rejects are REJECT's answers: the short names of libipt_REJECT.c and
// libip6t_REJECT.c. iptables-save leaves out the default of each family.
var rejects = map[string]string{
	"net-unreach": "icmp-net-unreachable", "host-unreach": "icmp-host-unreachable", "proto-unreach": "icmp-proto-unreachable",
	"net-prohib": "icmp-net-prohibited", "host-prohib": "icmp-host-prohibited", "admin-prohib": "icmp-admin-prohibited",
	"tcp-rst": "tcp-reset", "no-route": "icmp6-no-route", "adm-prohibited": "icmp6-adm-prohibited",
	"addr-unreach": "icmp6-addr-unreachable", "policy-fail": "icmp6-policy-fail", "reject-route": "icmp6-reject-route",
	// The meaning of port-unreach depends on the family; it is the default in both.
	"port-unreach": "port-unreach", "icmp-port-unreachable": "port-unreach", "icmp6-port-unreachable": "port-unreach",
}

// logLevels are syslog's levels (libxt_LOG.c).
var logLevels = map[string]string{
	"emerg": "0", "panic": "0", "alert": "1", "crit": "2", "err": "3", "error": "3", "warning": "4", "warn": "4",
	"notice": "5", "info": "6", "debug": "7",
}
