// Package randrules draws random rules in many spellings, for tests that compare how canaryd and
// iptables read them. [Draw] draws a rule, [Rule.Spell] spells it in a random way, and
// [Rule.Mutate] changes one of its options.
package randrules

import (
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/versions"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A choice draws one option, as several spellings of one meaning; nothing means to omit the
// option.
type choice func(*rand.Rand) []string

// A part is a match, the target or one option of no extension.
type part struct {
	leads   []string // spellings of the first words; "" where -p implies the match
	choices []choice
	drawn   [][]string
}

// A Rule is a random rule. It can make other spellings, and other rules.
type Rule struct {
	proto *part // always first: iptables wants it before the ports
	base  []*part
	parts []*part // matches, in an order that is kept
	last  *part   // the target
}

func (p *part) draw(r *rand.Rand) *part {
	p.drawn = nil
	for _, c := range p.choices {
		p.drawn = append(p.drawn, c(r))
	}
	return p
}

func (p *part) clone() *part {
	c := *p
	c.drawn = slices.Clone(p.drawn)
	return &c
}

func (p *part) unknown() bool {
	return slices.Contains([]string{"-m u32", "-m string"}, p.leads[0])
}

func (p *part) spell(r *rand.Rand) string {
	var words []string
	for _, d := range p.drawn {
		if len(d) > 0 {
			words = append(words, pick(r, d...))
		}
	}
	if len(words) == 0 && slices.Contains(p.leads, "") {
		return ""
	}
	r.Shuffle(len(words), func(i, j int) { words[i], words[j] = words[j], words[i] })
	return strings.TrimSpace(pick(r, p.leads...) + " " + strings.Join(words, " "))
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func (w Rule) all() []*part {
	return slices.DeleteFunc(slices.Concat([]*part{w.proto}, w.base, w.parts, []*part{w.last}), func(p *part) bool { return p == nil })
}

// Spell returns the rule in a random spelling.
func (w Rule) Spell(r *rand.Rand) string {
	var texts []string
	for _, p := range append(slices.Clone(w.parts), w.last) {
		texts = append(texts, p.spell(r))
	}
	for _, b := range w.base {
		texts = slices.Insert(texts, r.IntN(len(texts)+1), b.spell(r))
	}
	if w.proto != nil {
		texts = slices.Insert(texts, 0, w.proto.spell(r))
	}
	return strings.Join(strings.Fields(strings.Join(texts, " ")), " ")
}

// Mutate returns the rule with one of its options drawn again.
func (w Rule) Mutate(r *rand.Rand) Rule {
	m := Rule{last: w.last.clone()}
	if w.proto != nil {
		m.proto = w.proto.clone()
	}
	for _, b := range w.base {
		m.base = append(m.base, b.clone())
	}
	for _, p := range w.parts {
		m.parts = append(m.parts, p.clone())
	}
	candidates := slices.DeleteFunc(m.all(), func(p *part) bool { return len(p.choices) == 0 || p == m.proto })
	if len(candidates) > 0 {
		p := pick(r, candidates...)
		i := r.IntN(len(p.choices))
		p.drawn[i] = p.choices[i](r)
	}
	return m
}

// same returns a choice of several spellings of one meaning. With negate it is sometimes
// negated; odds is the probability that the option is present.
func same(odds float64, negate bool, groups ...[]string) choice {
	return func(r *rand.Rand) []string {
		if r.Float64() > odds {
			return nil
		}
		list := slices.Clone(pick(r, groups...))
		if negate && r.IntN(4) == 0 {
			for i := range list {
				list[i] = "! " + list[i]
			}
		}
		return list
	}
}

func g(spellings ...string) []string { return spellings }

// each returns a group for each word.
func each(option string, words ...string) [][]string {
	var groups [][]string
	for _, w := range words {
		groups = append(groups, g(option+" "+w))
	}
	return groups
}

// alike puts each of several option names before each spelling of a group.
func alike(names []string, groups ...[]string) [][]string {
	var all [][]string
	for _, group := range groups {
		var list []string
		for _, n := range names {
			for _, v := range group {
				list = append(list, n+" "+v)
			}
		}
		all = append(all, list)
	}
	return all
}

var marksOf = [][]string{
	g("0x4000", "16384", "0x00004000", "0x4000/0xffffffff", "040000/0xFFFFFFFF"), g("0x4000/0x4000", "16384/0x4000"),
	g("0", "0x0"), g("0x1/0x3"), g("0xffffffff", "4294967295"), g("0x0/0x8000"),
}

func addressesOf(f rules.Family) [][]string {
	all := [][]string{
		g("10.0.0.1", "10.0.0.1/32", "10.0.0.1/255.255.255.255"), g("10.0.0.2"), g("10.0.0.0/8", "10.1.2.3/8", "10.0.0.0/255.0.0.0"),
		g("127.0.0.0/8"), g("10.0.0.0/9"), g("10.0.3.0/255.0.255.0", "10.9.3.7/255.0.255.0"), g("224.0.0.0/4"),
	}
	if f == rules.IPv6 {
		all = [][]string{
			g("fd00::1", "FD00:0:0::1/128", "fd00:0000::0001"), g("fd00::2"), g("fd00:1::/32", "fd00:1:2::3/32", "fd00:1::9/ffff:ffff::"),
			g("ff00::/8"), g("fd00::1/ffff::ff"), g("::ffff:1.2.3.4"),
		}
	}
	if versions.OddMasks.Here() {
		odd := []string{"10.0.3.0/255.0.255.0", "fd00::1/ffff::ff"}
		all = slices.DeleteFunc(all, func(group []string) bool { return slices.Contains(odd, group[0]) })
	}
	return all
}

var portsOf = [][]string{
	g("80", "80:80"), g("443"), g("53", "53:53"), g("81"), g("0:80", ":80"), g("80:65535", "80:"), g("30000:32767"),
}

// Draw draws one rule for a table of a family.
func Draw(r *rand.Rand, f rules.Family, t rules.TableName) Rule {
	var w Rule
	v4 := f == rules.IPv4
	address := addressesOf(f)
	for _, names := range [][]string{{"-s", "--source", "--src"}, {"-d", "--destination", "--dst"}} {
		w.base = append(w.base, &part{leads: g(""), choices: []choice{same(0.4, true, alike(names, address...)...)}})
	}
	for _, names := range [][]string{{"-i", "--in-interface"}, {"-o", "--out-interface"}} {
		if t == rules.Nat && names[0] == "-o" {
			continue
		}
		w.base = append(w.base, &part{leads: g(""), choices: []choice{same(0.2, true, alike(names, g("eth0"), g("eth+"), g("docker0"))...)}})
	}
	names := g("-p", "--protocol", "--proto")
	proto := pick(r, "tcp", "tcp", "tcp", "udp", "icmp", "sctp", "", "other")
	if t == rules.Nat {
		proto = pick(r, "tcp", "udp")
	}
	port := func(option, long string) choice { return same(0.6, true, alike(g(option, long), portsOf...)...) }
	if proto == "tcp" {
		port = func(option, long string) choice {
			return same(0.6, true, alike(g(option, long), append([][]string{g("80", "http", "0x50"), g("443", "https")}, portsOf...)...)...)
		}
	}
	transport := []choice{port("--sport", "--source-port"), port("--dport", "--destination-port")}
	var match *part
	switch proto {
	case "tcp":
		w.proto = &part{leads: names, choices: []choice{same(1, false, g("tcp", "6", "TCP"))}}
		match = &part{leads: g("-m tcp", "", "--match tcp"), choices: append(transport,
			same(0.3, true, g("--syn", "--tcp-flags FIN,SYN,RST,ACK SYN", "--tcp-flags ACK,SYN,RST,FIN SYN"),
				g("--tcp-flags ALL NONE", "--tcp-flags FIN,SYN,RST,PSH,ACK,URG NONE"), g("--tcp-flags SYN,RST SYN,RST", "--tcp-flags RST,SYN RST,SYN")),
			same(0.1, true, each("--tcp-option", "2", "3")...))}
	case "udp":
		w.proto = &part{leads: names, choices: []choice{same(1, false, g("udp", "17"))}}
		match = &part{leads: g("-m udp", ""), choices: transport}
	case "sctp":
		w.proto = &part{leads: names, choices: []choice{same(1, false, g("sctp", "132"))}}
		match = &part{leads: g("-m sctp", ""), choices: transport}
	case "icmp":
		types := [][]string{g("--icmp-type 8", "--icmp-type echo-request", "--icmp-type ping"), g("--icmp-type 8/0"), g("--icmp-type 3/1", "--icmp-type host-unreachable")}
		w.proto = &part{leads: names, choices: []choice{same(1, false, g("icmp", "1"))}}
		match = &part{leads: g("-m icmp", ""), choices: []choice{same(1, true, append(types, g("--icmp-type any", "--icmp-type 255"))...)}}
		if !v4 {
			w.proto = &part{leads: names, choices: []choice{same(1, false, g("icmpv6", "ipv6-icmp", "58"))}}
			match = &part{leads: g("-m icmp6", "-m icmpv6", "-m ipv6-icmp", ""), choices: []choice{same(1, true,
				g("--icmpv6-type 128", "--icmpv6-type echo-request"), g("--icmpv6-type 1/0", "--icmpv6-type no-route"), g("--icmpv6-type 136"))}}
		}
	case "other":
		w.proto = &part{leads: g(""), choices: []choice{same(1, true, alike(names, g("4", "ipencap"), g("47", "gre"), g("94", "ipip"), g("esp", "50"), g("253"), g("tcp", "6"))...)}}
	}
	if proto == "tcp" && r.IntN(4) == 0 {
		match = &part{leads: g("-m multiport"), choices: []choice{same(1, true,
			g("--dports 80,443", "--destination-ports http,https"), g("--dports 80"), g("--dports 80,90:100"),
			g("--sports 80,443", "--source-ports 80,443"), g("--ports 80,443"))}}
	}
	if match != nil {
		w.parts = append(w.parts, match)
	}
	for range r.IntN(3) {
		w.parts = append(w.parts, matchOf(r, f, t))
	}
	r.Shuffle(len(w.parts), func(i, j int) { w.parts[i], w.parts[j] = w.parts[j], w.parts[i] })
	// After an unknown match, the owner of an option is ambiguous, so name the match.
	if i := slices.Index(w.parts, match); i > 0 && slices.ContainsFunc(w.parts[:i], (*part).unknown) {
		match.leads = match.leads[:1]
	}
	w.last = targetOf(r, f, t, proto)
	for _, p := range w.all() {
		p.draw(r)
	}
	return w
}

func flagOf(odds float64, negate bool, option string) choice { return same(odds, negate, g(option)) }

// matchOf draws a match that is valid with each protocol.
func matchOf(r *rand.Rand, f rules.Family, t rules.TableName) *part {
	plain := addressesOf(f)
	mask, range1, range2 := "255.255.255.255", "10.0.0.1-10.0.0.9", "10.0.0.1-10.0.0.1"
	hop, wide := []string{"ttl", "--ttl-"}, "255.255.0.0"
	one := "10.0.0.1"
	if f == rules.IPv6 {
		mask, range1, range2 = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fd00::1-fd00::9", "fd00::1-fd00:0::1"
		hop, wide, one = []string{"hl", "--hl-"}, "ffff::", "fd00::1"
	}
	states := [][]string{
		g("NEW"), g("RELATED,ESTABLISHED", "ESTABLISHED,RELATED", "established,related"), g("INVALID"),
		g("INVALID,NEW,UNTRACKED", "UNTRACKED,NEW,INVALID"),
	}
	choices := []*part{
		{leads: g("-m comment"), choices: []choice{same(1, false, g("--comment x", `--comment "x"`), g(`--comment "it's"`, `--comment "it\'s"`), g(`--comment "-j"`, `--comment -j`))}},
		{leads: g("-m mark"), choices: []choice{same(1, true, alike(g("--mark"), marksOf...)...)}},
		{leads: g("-m connmark"), choices: []choice{same(1, true, alike(g("--mark"), marksOf...)...)}},
		{leads: g("-m conntrack"), choices: []choice{
			same(1, true, alike(g("--ctstate"), append(states, g("DNAT"), g("SNAT,DNAT", "DNAT,SNAT"))...)...),
			same(0.2, true, g("--ctproto 6", "--ctproto tcp"), g("--ctproto udp", "--ctproto 17")),
			same(0.2, true, g("--ctorigdst "+one, "--ctorigdst "+plain[0][1]), g("--ctorigdst "+plain[1][0])),
			same(0.2, true, g("--ctorigdstport 80", "--ctorigdstport http"), g("--ctorigdstport 80:90")),
			same(0.2, false, g("--ctdir ORIGINAL", "--ctdir original"), g("--ctdir REPLY")),
			same(0.2, true, g("--ctstatus ASSURED,EXPECTED", "--ctstatus EXPECTED,ASSURED"), g("--ctstatus NONE")),
		}},
		{leads: g("-m state"), choices: []choice{same(1, true, alike(g("--state"), states...)...)}},
		{leads: g("-m statistic --mode random"), choices: []choice{same(1, true,
			g("--probability 0.5", "--probability .5", "--probability 0.50000000000"), g("--probability 0.33333333349", "--probability 0.3333333334", "--probability 0.33333333349"),
			g("--probability 0.3333333335"), g("--probability 1", "--probability 1.00000000000"), g("--probability 0.001", "--probability 1e-3"))}},
		{leads: g("-m statistic --mode nth"), choices: []choice{same(1, true, each("--every", "3", "4")...), same(1, false, each("--packet", "0", "2")...)}},
		{leads: g("-m limit"), choices: []choice{
			same(0.9, false, g("--limit 5/min", "--limit 5/minute", "--limit 300/hour", "--limit 7200/day", "--limit 5/m"), g("--limit 3/hour"),
				g("--limit 1/sec", "--limit 1", "--limit 60/min", "--limit 3600/h"), g("--limit 7001/hour", "--limit 7000/hour"),
				g("--limit 10000/sec", "--limit 9999/second"), g("--limit 25/hour"), g("--limit 2/hour", "--limit 48/day"), g("--limit 100/s")),
			same(0.5, false, each("--limit-burst", "5", "10", "1")...)}},
		{leads: g("-m recent"), choices: []choice{
			same(1, true, g("--set"), g("--remove")), same(0.5, false, each("--name", "DEFAULT", "x")...),
			same(0.5, false, g("--mask "+mask), g("--mask "+wide)), same(0.5, false, g("--rsource"), g("--rdest"))}},
		{leads: g("-m recent"), choices: []choice{
			same(1, true, g("--rcheck"), g("--update")), same(1, false, g("--seconds 10800", "--seconds 0x2a30"), g("--seconds 60")),
			flagOf(0.5, false, "--reap"), same(0.3, false, each("--hitcount", "2", "3")...), flagOf(0.3, false, "--rttl"),
			same(0.7, false, each("--name", "DEFAULT", "KUBE-SEP-A", "y")...)}},
		{leads: g("-m addrtype"), choices: []choice{
			same(1, true, g("--dst-type LOCAL", "--dst-type local"), g("--dst-type UNICAST,LOCAL", "--dst-type LOCAL,UNICAST"), g("--dst-type MULTICAST")),
			same(0.3, true, each("--src-type", "LOCAL", "ANYCAST")...)}},
		{leads: g("-m physdev"), choices: []choice{same(0.5, true, each("--physdev-in", "eth0", "veth+")...), flagOf(1, true, "--physdev-is-bridged")}},
		{leads: g("-m pkttype"), choices: []choice{same(1, true, g("--pkt-type unicast", "--pkt-type host", "--pkt-type HOST"), g("--pkt-type multicast"))}},
		{leads: g("-m iprange"), choices: []choice{same(1, true, each("--src-range", range1)...), same(0.3, true, g("--dst-range "+one, "--dst-range "+range2), g("--dst-range "+range1))}},
		{leads: g("-m length"), choices: []choice{same(1, true, g("--length 10:65535", "--length 10:"), g("--length 8", "--length 010", "--length 8:8"), g("--length 0:65535"))}},
		{leads: g("-m " + hop[0]), choices: []choice{same(1, false, g(hop[1]+"eq 3", hop[1]+"eq 0x3"), g("! "+hop[1]+"eq 3"), g(hop[1]+"lt 3"))}},
		{leads: g("-m helper"), choices: []choice{same(1, true, each("--helper", "ftp", "sip")...)}},
		// Unknown extensions have one spelling each.
		{leads: g("-m u32"), choices: []choice{same(1, false, each("--u32", `"0x0&0xff=0x1"`, `"0x0&0xff=0x2"`)...)}},
		{leads: g("-m string"), choices: []choice{same(1, false, g(`--string "-j X" --algo bm`), g(`--string "-j Y" --algo bm`))}},
	}
	if t == rules.Mangle && f == rules.IPv4 {
		choices = append(choices, &part{leads: g("-m socket"), choices: []choice{flagOf(0.5, false, "--transparent"), flagOf(0.5, false, "--nowildcard")}})
	}
	return pick(r, choices...)
}

// targetOf draws a target, or none.
func targetOf(r *rand.Rand, f rules.Family, t rules.TableName, proto string) *part {
	jump := func(names string) *part { return &part{leads: g("-j "+names, "--jump "+names)} }
	with := func(name string, choices ...choice) *part {
		p := jump(name)
		p.choices = choices
		return p
	}
	list := []*part{
		{leads: g("")}, jump("Y"), jump("Z"), {leads: g("-g Y", "--goto Y")}, jump("RETURN"), jump("ACCEPT"),
		with("LOG", same(0.5, false, g("--log-level 7", "--log-level debug"), g("--log-level 4", "--log-level warning")), same(0.5, false, each("--log-prefix", `"a b"`, "c")...), flagOf(0.3, false, "--log-uid")),
		with("NFLOG", same(0.5, false, each("--nflog-group", "3", "7")...), same(0.5, false, each("--nflog-prefix", "a", `"-j x"`)...)),
	}
	ip, other := "10.0.0.1", "10.0.0.7"
	at := func(a string) string { return a }
	if f == rules.IPv6 {
		ip, other = "fd00::1", "fd00::7"
		at = func(a string) string { return "[" + a + "]" }
	}
	switch t {
	case rules.Mangle:
		set := [][]string{
			g("--or-mark 0x4000", "--set-xmark 0x4000/0x4000", "--set-xmark 16384/16384", "--set-mark 0x4000/0x4000"), g("--xor-mark 0x4000", "--set-xmark 0x4000/0"),
			g("--and-mark 0xffffbfff", "--set-xmark 0x0/0x4000", "--set-mark 0/0x4000"), g("--set-mark 0x4000", "--set-xmark 0x4000", "--set-xmark 0x4000/0xffffffff"),
			g("--set-mark 0x5/0x1", "--set-xmark 5/5"), g("--set-xmark 0x5/0x1"),
		}
		list = append(list, with("MARK", same(1, false, set...)), with("MARK", same(1, false, set...)), with("CONNMARK", same(1, false, set...)),
			with("CONNMARK --save-mark", same(0.5, false, each("--nfmask", "0xff", "0xffffffff")...), same(0.5, false, each("--ctmask", "0xff", "0x0f")...)),
			with("CONNMARK --restore-mark", same(0.5, false, g("--mask 0xff", "--nfmask 255 --ctmask 0xff"), g("--mask 0xffffffff"))))
		if proto == "tcp" || proto == "udp" {
			list = append(list, with("TPROXY", same(1, false, each("--on-port", "15001", "15006")...), same(0.5, false, g("--tproxy-mark 0x539", "--tproxy-mark 1337/0xffffffff"), g("--tproxy-mark 0x1/0x3")),
				same(0.3, false, g("--on-ip "+ip), g("--on-ip "+other))))
		}
	case rules.Filter:
		answers := [][]string{g("--reject-with icmp-port-unreachable", "--reject-with port-unreach", ""), g("--reject-with icmp-host-prohibited", "--reject-with host-prohib")}
		if f == rules.IPv6 {
			answers = [][]string{g("--reject-with icmp6-port-unreachable", "--reject-with port-unreach", ""), g("--reject-with icmp6-adm-prohibited", "--reject-with adm-prohibited")}
		}
		if proto == "tcp" {
			answers = append(answers, g("--reject-with tcp-reset"))
		}
		list = append(list, with("REJECT", same(1, false, answers...)), with("REJECT", same(1, false, answers...)), jump("DROP"))
	case rules.Nat:
		port := "http"
		if versions.NamedPorts.Here() {
			port = "80"
		}
		to := func(option string) choice {
			return same(1, false, g(option+" "+ip, option+" "+at(ip)), g(option+" "+at(ip)+":80", option+" "+at(ip)+":"+port, option+" "+at(ip)+":80-80"),
				g(option+" "+at(ip)+":80-90"), g(option+" "+at(ip+"-"+other)+":81"), g(option+" "+ip+"-"+other), g(option+" :81"))
		}
		ports := same(0.5, false, g("--to-ports 80", "--to-ports "+port, "--to-ports 80-80"), g("--to-ports 80-90"))
		random := 0.3
		if versions.RandomRedirect.Here() {
			random = 0
		}
		list = append(list,
			with("DNAT", to("--to-destination"), flagOf(0.3, false, "--random"), flagOf(0.3, false, "--persistent")),
			with("DNAT", to("--to-destination")),
			with("SNAT", to("--to-source"), flagOf(0.3, false, "--random"), flagOf(0.3, false, "--random-fully")),
			with("MASQUERADE", ports, flagOf(0.3, false, "--random"), flagOf(0.3, false, "--random-fully")),
			with("REDIRECT", ports, flagOf(random, false, "--random")))
	case rules.Raw:
		list = append(list, jump("NOTRACK"), with("CT", same(1, false, g("--notrack"), g("--zone 1"), g("--zone-orig 1"), g("--zone mark"))))
	}
	return pick(r, list...)
}
