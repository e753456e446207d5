package rules_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/randrules"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestMeaning: the lines of a group mean the same, and lines of different groups never do. The
// groups cover cases that the random rules of the kernel test omit, and real rules of programs.
func TestMeaning(t *testing.T) {
	groups := map[string][]string{
		"kube-proxy's mark": {
			"-j MARK --or-mark 0x4000", "-j MARK --set-xmark 0x4000/0x4000", "--jump MARK --set-xmark 16384/0x00004000",
		},
		"kube-proxy's mark, all bits": {"-j MARK --set-xmark 0x4000", "-j MARK --set-mark 0x4000/0xffffffff"},
		"kube-proxy's service": {
			`-m comment --comment "default/a:http cluster IP" -m tcp -p tcp -d 10.96.0.1 --dport 80 -j KUBE-SVC-A`,
			`-d 10.96.0.1/32 -p tcp -m comment --comment "default/a:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-A`,
			`-d 10.96.0.1/32 -p 6 --dport http -j KUBE-SVC-A -m comment --comment "default/a:http cluster IP"`,
		},
		"kube-proxy's service, without comment": {"-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A"},
		"a goto":                                {"-d 10.96.0.1/32 -p tcp -m tcp --dport 80 -g KUBE-SVC-A", "-d 10.96.0.1 -p tcp --dport 80 --goto KUBE-SVC-A"},
		"kube-proxy's affinity": {
			"-m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap -j KUBE-SEP-A",
			"-m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A --mask 255.255.255.255 --rsource -j KUBE-SEP-A",
			"-m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-A --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j KUBE-SEP-A",
		},
		"kube-proxy's affinity, other seconds":    {"-m recent --name KUBE-SEP-A --rcheck --seconds 10801 --reap -j KUBE-SEP-A"},
		"kube-proxy's affinity, by destination":   {"-m recent --name KUBE-SEP-A --rcheck --seconds 10800 --reap --rdest -j KUBE-SEP-A"},
		"kube-proxy's endpoint, one of three":     {"-m statistic --mode random --probability 0.3333333333 -j X", "-m statistic --mode random --probability 0.33333333349 -j X"},
		"kube-proxy's endpoint, one of four":      {"-m statistic --mode random --probability 0.2500000000 -j X", "-m statistic --mode random --probability 0.25 -j X"},
		"kube-proxy's endpoint, no chance at all": {"-m statistic --mode random ! --probability 0.25 -j X"},
		"kubelet's localnet rule": {
			`-m comment --comment "block incoming localnet connections" --dst 127.0.0.0/8 ! --src 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`,
			`! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`,
		},
		"portmap": {
			"-p tcp -m multiport --destination-ports 8080,8443 -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
			"-p tcp -m multiport --dports 8443,8080,8443 -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
			// Measured: with multiport loaded, getopt takes --dport for --dports.
			"-p tcp -m multiport --dport 8080,8443 -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
		},
		"portmap, ranges": {"-p tcp -m multiport --dports 8080:8443 -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT"},
		"portmap to IPv6": {
			"-p tcp -j DNAT --to-destination [fd00::1]:80", "-p tcp -j DNAT --to-destination [FD00:0::0:1]:http", "-p 6 -j DNAT --to [fd00::1]:80-80",
		},
		"DNAT to IPv6 without port": {"-p tcp -j DNAT --to-destination fd00::1", "-p tcp -j DNAT --to-destination [fd00::1]", "-p tcp -j DNAT --to-destination fd00::1-fd00::1"},
		"bridge": {
			`-d 10.1.2.3/24 -j ACCEPT -m comment --comment "name: \"net\" id: \"x\""`, `-d 10.1.2.0/24 -m comment --comment "name: \"net\" id: \"x\"" -j ACCEPT`,
		},
		"bridge to multicast": {`! -d 224.0.0.0/4 -j MASQUERADE`, "! --dst 224.0.0.0/240.0.0.0 -j MASQUERADE"},
		"firewall plugin": {
			"-d 10.1.2.3 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-d 10.1.2.3/32 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
		},
		"the state match": {"-d 10.1.2.3 -m state --state RELATED,ESTABLISHED -j ACCEPT"},
		"Docker":          {"-s 172.17.0.0/16 ! -o docker0 -j MASQUERADE", "! -o docker0 -j MASQUERADE -s 172.17.0.1/16"},
		"Docker's set":    {"-m set --match-set docker-ext-bridges-v4 dst -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"},
		"a set, and a port behind it": {
			"-m set --match-set foo src -p tcp --dport 80 -j X", "-p tcp -m set --match-set foo src -m tcp --dport 80 -j X", "-p tcp -m set --set foo src --dport 80 -j X",
		},
		"a set, and a port before it": {"-p tcp -m tcp --dport 80 -m set --match-set foo src -j X"},
		"kube-proxy's accounting": {
			"-m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP", "-m conntrack --ctstate invalid -m nfacct --nfacct-name ct_state_invalid_dropped_pkts --jump DROP",
		},
		"another set":    {"-m set --match-set docker-ext-bridges-v6 dst -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"},
		"not in the set": {"-m set ! --match-set docker-ext-bridges-v4 dst -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"},
		"flannel":        {`-s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully`, `! -d 224.0.0.0/4 -s 10.244.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully`},
		"Kilo":           {`-p ipencap -m comment --comment "Kilo: x" -j DROP`, `-p 4 -j DROP -m comment --comment "Kilo: x"`, `-p ipv4 -m comment --comment "Kilo: x" -j DROP`},
		"Istio":          {"-p tcp -j REDIRECT --to-ports 15006", "-p tcp -j REDIRECT --to-port 15006"},
		"Istio's owner":  {"-m owner --uid-owner 1337 -j RETURN", "-j RETURN -m owner --uid-owner 1337-1337"},
		"not its owner":  {"-m owner ! --uid-owner 1337 -j RETURN"},
		"Istio's TPROXY": {"-p tcp -j TPROXY --tproxy-mark 0x539/0xffffffff --on-port 15006", "-p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 1337", "-p tcp -j TPROXY --on-port 15006 --on-ip :: --tproxy-mark 1337"},
		"Istio's connmark": {
			"-p tcp -m connmark --mark 0x539 -j CONNMARK --restore-mark", "-p tcp -m connmark --mark 1337/0xffffffff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
		},
		"Istio's zone":      {"-p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1", "-p udp --dport domain -m owner --uid-owner 1337 -j CT --zone 1"},
		"a reject":          {"-j REJECT", "-j REJECT --reject-with icmp-port-unreachable", "-j REJECT --reject-with icmp6-port-unreachable", "-j REJECT --reject-with port-unreach"},
		"another reject":    {"-j REJECT --reject-with icmp-host-unreachable", "-j REJECT --reject-with host-unreach"},
		"nothing":           {"", "-s 0.0.0.0/0", "-p all -d ::/0 -i +", "-c 3 4"},
		"never":             {"! -s 0.0.0.0/0"},
		"fragments":         {"-f", "--fragment"},
		"no fragments":      {"! -f"},
		"any tcp":           {"-p tcp", "-p 6", "--protocol TCP"},
		"any tcp but short": {"-p tcp -m tcp", "-p tcp --dport 0:65535", "-p tcp --tcp-flags NONE NONE"},
		"all but tcp":       {"! -p tcp"},
		// Measured: iptables-nft prints one -m tcp for two, and 81:65535 for ports not up to 80.
		"tcp twice":                 {"-p tcp -m tcp --sport 3 -m tcp --dport 4", "-p tcp -m tcp --sport 3 --dport 4", "-p tcp --dport 4 --sport 3"},
		"tcp around a mark":         {"-p tcp -m tcp --sport 3 -m mark --mark 1 -m tcp --dport 4 -j X", "-p tcp -m tcp --sport 3 --dport 4 -m mark --mark 0x1 -j X"},
		"tcp around a limit":        {"-p tcp -m tcp --sport 3 -m limit -m tcp --dport 4 -j X"},
		"tcp, then a limit":         {"-p tcp -m tcp --sport 3 -m tcp --dport 4 -m limit -j X"},
		"tcp, contradicting itself": {"-p tcp -m tcp --sport 3 -m tcp ! --sport 4"},
		"high ports":                {"-p udp ! --dport 0:80", "-p udp -m udp --dport 81:65535"},
		"two marks":                 {"-m mark --mark 1 -m mark --mark 2/3 -j X", "-m mark --mark 0x2/0x3 -m mark --mark 0x1 -j X"},
		"one mark":                  {"-m mark --mark 1 -j X"},
		"limit last":                {"-m mark --mark 1 -m limit -j X", "-m mark --mark 1 -m limit --limit 3/hour --limit-burst 5 -j X", "-m mark --mark 1 -m limit --limit 72/day -j X"},
		"limit first":               {"-m limit -m mark --mark 1 -j X"},
		"pure in any order": {
			"-m mark --mark 1 -m conntrack --ctstate NEW -m comment --comment x -m addrtype --dst-type LOCAL -j X",
			"-m comment --comment x -m addrtype --dst-type LOCAL -m conntrack --ctstate NEW -m mark --mark 1 -j X",
		},
		"an unknown match":          {"-m foo --bar 1 --dport 80 -p tcp -j X", "-p tcp -m foo --bar 1 --dport 80 -j X"},
		"an unknown match, turned":  {"-p tcp -m foo --dport 80 --bar 1 -j X"},
		"an unknown match, negated": {"-p tcp -m foo ! --bar 1 --dport 80 -j X"},
		"an unknown target":         {"-j SET --add-set a src", "--jump SET --add-set a src"},
		"its options turned":        {"-j SET src --add-set a"},
		"an unknown option":         {"-p tcp -m tcp --frobnicate 3", "-p  tcp -m tcp --frobnicate \"3\""},
		"and turned":                {"-m tcp -p tcp --frobnicate 3"},
		"words that are no options": {"surprise -j X"},
		"NOTRACK is not CT":         {"-j NOTRACK"},
		"CT is not NOTRACK":         {"-j CT --notrack"},
		"an empty comment":          {`-m comment --comment ""`},
		"a comment of quotes":       {`-m comment --comment ''`, `-m comment --comment "\'\'"`},
		"a comment that jumps":      {"-m comment --comment -j", `-m comment --comment "-j"`},
		"ping":                      {"-p icmp --icmp-type ping", "-p 1 -m icmp --icmp-type 8"},
		"ping's code 0":             {"-p icmp --icmp-type 8/0"},
		"any ICMP":                  {"-p icmp --icmp-type any", "-p icmp --icmp-type 0xff"},
		"ping for IPv6":             {"-p icmpv6 --icmpv6-type ping", "-p ipv6-icmp -m icmp6 --icmpv6-type 128", "-p 58 -m icmpv6 --icmpv6-type echo-request"},
		"an address that is mapped": {"-s ::ffff:1.2.3.4", "-s ::ffff:102:304/128"},
		"an address":                {"-s 1.2.3.4", "--src 1.2.3.4/255.255.255.255"},
		"a name":                    {"-s example.org"},
		"a pattern":                 {`-m string --string "a b" --algo bm`, `-m string --algo bm --from 0 --string "a b" --to 65535`},
		"another pattern":           {`-m string --string "a b" --algo bm --to 65534`},
		"a pattern in any case":     {`-m string --string "a b" --algo bm --icase`},
		"a pattern that is absent":  {`-m string ! --string "a b" --algo bm`},
		"an odd mask":               {"-s 10.9.3.9/255.0.255.0", "-s 10.0.3.0/255.0.255.0"},
		"a short time":              {"-m physdev --physdev-is-bridged ! --physdev-in eth0", "-m physdev ! --physdev-in eth0 --physdev-is-bridged"},
		// Measured: eight to most, ten to some.
		"an octal port":      {"-p tcp --dport 010", `-p tcp -m tcp --dport "010"`},
		"port 8":             {"-p tcp --dport 8", "-p tcp --dport 0x8"},
		"port 10":            {"-p tcp --dport 10"},
		"an octal limit":     {"-m limit --limit 010/sec --limit-burst 010", "-m limit --limit 10/sec --limit-burst 8"},
		"an octal mask":      {"-s 10.200.2.3/010 -p 06", "-s 10.0.0.0/8 -p tcp"},
		"an octal mark":      {"-m mark --mark 010/0x10", "-m mark --mark 8/16"},
		"octal numbers":      {"-m owner --uid-owner 010-0x10 -m length --length 010:0x20", "-m length --length 8:32 -m owner --uid-owner 8-16"},
		"a hardware address": {"-m mac --mac-source aa:bb:cc:dd:ee:f", "-m mac --mac-source AA:BB:CC:DD:EE:0F"},
		"a log":              {"-j LOG --log-level warning --log-prefix x", "-j LOG --log-prefix x --log-level 4", `-j LOG --log-prefix "x"`},
	}
	meant := map[string]string{}
	for name, specs := range groups {
		first := rule(t, specs[0])
		for _, spec := range specs {
			r := rule(t, spec)
			if !first.Equal(r) || !r.Equal(first) {
				t.Errorf("%s: not Equal:\n  %s\n  %s\nbecause of\n  %s\n  %s", name, first.Spec, spec, first.Meaning(), r.Meaning())
			}
			stable(t, spec)
		}
		if other, ok := meant[first.Meaning()]; ok {
			t.Errorf("%q and %q mean the same: %s", name, other, first.Meaning())
		}
		meant[first.Meaning()] = name
	}
}

