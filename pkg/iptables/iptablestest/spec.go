package iptablestest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A spelling collects one rule's words in iptables' printing order: addresses, interfaces,
// protocol, matches, target.
type spelling struct {
	family  rules.Family
	base    [6]string // in the order of baseOptions
	matches []*extension
	target  *extension
	jump    string // -j or -g
	last    *extension
}

// An extension is a match or a target with its options.
type extension struct {
	name  string
	words []string
}

// baseOptions are the options of no extension, in printing order.
var baseOptions = []string{"-s", "-d", "-i", "-o", "-p", "-f"}

// shortForm maps every option of no extension to its short name.
var shortForm = map[string]string{
	"-s": "-s", "--source": "-s", "--src": "-s",
	"-d": "-d", "--destination": "-d", "--dst": "-d",
	"-i": "-i", "--in-interface": "-i",
	"-o": "-o", "--out-interface": "-o",
	"-p": "-p", "--protocol": "-p", "--proto": "-p",
	"-f": "-f", "--fragment": "-f",
	"-m": "-m", "--match": "-m",
	"-j": "-j", "--jump": "-j",
	"-g": "-g", "--goto": "-g",
	"-c": "-c", "--set-counters": "-c",
}

// protocolOptions load the match with the name of the rule's protocol.
var protocolOptions = []string{
	"--dport", "--sport", "--destination-port", "--source-port", "--tcp-flags", "--syn", "--icmp-type", "--icmpv6-type",
}

// freeText are the options whose value is free text.
var freeText = []string{"--comment", "--log-prefix", "--nflog-prefix", "--string"}

// normalize turns the words behind "-A CHAIN" into the rule that iptables-save would print for
// them, as far as the Fake knows. It knows order and short names of options, prefix lengths,
// implied protocol matches, marks, and quoting. It knows no service, host or ICMP names and
// passes on unknown words. The error is a sentence in iptables' style.
func normalize(family rules.Family, words []string) (rules.Rule, error) {
	s := spelling{family: family}
	not := ""
	for i := 0; i < len(words); {
		if words[i] == "!" {
			not = "! "
			i++
			continue
		}
		n, err := s.option(not, words[i:])
		if err != nil {
			return rules.Rule{}, err
		}
		not = ""
		i += n
	}
	spec := s.String()
	r := rules.Rule{Spec: spec}
	if s.target != nil {
		r.Target = s.target.name
	}
	return r, nil
}

// option takes one option with its values from the front of words and returns the number of
// words taken.
func (s *spelling) option(not string, words []string) (int, error) {
	name := words[0]
	short, base := shortForm[name]
	switch {
	case !strings.HasPrefix(name, "-"):
		return 0, badArgument(name)
	case !base:
		return s.extensionOption(not, words)
	case short == "-f":
		s.base[5] = not + short
		return 1, nil
	case len(words) < 2:
		return 0, fmt.Errorf("option %q requires an argument", name)
	}
	value := words[1]
	switch short {
	case "-c":
		return 3, nil
	case "-m":
		s.last = &extension{name: value}
		s.matches = append(s.matches, s.last)
	case "-j", "-g":
		if s.target != nil {
			return 0, fmt.Errorf("multiple -j flags not allowed")
		}
		s.jump, s.target = short, &extension{name: value}
		s.last = s.target
	case "-s", "-d":
		text, err := s.address(value)
		if err != nil {
			return 0, err
		}
		if text == "" {
			return 2, nil
		}
		s.base[slices.Index(baseOptions, short)] = not + short + " " + text
	case "-p":
		if text := protocol(value); text != "all" {
			s.base[4] = not + short + " " + text
		}
	default:
		s.base[slices.Index(baseOptions, short)] = not + short + " " + value
	}
	return 2, nil
}

