package iptables

import (
	"bytes"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// ownersRules are rules of Docker, kubelet, CNI plugins (portmap, bridge,
// firewall, flannel), kube-proxy, service meshes and network policies. Learning
// them executes nothing. A is an address, in brackets where a port follows, C a
// higher one, B the unspecified one, N a network. ICMP is followed by a type,
// HOPS and SETHOPS by the end of an option of ttl or hl.
const ownersRules = `
filter -i docker0 ! -o docker0 -j ACCEPT
filter -i docker0 -o docker0 -j DROP
filter -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
filter -o docker0 -j GOAL
filter -d A ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
filter -j RETURN
filter -p tcp -m state --state RELATED,ESTABLISHED -m tcp --sport 8081 -j ACCEPT
nat -m addrtype --dst-type LOCAL -j GOAL
nat -s N ! -o docker0 -j MASQUERADE
nat -s A -d A -p udp -m udp --dport 53 -j MASQUERADE
nat ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination [A]:80
nat -d A -p sctp -m sctp --dport 8080 -j DNAT --to-destination [A]:80
raw -d A ! -i docker0 -j DROP
nat -m comment --comment "dnat name: \"cbr0\" id: \"8f1b\"" -p tcp -m multiport --dports 8080,8081,9000:9005 -j GOAL
nat -s N -p tcp -m tcp --dport 8080 -j GOAL
nat -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
nat -m mark --mark 0x2000/0x2000 -j MASQUERADE
nat -d N -m comment --comment "name: \"cbr0\" id: \"8f1b\"" -j ACCEPT
nat ! -d N -m comment --comment "name: \"cbr0\" id: \"8f1b\"" -j MASQUERADE
nat -s N ! -d N -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
filter -s A -m comment --comment "CNI firewall plugin rules" -j GOAL
filter -d A -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
filter -d N ! -s N -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
nat -m mark ! --mark 0x4000/0x4000 -j RETURN
nat -j MARK --xor-mark 0x4000
nat -j MARK --or-mark 0x4000
nat -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
nat -m comment --comment plain -m recent --name KUBE-SEP-ABCDEFGHIJKLMNOP --set -p tcp -m tcp -j DNAT --to-destination [A]:8080
nat -m recent --name KUBE-SEP-ABCDEFGHIJKLMNOP --rcheck --seconds 10800 --reap -j GOAL
nat -m statistic --mode random --probability 0.3333333333 -j GOAL
nat -i veth+ -m comment --comment "x -> y" -j GOAL
filter -p tcp -m comment --comment "ns/x has no endpoints" -m addrtype --dst-type LOCAL -m tcp --dport 30000 -j REJECT
filter -d A -p udp -m comment --comment "ns/x has no endpoints" -m udp --dport 53 -j REJECT
filter -m limit --limit 5/min --limit-burst 10 -j LOG --log-prefix "denied: " --log-level 7
filter -p tcp -m tcp --dport 1024:2048 -j DROP
filter -p tcp -m tcp ! --sport 1:1024 -g GOAL
mangle -o tun0 -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
mangle -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
raw -d A -p udp -m udp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK
nat -j SNAT --to-source A
nat -m owner --uid-owner 1337 -j RETURN
nat -m owner ! --gid-owner 1337-1340 -j RETURN
filter -m owner ! --socket-exists --uid-owner 0 -j ACCEPT
nat -p tcp -m owner --uid-owner 0 -m tcp --dport 53 -j REDIRECT --to-ports 15053
mangle -p tcp -j TPROXY --on-port 15006 --on-ip B --tproxy-mark 0x1/0xffffffff
mangle -p udp -m mark --mark 0x9b00200 -j TPROXY --on-port 39675 --on-ip A --tproxy-mark 0x200/0xffffffff
mangle -m socket --transparent -j MARK --set-xmark 0x200/0xffffffff
mangle -m socket -j MARK --set-xmark 0x1/0x1
mangle -m socket --nowildcard --restore-skmark -j ACCEPT
raw -m rpfilter --validmark --invert -j DROP
raw -m rpfilter --loose -j ACCEPT
filter -m physdev --physdev-is-bridged -j GOAL
filter -m physdev ! --physdev-is-in --physdev-is-out -j GOAL
filter -m pkttype --pkt-type multicast -j ACCEPT
filter -m pkttype ! --pkt-type unicast -j DROP
filter -m set --match-set cali40s:abc src -j GOAL
filter -m set ! --match-set cali40s:abc dst -m set --match-set PAIRS src,dst -j DROP
nat -m set --match-set PAIRS dst,dst -j RETURN
filter -m length --length 100 -j ACCEPT
filter -m length ! --length 100:200 -j ACCEPT
filter HOPS-eq 5 -j ACCEPT
filter HOPSnot-eq 5 -j ACCEPT
filter HOPS-lt 5 -j ACCEPT
filter HOPS-gt 5 -j ACCEPT
filter -m dscp --dscp 0x0a -j ACCEPT
filter -m dscp ! --dscp 0x2e -j ACCEPT
filter -m iprange --src-range A-C -j ACCEPT
filter -m iprange ! --src-range A-C --dst-range A-C -j DROP
filter -p tcp -m connlimit --connlimit-above 20 --connlimit-mask 24 -j DROP
filter -p tcp -m connlimit --connlimit-upto 20 --connlimit-daddr -j ACCEPT
filter -m string --string badbot --algo bm -j DROP
filter -m string ! --string "bad bot" --algo kmp --from 10 --to 100 --icase -j DROP
filter -p tcp -m tcpmss --mss 536 -j DROP
filter -p tcp -m tcpmss ! --mss 1:536 -j DROP
filter -m helper --helper ftp -j ACCEPT
filter -m helper ! --helper ftp-2121 -j ACCEPT
filter -m tos --tos 0x10/0x3f -j ACCEPT
filter -m tos ! --tos 0x10 -j ACCEPT
filter -m policy --dir in --pol ipsec -j ACCEPT
filter -m policy --dir out --pol none -j ACCEPT
filter -s N -m policy --dir in --pol ipsec --reqid 1 --proto esp -j ACCEPT
filter -m policy --dir in --pol ipsec ! --reqid 4294967295 ! --spi 0x10 ! --proto ah ! --mode transport -j ACCEPT
filter -m policy --dir out --pol ipsec --strict --reqid 1 --next --spi 0x10 --mode transport -j ACCEPT
filter -m physdev --physdev-in tap0 --physdev-is-bridged -j ACCEPT
filter -m physdev ! --physdev-out tap+ --physdev-is-out --physdev-is-bridged -j ACCEPT
filter -p esp -j ACCEPT
filter -p ah -j ACCEPT
filter -p udplite -j ACCEPT
filter -j NFLOG --nflog-group 1 --nflog-prefix "DPI|x" --nflog-size 80
filter -j NFLOG --nflog-prefix plain
filter -j NFLOG --nflog-group 5 --nflog-threshold 3
filter -j NFQUEUE --queue-num 0
filter -j NFQUEUE --queue-num 3 --queue-bypass
filter -j NFQUEUE --queue-balance 0:3 --queue-bypass --queue-cpu-fanout
mangle -j SETHOPS-set 64
mangle -j SETHOPS-dec 1
mangle -j SETHOPS-inc 1
mangle -j DSCP --set-dscp 0x2e
mangle -j TOS --set-tos 0x10/0x3f
mangle -j TEE --gateway A
mangle -j TEE --gateway A --oif eth0
mangle -p udp -m udp --dport 68 -j CHECKSUM --checksum-fill
nat -j SNAT --to-source A-C
nat -p tcp -j DNAT --to-destination [A-C]:80-90
mangle -p udp -m udp --dport 4789 -m u32 --u32 "0x0>>0x16&0x3c@0xc&0xffffff00=0x100200" -j GOAL
mangle -m u32 ! --u32 "0x0<<0x2=0x1,0x2:0x3&&0x4=0x0:0xffff" -j GOAL
filter -m nfacct --nfacct-name account -j ACCEPT
filter ICMP8 -j ACCEPT
filter ICMPnot8 -j ACCEPT
filter ICMP3/4 -j ACCEPT
`

// ownersText returns ownersRules as input of iptables-restore, in chains MINE.
func ownersText(family rules.Family) string {
	address, last, bracketed, network := "10.1.2.3", "10.1.2.9", "10.1.2.3", "10.64.0.0/10"
	unspecified, icmp, option, hops := "0.0.0.0", "-p icmp -m icmp", " --icmp-type ", "ttl"
	if family == rules.IPv6 {
		address, last, bracketed, network = "fd00::3", "fd00::9", "[fd00::3]", "fd00:1::/44"
		unspecified, icmp, option, hops = "::", "-p ipv6-icmp -m icmp6", " --icmpv6-type ", "hl"
	}
	brackets, inverted := strings.NewReplacer("[A]", bracketed, "[A-C]", strings.Replace(bracketed, address, address+"-"+last, 1)), map[bool]string{true: " !"}
	byTable := map[string][]string{}
	for line := range strings.Lines(strings.TrimSpace(ownersRules)) {
		table, rule, _ := strings.Cut(strings.TrimSpace(line), " ")
		words := strings.Split(rule, " ")
		for i, word := range words {
			switch word {
			case "A":
				words[i] = address
			case "A-C":
				words[i] = address + "-" + last
			case "N":
				words[i] = network
			case "B":
				words[i] = unspecified
			}
			if kind, found := strings.CutPrefix(word, "ICMP"); found {
				words[i] = icmp + inverted[strings.HasPrefix(kind, "not")] + option + strings.TrimPrefix(kind, "not")
			}
			if order, found := strings.CutPrefix(word, "HOPS"); found {
				words[i] = "-m " + hops + inverted[strings.HasPrefix(order, "not")] + " --" + hops + strings.TrimPrefix(order, "not")
			}
			if mode, found := strings.CutPrefix(word, "SETHOPS"); found {
				words[i] = strings.ToUpper(hops) + " --" + hops + mode
			}
		}
		byTable[table] = append(byTable[table], brackets.Replace(strings.Join(words, " ")))
	}
	var text strings.Builder
	for _, table := range slices.Sorted(maps.Keys(byTable)) {
		fmt.Fprintf(&text, "*%s\n:MINE - [0:0]\n:GOAL - [0:0]\n-A MINE %s\nCOMMIT\n", table, strings.Join(byTable[table], "\n-A MINE "))
	}
	return text.String()
}

// ownersSets creates the ipsets and the nfacct object that ownersRules name.
func ownersSets(t *testing.T, family rules.Family) {
	t.Helper()
	inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
	nstest.Command(t, "ipset", "create", "cali40s:abc", "hash:net", "family", inet)
	nstest.Command(t, "ipset", "create", "PAIRS", "hash:ip,port", "family", inet)
	if err := NewSets().Account(t.Context(), "account"); err != nil {
		t.Fatal(err)
	}
}

func restoreText(t *testing.T, backend Backend, family rules.Family, text string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program(backend, family, "-restore"), args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// asPrinted removes differences between versions of iptables. 1.8.7 prints a
// blank after a comment, two before the name of a log, and the end of a string
// search. All versions print two blanks before an nfacct object.
var asPrinted = strings.NewReplacer(" \n", "\n", "--nfacct-name  ", "--nfacct-name ", "--nflog-prefix  ", "--nflog-prefix ", " --to 65535", "")

// The decoded words equal the output of iptables-save, and make the same bytes
// again. The test uses kube-proxy's rules in 40 clusters and the rules of others
// on a node.
func TestWordsAreThoseOfIptables(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		ownersSets(t, family)
		texts := map[string]string{"owners": ownersText(family)}
		for name, cluster := range corpusTexts(t) {
			if cluster.family == family {
				texts[name] = cluster.text
			}
		}
		conn, all := dialTest(t), 0
		for _, name := range slices.Sorted(maps.Keys(texts)) {
			restoreText(t, NFT, family, texts[name])
			decoded, before := decodedText(t, conn, family)
			saved := asPrinted.Replace(savedText(t, family))
			if diff := cmp.Diff(saved, decoded); diff != "" {
				t.Fatalf("%s (-saved +decoded):\n%s", name, diff)
			}
			if name == "owners" {
				wantEachByteInTheWords(t, family, before)
			}
			restoreText(t, NFT, family, decoded)
			_, again := decodedText(t, conn, family)
			if !slices.EqualFunc(before, again, func(a, b nft.Rule) bool { return sameStatements(family, a, b) }) {
				t.Errorf("%s: other bytes came of the words", name)
			}
			all += strings.Count(decoded, "\n-A ")
		}
		if all < 500 {
			t.Errorf("only %d rules were compared", all)
		}
	})
}

