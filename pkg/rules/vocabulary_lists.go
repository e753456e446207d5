package rules

import "maps"

// ports returns the options of the match of a transport protocol; more has its others.
// Measured: iptables-nft prints 81:65535 for ! 0:80, and iptables-legacy prints the original
// text.
func ports(more map[string]*option) map[string]*option {
	port := &option{args: 1, values: []value{portRange}, opposite: otherPorts}
	all := map[string]*option{
		"--sport": port, "--source-port": alias("--sport"),
		"--dport": port, "--destination-port": alias("--dport"),
	}
	maps.Copy(all, more)
	return all
}

var everyPort = map[string][]string{"--sport": {"0:65535"}, "--dport": {"0:65535"}}

const fullMark = "0xffffffff"

var matchList = []vocabulary{
	{name: "comment", options: map[string]*option{"--comment": one(asIs)}},
	{
		name: "tcp", merges: true,
		options: ports(map[string]*option{
			"--tcp-flags":  two(tcpFlags, tcpFlags),
			"--syn":        {means: []string{"--tcp-flags FIN,SYN,RST,ACK SYN"}},
			"--tcp-option": one(decimal),
		}),
		defaults: map[string][]string{"--sport": {"0:65535"}, "--dport": {"0:65535"}, "--tcp-flags": {"NONE NONE"}},
	},
	{name: "udp", merges: true, options: ports(nil), defaults: everyPort},
	{name: "dccp", options: ports(nil)},
	{name: "sctp", options: ports(map[string]*option{"--chunk-types": two(asIs, asIs)})},
	{name: "icmp", options: map[string]*option{"--icmp-type": one(icmpType(icmpNames))}},
	{name: "icmp6", options: map[string]*option{"--icmpv6-type": one(icmpType(icmp6Names))}},
	{
		name: "multiport",
		options: map[string]*option{
			"--dports": one(portList), "--destination-ports": alias("--dports"),
			"--sports": one(portList), "--source-ports": alias("--sports"),
			"--ports": one(portList),
		},
		short: map[string]string{
			"--dport": "--dports", "--destination-port": "--destination-ports",
			"--sport": "--sports", "--source-port": "--source-ports", "--port": "--ports",
		},
	},
	{
		// Up to iptables 1.8.7 iptables-save prints the default of --to.
		name: "string", pure: true,
		options: map[string]*option{
			"--algo": one(asIs), "--string": one(asIs), "--hex-string": one(asIs), "--icase": flag(),
			"--from": one(decimal), "--to": one(decimal),
		},
		defaults: map[string][]string{"--from": {"0"}, "--to": {"65535"}},
	},
	{name: "mark", pure: true, options: map[string]*option{"--mark": one(mark)}},
	{name: "connmark", pure: true, options: map[string]*option{"--mark": one(mark)}},
	{
		name: "conntrack", pure: true,
		options: map[string]*option{
			"--ctstate": one(wordList), "--ctstatus": one(wordList), "--ctproto": one(protocol),
			"--ctorigsrc": one(address), "--ctorigdst": one(address), "--ctreplsrc": one(address), "--ctrepldst": one(address),
			"--ctorigsrcport": one(portRange), "--ctorigdstport": one(portRange),
			"--ctreplsrcport": one(portRange), "--ctrepldstport": one(portRange),
			"--ctexpire": one(timeRange), "--ctdir": one(upper),
		},
	},
	// The kernel distinguishes this match from conntrack: it has XT_CONNTRACK_STATE_ALIAS in
	// the flags and is printed as -m state (xt_conntrack.h).
	{name: "state", pure: true, options: map[string]*option{"--state": one(wordList)}},
	{
		name: "statistic",
		options: map[string]*option{
			"--mode": one(asIs), "--probability": one(probability), "--every": one(decimal), "--packet": one(decimal),
		},
		defaults: map[string][]string{"--packet": {"0"}},
	},
	{
		name:    "limit",
		options: map[string]*option{"--limit": one(rate), "--limit-burst": one(decimal)},
		// XT_LIMIT_AVG and XT_LIMIT_BURST of libxt_limit.c.
		defaults: map[string][]string{"--limit": {"3/hour"}, "--limit-burst": {"5"}},
	},
	{
		name: "connlimit",
		options: map[string]*option{
			"--connlimit-upto": one(decimal), "--connlimit-above": one(decimal), "--connlimit-mask": one(decimal),
			"--connlimit-saddr": flag(), "--connlimit-daddr": flag(),
		},
		defaults: map[string][]string{"--connlimit-saddr": {""}},
	},
	{
		name: "recent",
		options: map[string]*option{
			"--set": flag(), "--rcheck": flag(), "--update": flag(), "--remove": flag(), "--rttl": flag(), "--reap": flag(),
			"--seconds": one(decimal), "--hitcount": one(decimal), "--name": one(asIs), "--mask": one(plainAddress),
			"--rsource": flag(), "--rdest": flag(),
		},
		defaults: map[string][]string{
			"--name": {"DEFAULT"}, "--rsource": {""},
			"--mask": {"255.255.255.255", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
		},
	},
	{
		name: "addrtype", pure: true,
		options: map[string]*option{
			"--src-type": one(wordList), "--dst-type": one(wordList), "--limit-iface-in": flag(), "--limit-iface-out": flag(),
		},
	},
	{
		name: "physdev", pure: true,
		options: map[string]*option{
			"--physdev-in": one(asIs), "--physdev-out": one(asIs),
			"--physdev-is-in": flag(), "--physdev-is-out": flag(), "--physdev-is-bridged": flag(),
		},
	},
	{
		name: "owner", pure: true,
		options: map[string]*option{
			"--uid-owner": one(idRange), "--gid-owner": one(idRange), "--socket-exists": flag(), "--suppl-groups": flag(),
		},
	},
	// Sets are compared by name. A set may count packets, so this match is not pure.
	{
		name: "set",
		options: map[string]*option{
			"--match-set": two(asIs, asIs), "--set": alias("--match-set"), "--return-nomatch": flag(),
			"--update-counters": flag(), "--update-subcounters": flag(),
			"--packets-eq": one(decimal), "--packets-lt": one(decimal), "--packets-gt": one(decimal),
			"--bytes-eq": one(asIs), "--bytes-lt": one(asIs), "--bytes-gt": one(asIs),
		},
	},
	{name: "nfacct", options: map[string]*option{"--nfacct-name": one(asIs)}},
	{name: "helper", options: map[string]*option{"--helper": one(asIs)}},
	{name: "socket", options: map[string]*option{"--transparent": flag(), "--nowildcard": flag(), "--restore-skmark": flag()}},
	{
		name:    "rpfilter",
		options: map[string]*option{"--loose": flag(), "--validmark": flag(), "--accept-local": flag(), "--invert": flag()},
	},
	{
		name: "pkttype", pure: true,
		options: map[string]*option{"--pkt-type": one(named(map[string]string{
			"unicast": "unicast", "host": "unicast", "broadcast": "broadcast", "bcast": "broadcast",
			"multicast": "multicast", "mcast": "multicast",
		}))},
	},
	{name: "mac", options: map[string]*option{"--mac-source": one(hardware)}},
	{name: "iprange", pure: true, options: map[string]*option{"--src-range": one(addressRange), "--dst-range": one(addressRange)}},
	{name: "length", pure: true, options: map[string]*option{"--length": one(lengthRange)}},
	{name: "ttl", pure: true, options: map[string]*option{"--ttl-eq": one(decimal), "--ttl-lt": one(decimal), "--ttl-gt": one(decimal)}},
	{name: "hl", pure: true, options: map[string]*option{"--hl-eq": one(decimal), "--hl-lt": one(decimal), "--hl-gt": one(decimal)}},
}

// marks returns the options by which MARK and CONNMARK set a mark; more has the others of
// CONNMARK, nil for none.
func marks(more map[string]*option) map[string]*option {
	all := map[string]*option{
		"--set-xmark": one(mark),
		"--set-mark":  as("--set-xmark", setMark),
		"--and-mark":  as("--set-xmark", xmark(func(n uint32) (value, mask uint32) { return 0, ^n })),
		"--or-mark":   as("--set-xmark", xmark(func(n uint32) (value, mask uint32) { return n, n })),
		"--xor-mark":  as("--set-xmark", xmark(func(n uint32) (value, mask uint32) { return n, 0 })),
	}
	maps.Copy(all, more)
	return all
}

var targetList = []vocabulary{
	{name: "MARK", options: marks(nil)},
	{
		name: "CONNMARK",
		options: marks(map[string]*option{
			"--save-mark": flag(), "--restore-mark": flag(), "--nfmask": one(bitMask), "--ctmask": one(bitMask),
			"--mask": {args: 1, values: []value{bitMask}, means: []string{"--nfmask", "--ctmask"}},
		}),
		defaults: map[string][]string{"--nfmask": {fullMark}, "--ctmask": {fullMark}},
	},
	{
		name:    "DNAT",
		options: map[string]*option{"--to-destination": one(natAddress), "--random": flag(), "--persistent": flag()},
		short:   map[string]string{"--to": "--to-destination", "--to-dest": "--to-destination"},
	},
	{
		name: "SNAT",
		options: map[string]*option{
			"--to-source": one(natAddress), "--random": flag(), "--random-fully": flag(), "--persistent": flag(),
		},
		short: map[string]string{"--to": "--to-source"},
	},
	{
		name:    "MASQUERADE",
		options: map[string]*option{"--to-ports": one(natPorts), "--random": flag(), "--random-fully": flag()},
		short:   map[string]string{"--to-port": "--to-ports"},
	},
	{
		name:    "REDIRECT",
		options: map[string]*option{"--to-ports": one(natPorts), "--random": flag()},
		short:   map[string]string{"--to-port": "--to-ports"},
	},
	{name: "NETMAP", options: map[string]*option{"--to": one(address)}},
	{
		name:     "REJECT",
		options:  map[string]*option{"--reject-with": one(named(rejects))},
		defaults: map[string][]string{"--reject-with": {"port-unreach"}},
	},
	{
		name: "LOG",
		options: map[string]*option{
			"--log-level": one(logLevel), "--log-prefix": one(asIs), "--log-tcp-sequence": flag(), "--log-tcp-options": flag(),
			"--log-ip-options": flag(), "--log-uid": flag(), "--log-macdecode": flag(),
		},
		defaults: map[string][]string{"--log-level": {"4"}},
	},
	{
		name: "NFLOG",
		options: map[string]*option{
			"--nflog-group": one(decimal), "--nflog-prefix": one(asIs), "--nflog-range": one(decimal),
			"--nflog-size": one(decimal), "--nflog-threshold": one(decimal),
		},
	},
	{
		name: "NFQUEUE",
		options: map[string]*option{
			"--queue-num": one(decimal), "--queue-balance": one(asIs), "--queue-bypass": flag(), "--queue-cpu-fanout": flag(),
		},
		defaults: map[string][]string{"--queue-num": {"0"}},
	},
	{
		name: "CT",
		options: map[string]*option{
			"--notrack": flag(), "--helper": one(asIs), "--timeout": one(asIs), "--ctevents": one(asIs), "--expevents": one(asIs),
			"--zone": one(decimal), "--zone-orig": one(decimal), "--zone-reply": one(decimal),
		},
	},
	{
		name:     "TPROXY",
		options:  map[string]*option{"--on-port": one(port), "--on-ip": one(plainAddress), "--tproxy-mark": one(mark)},
		defaults: map[string][]string{"--on-ip": {"0.0.0.0", "::"}, "--tproxy-mark": {"0x0/0x0"}},
	},
	{name: "TCPMSS", options: map[string]*option{"--set-mss": one(decimal), "--clamp-mss-to-pmtu": flag()}},
}

// logLevel reads syslog's numbers and names, of --log-level, and returns the number.
func logLevel(text string) (string, bool) {
	if n, ok := logLevels[text]; ok {
		return n, true
	}
	return decimal(text)
}
