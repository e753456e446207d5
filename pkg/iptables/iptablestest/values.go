package iptablestest

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// value returns an extension's option with its values as iptables prints them.
func value(extension, option string, values []string) []string {
	one := ""
	if len(values) == 1 {
		one = values[0]
	}
	switch extension + " " + option {
	case "MARK --set-mark":
		return []string{"--set-xmark", hex(one, 0xffffffff)}
	case "MARK --or-mark":
		m := mark(one)
		return []string{"--set-xmark", fmt.Sprintf("%#x/%#x", m, m)}
	case "MARK --and-mark":
		return []string{"--set-xmark", fmt.Sprintf("0x0/%#x", ^mark(one))}
	case "MARK --xor-mark":
		return []string{"--set-xmark", fmt.Sprintf("%#x/0x0", mark(one))}
	case "mark --mark", "connmark --mark":
		if text, found := strings.CutSuffix(hex(one, 0xffffffff), "/0xffffffff"); found {
			return []string{option, text}
		}
		return []string{option, hex(one, 0xffffffff)}
	case "tcp --syn":
		return []string{"--tcp-flags", "FIN,SYN,RST,ACK", "SYN"}
	case "tcp --destination-port", "udp --destination-port":
		option = "--dport"
	case "tcp --source-port", "udp --source-port":
		option = "--sport"
	case "statistic --probability":
		if p, err := strconv.ParseFloat(one, 64); err == nil {
			const steps = 1 << 31
			return []string{option, fmt.Sprintf("%.11f", math.Round(p*steps)/steps)}
		}
	case "conntrack --ctstate":
		return []string{option, states(one)}
	}
	quoted := []string{option}
	for _, v := range values {
		quoted = append(quoted, rules.Quote(v))
	}
	return quoted
}

func mark(text string) uint32 {
	n, _ := strconv.ParseUint(text, 0, 32)
	return uint32(n)
}

// hex writes VALUE or VALUE/MASK as "0x1/0xff".
func hex(text string, mask uint32) string {
	v, m, found := strings.Cut(text, "/")
	if found {
		mask = mark(m)
	}
	return fmt.Sprintf("%#x/%#x", mark(v), mask)
}

// states sorts connection states in iptables' printing order.
func states(list string) string {
	order := []string{"INVALID", "NEW", "RELATED", "ESTABLISHED", "UNTRACKED", "SNAT", "DNAT"}
	words := strings.Split(list, ",")
	slices.SortStableFunc(words, func(a, b string) int { return slices.Index(order, a) - slices.Index(order, b) })
	return strings.Join(words, ",")
}

// printed returns an extension's options with iptables' additions.
func (e *extension) printed(family rules.Family) []string {
	switch {
	case e.name == "REJECT" && len(e.words) == 0 && family == rules.IPv6:
		return []string{"--reject-with", "icmp6-port-unreachable"}
	case e.name == "REJECT" && len(e.words) == 0:
		return []string{"--reject-with", "icmp-port-unreachable"}
	case e.name == "recent":
		return e.recent(family)
	}
	return e.words
}

// recent sorts the options of -m recent and adds the implied ones.
func (e *extension) recent(family rules.Family) []string {
	given := map[string][]string{
		"--name": {"--name", "DEFAULT"},
		"--mask": {"--mask", "255.255.255.255"},
	}
	if family == rules.IPv6 {
		given["--mask"][1] = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	var name string
	for _, w := range e.words {
		if option := strings.TrimPrefix(w, "! "); strings.HasPrefix(option, "--") {
			name = option
			given[name] = nil
		}
		given[name] = append(given[name], w)
	}
	if given["--rdest"] == nil {
		given["--rsource"] = []string{"--rsource"}
	}
	var words []string
	for _, option := range []string{
		"--set", "--rcheck", "--update", "--remove", "--seconds", "--reap", "--hitcount", "--rttl", "--name", "--mask", "--rsource", "--rdest",
	} {
		words = append(words, given[option]...)
	}
	return words
}

// isExtension reports whether a target is one of iptables' own.
func isExtension(target string) bool {
	return slices.Contains([]string{
		"ACCEPT", "DROP", "RETURN", "QUEUE", "AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK",
		"CT", "DNAT", "DNPT", "DSCP", "ECN", "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MASQUERADE", "NETMAP",
		"NFLOG", "NFQUEUE", "NOTRACK", "RATEEST", "REDIRECT", "REJECT", "SECMARK", "SET", "SNAT", "SNPT", "SYNPROXY",
		"TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE", "TTL", "ULOG",
	}, target)
}