// wantEachByteInTheWords fails if a rule with another byte has the same words.
func wantEachByteInTheWords(t *testing.T, family rules.Family, raw []nft.Rule) {
	t.Helper()
	for _, r := range raw {
		bare, sets, _ := withoutNames(r)
		words, _ := ruleset.Words(family, bare.Expressions, bare.Userdata, sets)
		changed := slices.Clone(bare.Expressions)
		for at, was := range bare.Expressions {
			for _, flip := range []byte{1, 2, 4, 8, 0x10, 0x20, 0x40, 0x80, 0xff} {
				changed[at] = was ^ flip
				if got, ok := ruleset.Words(family, changed, bare.Userdata, sets); ok && got == words {
					t.Fatalf("%q has byte %d of %x or %x:\n%x", words, at, was, changed[at], bare.Expressions)
				}
			}
			changed[at] = was
		}
	}
}

// sameStatements reports whether two rules have the same bytes, except for bytes
// that IPv4 does not read.
func sameStatements(family rules.Family, a, b nft.Rule) bool {
	one, errA := statements(family, a)
	other, errB := statements(family, b)
	return errA == nil && errB == nil && slices.EqualFunc(one, other, func(x, y statement) bool {
		return x.kind == y.kind && slices.Equal(x.says, y.says)
	})
}