func (s *spelling) extensionOption(not string, words []string) (int, error) {
	name := words[0]
	owner := s.last
	if slices.Contains(protocolOptions, name) {
		owner = s.protocolMatch()
	}
	if owner == nil {
		return 0, fmt.Errorf("unknown option %q", name)
	}
	n := 1
	for n < len(words) && words[n] != "!" && !isOption(words[n]) {
		n++
	}
	if slices.Contains(freeText, name) {
		if len(words) < 2 {
			return 0, fmt.Errorf("option %q requires an argument", name)
		}
		owner.words = append(owner.words, not+name, quote(words[1]))
		return 2, nil
	}
	for _, w := range value(owner.name, name, words[1:n]) {
		owner.words = append(owner.words, not+w)
		not = ""
	}
	return n, nil
}

func isOption(word string) bool {
	return len(word) > 1 && word[0] == '-' && (word[1] < '0' || word[1] > '9')
}

// protocolMatch returns the match that -p implies, adding it if needed.
func (s *spelling) protocolMatch() *extension {
	name := strings.TrimPrefix(strings.TrimPrefix(s.base[4], "! "), "-p ")
	switch name {
	case "":
		return s.last
	case "ipv6-icmp":
		name = "icmp6"
	}
	for _, m := range s.matches {
		if m.name == name {
			return m
		}
	}
	m := &extension{name: name}
	s.matches = append(s.matches, m)
	return m
}

// address writes an address as iptables prints it, and "" for "any".
func (s *spelling) address(text string) (string, error) {
	bad := fmt.Errorf("host/network `%s' not found", text)
	host, mask, masked := strings.Cut(text, "/")
	addr, err := netip.ParseAddr(host)
	if err != nil || addr.Is6() != (s.family == rules.IPv6) {
		return "", bad
	}
	bits := addr.BitLen()
	if masked {
		if bits, err = maskBits(mask, addr.BitLen()); err != nil {
			return "", bad
		}
	}
	if bits == 0 {
		return "", nil
	}
	p, err := addr.Prefix(bits)
	if err != nil {
		return "", bad
	}
	return p.String(), nil
}

// maskBits reads "24" or "255.255.255.0".
func maskBits(mask string, most int) (int, error) {
	m, err := netip.ParseAddr(mask)
	if err != nil {
		bits, err := strconv.Atoi(mask)
		if err == nil && (bits < 0 || bits > most) {
			err = strconv.ErrRange
		}
		return bits, err
	}
	bits := 0
	for _, b := range m.AsSlice() {
		for ; b&0x80 != 0; b <<= 1 {
			bits++
		}
	}
	return bits, nil
}

// protocol returns a protocol's name for its number.
func protocol(text string) string {
	names := map[string]string{
		"0": "all", "1": "icmp", "6": "tcp", "17": "udp", "58": "ipv6-icmp", "132": "sctp",
		"icmpv6": "ipv6-icmp", "icmp6": "ipv6-icmp",
	}
	text = strings.ToLower(text)
	if name, ok := names[text]; ok {
		return name
	}
	return text
}

var escaped = strings.NewReplacer(`"`, `\"`, `\`, `\\`, `'`, `\'`)

// quote quotes as xtables_save_string does: every text with a character outside [-_0-9A-Za-z],
// and the empty string.
func quote(text string) string {
	plain := func(c rune) bool {
		return c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
	}
	if text != "" && strings.IndexFunc(text, func(c rune) bool { return !plain(c) }) < 0 {
		return text
	}
	return `"` + escaped.Replace(text) + `"`
}

// String puts the words together.
func (s *spelling) String() string {
	var words []string
	for _, b := range s.base {
		if b != "" {
			words = append(words, b)
		}
	}
	for _, m := range s.matches {
		words = append(words, "-m", m.name)
		words = append(words, m.printed(s.family)...)
	}
	if t := s.target; t != nil {
		words = append(words, s.jump, t.name)
		words = append(words, t.printed(s.family)...)
	}
	return strings.Join(words, " ")
}

// badArgument returns xtables' own complaint, which begins with a capital.
func badArgument(word string) error { return errors.New(xtablesBadArgument + " `" + word + "'") }

const xtablesBadArgument = "Bad argument"