// stable checks properties that hold for every text.
func stable(t *testing.T, spec string) {
	t.Helper()
	r := rules.Rule{Spec: spec}
	once := r.Meaning()
	m := rules.Rule{Spec: once}
	if again := m.Meaning(); again != once {
		t.Errorf("the meaning of %q is %q, and of that %q", spec, once, again)
	}
	if !r.Equal(r) || !r.Equal(m) || !m.Equal(r) {
		t.Errorf("%q does not Equal its meaning %q", spec, once)
	}
	a, errA := rules.ParseRule(spec)
	b, errB := rules.ParseRule(once)
	if errA != nil || errB != nil {
		return
	}
	_, opaqueA := a.Opaque()
	_, opaqueB := b.Opaque()
	switch {
	case opaqueA || opaqueB: // a rule without a text is compared by its bytes
		if a.Equal(b) != (spec == once) {
			t.Errorf("%q Equals %q: %t, and one of them has no text", spec, once, a.Equal(b))
		}
	case a.Target != b.Target || !a.Equal(b):
		t.Errorf("%q jumps to %q, its meaning %q to %q", spec, a.Target, once, b.Target)
	}
}

func seeds(f *testing.F, add func(spec string)) {
	f.Helper()
	for _, pattern := range []string{"testdata/*.save", "../../internal/testkit/scenario/testdata/kube-proxy/*/expected.rules", "../../internal/testkit/scenario/testdata/node/*.rules"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			f.Fatalf("no seeds at %s: %v", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			for line := range strings.Lines(string(text)) {
				if _, rest, ok := strings.Cut(line, "-A "); ok {
					_, spec, _ := strings.Cut(strings.TrimRight(rest, "\n"), " ")
					add(spec)
				}
			}
		}
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 200 {
		add(randrules.Draw(r, rules.Families()[i%2], protect.Always()[i%3]).Spell(r))
	}
}

func FuzzMeaning(f *testing.F) {
	seeds(f, func(spec string) { f.Add(spec) })
	f.Fuzz(stable)
}

func FuzzEqual(f *testing.F) {
	last := ""
	seeds(f, func(spec string) {
		f.Add(spec, last)
		last = spec
	})
	f.Fuzz(func(t *testing.T, one, other string) {
		a, errA := rules.ParseRule(one)
		b, errB := rules.ParseRule(other)
		if errA != nil || errB != nil {
			return
		}
		same := a.Meaning() == b.Meaning()
		if a.Equal(b) != same || b.Equal(a) != same {
			t.Errorf("%q and %q: Equal %v and %v, the same meaning: %v", one, other, a.Equal(b), b.Equal(a), same)
		}
	})
}

// large returns as many rules as kube-proxy writes for 5,000 services.
func large() []rules.Rule {
	list := make([]rules.Rule, 0, 62590)
	for i := 0; len(list) < cap(list); i++ {
		ip := fmt.Sprintf("10.%d.%d.%d", i>>16&0xff, i>>8&0xff, i&0xff)
		for _, spec := range []string{
			"-d " + ip + `/32 -p tcp -m comment --comment "scale/svc-0001:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-ABCDEFGHIJKLMNOP`,
			"! -s 10.244.0.0/16 -d " + ip + `/32 -p tcp -m comment --comment "scale/svc-0001:http cluster IP" -m tcp --dport 80 -j KUBE-MARK-MASQ`,
			`-m comment --comment "scale/svc-0001:http -> ` + ip + `:8080" -m statistic --mode random --probability 0.33333333349 -j KUBE-SEP-ABCDEFGHIJKLMNOP`,
			"-s " + ip + `/32 -m comment --comment "scale/svc-0001:http" -j KUBE-MARK-MASQ`,
			`-p tcp -m comment --comment "scale/svc-0001:http" -m tcp -j DNAT --to-destination ` + ip + ":8080",
		} {
			r, _ := rules.ParseRule(spec)
			list = append(list, r)
		}
	}
	return list[:62590]
}

func BenchmarkMeaning(b *testing.B) {
	list := large()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		list[i%len(list)].Meaning()
	}
}

func BenchmarkParseRule(b *testing.B) {
	list := large()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		_, _ = rules.ParseRule(list[i%len(list)].Spec)
	}
}

func BenchmarkEqualRules(b *testing.B) {
	one := large()
	b.Run("the same strings", func(b *testing.B) {
		for b.Loop() {
			rules.EqualRules(one, one)
		}
	})
	b.Run("the same text", func(b *testing.B) {
		two := large()
		for b.Loop() {
			rules.EqualRules(one, two)
		}
	})
	b.Run("other text", func(b *testing.B) {
		two := large()
		for i := range two {
			two[i].Spec = strings.Replace(two[i].Spec, "-p tcp", "-p 6", 1) + " -c 0 0"
		}
		for b.Loop() {
			if !rules.EqualRules(one, two) {
				b.Fatal("not equal")
			}
		}
	})
}

func BenchmarkID(b *testing.B) {
	g := rules.Generation{rules.IPv4.Table(rules.Nat): {Chains: []rules.Chain{{Name: "A", Rules: large()}}}}
	for b.Loop() {
		g.ID()
	}
}