// savedText returns the output of iptables-save, without comments, counters and
// built-in chains' lines.
func savedText(t *testing.T, family rules.Family) string {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(nstest.Command(t, program(NFT, family, "-save"))) {
		if name, _, chain := strings.Cut(line, " "); chain && line[0] == ':' && !strings.HasPrefix(line, name+" -") || line[0] == '#' {
			continue
		}
		text.WriteString(line)
	}
	return text.String()
}

// decodedText returns the same text from decoded rules, and the bytes of all
// rules.
func decodedText(t *testing.T, conn *nft.Conn, family rules.Family) (text string, raw []nft.Rule) {
	t.Helper()
	var lines strings.Builder
	numbers := &setNumbers{}
	defer func() { _ = numbers.close() }()
	set := nstest.Command(t, program(NFT, family, "-save")) // all tables and chains, in order
	table := ""
	var chains []string
	for line := range strings.Lines(set) {
		switch line[0] {
		case '*':
			table, chains = strings.TrimSpace(line[1:]), nil
			lines.WriteString(line)
		case ':':
			name, _, _ := strings.Cut(line[1:], " ")
			if chains = append(chains, name); strings.HasPrefix(line, ":"+name+" -") {
				lines.WriteString(line)
			}
		case 'C':
			for _, chain := range chains {
				err := conn.EachRule(family, table, chain, func(m nft.RuleMessage) error {
					named, err := nameSets(m.Rule.Clone(), numbers.name)
					if err != nil {
						return err
					}
					bare, sets, _ := withoutNames(named)
					words, ok := ruleset.Words(family, bare.Expressions, bare.Userdata, sets)
					if !ok {
						words = "(not decoded)"
					}
					lines.WriteString(strings.TrimRight("-A "+chain+" "+words, " ") + "\n")
					raw = append(raw, named)
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			lines.WriteString(line)
		}
	}
	return lines.String(), raw
}

// canaryd learns, follows and puts back the rules of kube-proxy, Docker and CNI
// plugins, and executes nothing for them.
func TestOwnersRulesExecuteNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		var clusters []string
		for name, cluster := range corpusTexts(t) {
			if cluster.family == family {
				clusters = append(clusters, name)
			}
		}
		slices.Sort(clusters)
		texts := corpusTexts(t)
		ownersSets(t, family)
		restoreText(t, backend, family, texts[clusters[0]].text)
		restoreText(t, backend, family, ownersText(family), "--noflush")
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		calls := countPrograms(t, k, family)
		mustRead(t, k, family)
		for _, name := range clusters[1:4] {
			restoreText(t, backend, family, texts[name].text, "--noflush")
			mustRead(t, k, family)
		}
		iptablesCommand(t, backend, family, "-t nat -I MINE -p tcp -m tcp --dport 8083 -j GOAL")
		want, mark := mustRead(t, k, family), rules.Rule{Spec: `-m comment --comment "canaryd-witness:0123"`}
		for _, table := range []rules.TableName{rules.Nat, rules.Filter} {
			list := want.Tables[table].Rules("MINE")
			iptablesCommand(t, backend, family, "-t "+string(table)+" -F MINE")
			if w := restoreAll(t, k, family, replayOf(table, "MINE", list), Script{Table: rules.Raw, Steps: []Step{{Verb: Append, Chain: "OUTPUT", Rule: mark}}}); w.Detour != nil {
				t.Errorf("%s is not written directly: %v", table, w.Detour)
			}
		}
		got := mustRead(t, k, family)
		if n := calls(); n != 0 {
			t.Errorf("%d programs were executed", n)
		}
		for table := range want.Tables {
			if diff := cmp.Diff(want.Tables[table].Rules("MINE"), got.Tables[table].Rules("MINE")); diff != "" {
				t.Errorf("%s (-want +got):\n%s", table, diff)
			}
		}
		if diff := cmp.Diff([]rules.Rule{mark, mark}, got.Tables[rules.Raw].Rules("OUTPUT")); diff != "" {
			t.Errorf("the marks (-want +got):\n%s", diff)
		}
		if backend == NFT {
			wantAsSaved(t, k, family, "all that")
		} else {
			wantAsPrinted(t, k, family, "all that", false)
		}
	})
}

