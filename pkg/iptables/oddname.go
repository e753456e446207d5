package iptables

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
)

// This file finds names in the bytes of rules that iptables prints as they are, without quotes,
// and would read back as something else: a name with a space in it is two words.

// A nameField is a name within the data of an extension: where it begins, and how long it may be.
type nameField struct{ at, size int }

// nameFields are the names that xt extensions print without quotes (uapi/linux/netfilter/xt_*.h),
// where they are at the same place in all revisions. An extension without names has none.
var nameFields = map[string][]nameField{
	"recent":  {{10, 200}},
	"physdev": {{0, 16}, {32, 16}},
	"helper":  {{4, 30}},
	"nfacct":  {{0, 32}},
	"rateest": {{0, 16}, {16, 16}},
	"osf":     {{0, 32}},
	// Targets.
	"CT":        {{12, 16}, {28, 32}},
	"IDLETIMER": {{4, 28}},
	"LED":       {{0, 27}},
	"TEE":       {{16, 16}},
	"RATEEST":   {{0, 16}},
}

// textFields are texts that extensions print in quotes. A line break breaks them all the same.
var textFields = map[string]nameField{"comment": {0, commentSize}, "LOG": {2, 30}, "NFLOG": {12, 64}}

// oddExtension returns why a rule with such an extension has no text that may be written back, or
// nothing.
func oddExtension(name string, revision byte, data []byte) string {
	switch name {
	// The data of these holds no text at all.
	case "tcp", "udp", "udplite", "sctp", "dccp", "icmp", "icmp6", "multiport", "mark", "connmark", "conntrack", "state", "statistic",
		"limit", "connlimit", "addrtype", "owner", "set", "socket", "rpfilter", "pkttype", "mac", "iprange", "length", "ttl", "hl",
		"MARK", "CONNMARK", "DNAT", "SNAT", "MASQUERADE", "REDIRECT", "NETMAP", "REJECT", "NFQUEUE", "TPROXY", "TCPMSS", "SET", "":
		return ""
	}
	if text, ok := textFields[name]; ok {
		if bytes.ContainsFunc(nft.UntilNUL(text.of(data)), isControl) {
			return fmt.Sprintf("the text of its %s holds a line break or another control character", name)
		}
		return ""
	}
	fields, known := nameFields[name]
	switch {
	case name == "hashlimit" && revision < 2:
		fields, known = []nameField{{0, 16}}, true
	case name == "hashlimit":
		fields, known = []nameField{{0, 255}}, true
	case name == "string":
		return oddPattern(data)
	}
	if !known {
		return oddRun(name, data)
	}
	for _, field := range fields {
		if reason := oddName(string(nft.UntilNUL(field.of(data)))); reason != "" {
			return fmt.Sprintf("a name in its %s %s", name, reason)
		}
	}
	return ""
}

func (f nameField) of(data []byte) []byte {
	if len(data) <= f.at {
		return nil
	}
	return data[f.at:min(len(data), f.at+f.size)]
}

// oddName returns why a name that is printed without quotes reads back as another one, or
// nothing.
func oddName(name string) string {
	switch {
	case strings.ContainsFunc(name, func(c rune) bool { return c <= ' ' || c == 0x7f }):
		return fmt.Sprintf("(%q) holds a space or a control character, which iptables prints without quotes", name)
	case strings.Contains(name, `"`):
		return fmt.Sprintf("(%q) holds a quote, which iptables prints as it is", name)
	case strings.HasPrefix(name, "!"):
		return fmt.Sprintf("(%q) begins with !, which iptables reads as a negation", name)
	}
	return ""
}

func isControl(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }

// oddPattern checks the match "string" (struct xt_string_info): iptables prints a pattern in
// quotes and escapes the quotes in it, but no backslash (print_string in libxt_string.c of 1.8.9).
func oddPattern(data []byte) string {
	const patternAt, lengthAt = 20, 148
	if len(data) <= lengthAt {
		return ""
	}
	if reason := oddName(string(nft.UntilNUL(data[4:patternAt]))); reason != "" {
		return "the algorithm of its string " + reason
	}
	pattern := data[patternAt : patternAt+min(int(data[lengthAt]), lengthAt-patternAt)]
	asHex := bytes.ContainsFunc(pattern, func(c rune) bool { return c < ' ' || c > '~' }) || bytes.HasSuffix(pattern, []byte(`\`))
	if !asHex && bytes.Contains(pattern, []byte(`\`)) {
		return "the pattern of its string holds a backslash, which iptables prints without an escape"
	}
	return ""
}

// oddRun looks for text with a space or a quote in the data of an extension that is not known. It
// takes three characters for a text, and addresses are four: where in doubt the rule is odd.
func oddRun(name string, data []byte) string {
	const least = 3
	for len(data) > 0 {
		n := 0
		for n < len(data) && (data[n] >= ' ' && data[n] <= '~' || data[n] == '\t' || data[n] == '\n' || data[n] == '\r') {
			n++
		}
		if run := data[:n]; n >= least && bytes.ContainsAny(bytes.TrimSpace(run), " \t\r\n\"") {
			return fmt.Sprintf("its extension %s holds the text %q, which iptables may print without quotes", name, run)
		}
		data = data[min(n+1, len(data)):]
	}
	return ""
}