// iptables cannot print a rule of nft. The rules next to it keep their text.
func TestRulesBesideOneOfNFT(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		ip := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[family]
		iptablesCommand(t, NFT, family, "-t nat -N GOAL")
		iptablesCommand(t, NFT, family, "-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j GOAL")
		nstest.Command(t, "nft", "add", "rule", ip, "nat", "PREROUTING", "ct", "state", "vmap", "{ new : accept }")
		iptablesCommand(t, NFT, family, "-t nat -A PREROUTING -j GOAL")
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		var texts []string
		for _, r := range mustRead(t, k, family).Tables[rules.Nat].Rules("PREROUTING") {
			if _, opaque := r.Opaque(); opaque {
				texts = append(texts, "opaque")
				continue
			}
			texts = append(texts, r.Spec)
		}
		if diff := cmp.Diff([]string{"-m addrtype --dst-type LOCAL -j GOAL", "opaque", "-j GOAL"}, texts); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// A statement is one expression of a rule: its kind and its content.
type statement struct {
	kind string
	says []byte
}

// statements returns the content of a rule's expressions. It leaves out
// differences between versions: the registers of values, and the ends of wide
// addresses, which IPv4 does not use.
func statements(family rules.Family, r nft.Rule) ([]statement, error) {
	var list []statement
	err := r.Each(func(e nft.Expression) error {
		s, extension := statement{kind: e.Name}, e.Name == "match" || e.Name == "target"
		revision := nft.AttrPath(e.Data, unix.NFTA_MATCH_REV)
		if extension {
			s.kind = fmt.Sprintf("%s %s %x", e.Name, extensionName(e), revision)
		}
		err := nft.EachAttr(e.Data, func(kind uint16, value []byte) error {
			if family == rules.IPv4 && extension && kind == unix.NFTA_MATCH_INFO && len(revision) == 4 {
				value = bytes.Clone(value)
				maskWideIn(extensionName(e), revision[3], value)
			}
			if !slices.Contains(registers[e.Name], kind) {
				s.says = nft.AppendAttr(s.says, kind, value, 0)
			}
			return nil
		})
		list = append(list, s)
		return err
	})
	return list, err
}

// registers are the attributes with which expressions name registers.
var registers = map[string][]uint16{
	"meta": {unix.NFTA_META_DREG, unix.NFTA_META_SREG}, "payload": {unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_SREG},
	"cmp": {unix.NFTA_CMP_SREG}, "range": {unix.NFTA_RANGE_SREG}, "bitwise": {unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG},
}
