package iptablestest_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestFakeSpelling: a program writes rules in different spellings; the Fake must save them as
// iptables 1.8.9 does. TestFakeConformance shows that the programs agree.
func TestFakeSpelling(t *testing.T) {
	for _, tt := range []struct {
		family         rules.Family
		written, saved string
	}{
		{v4, "-m comment --comment canaryd-canary:abcd", `-m comment --comment "canaryd-canary:abcd"`},
		{v4, "-m comment --comment ab_c-d", "-m comment --comment ab_c-d"},
		{v4, `-m comment --comment "it's \"q\" \\ b"`, `-m comment --comment "it\'s \"q\" \\ b"`},
		{v4, `-m comment --comment ""`, `-m comment --comment ""`},
		{v4, `-m comment --comment -j -m comment --comment "-g x"`, `-m comment --comment -j -m comment --comment "-g x"`},
		{v4, `-m comment --comment "a b" -m tcp -p tcp -d 10.1.2.3/24 --dport 80 -j X`, `-d 10.1.2.0/24 -p tcp -m comment --comment "a b" -m tcp --dport 80 -j X`},
		{v4, "-p tcp -m comment --comment x --dport 80:90 -g X", "-p tcp -m comment --comment x -m tcp --dport 80:90 -g X"},
		{v4, "-p 17 --destination-port 53 -j ACCEPT", "-p udp -m udp --dport 53 -j ACCEPT"},
		{v4, "-p tcp --syn --source-port 1 -j ACCEPT", "-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN --sport 1 -j ACCEPT"},
		{v4, "-p tcp -m tcp ! --dport 22", "-p tcp -m tcp ! --dport 22"},
		{v4, "-p all -s 0.0.0.0/0", ""},
		{v4, "--source 1.2.3.4/255.255.0.0 ! --in-interface lo --jump RETURN", "-s 1.2.0.0/16 ! -i lo -j RETURN"},
		{v4, "-j MARK --set-mark 7", "-j MARK --set-xmark 0x7/0xffffffff"},
		{v4, "-j MARK --or-mark 0x4000", "-j MARK --set-xmark 0x4000/0x4000"},
		{v4, "-j MARK --and-mark 0xff", "-j MARK --set-xmark 0x0/0xffffff00"},
		{v4, "-j MARK --xor-mark 0xff", "-j MARK --set-xmark 0xff/0x0"},
		{v4, "-m mark --mark 1", "-m mark --mark 0x1"},
		{v4, "-m mark ! --mark 0x4000/0x4000 -j RETURN", "-m mark ! --mark 0x4000/0x4000 -j RETURN"},
		{v4, "-m statistic --mode random --probability 0.33", "-m statistic --mode random --probability 0.33000000007"},
		{v4, "-m conntrack --ctstate ESTABLISHED,RELATED", "-m conntrack --ctstate RELATED,ESTABLISHED"},
		{v4, "-m recent --name S --set", "-m recent --set --name S --mask 255.255.255.255 --rsource"},
		{v6, "-m recent --rcheck --rdest", "-m recent --rcheck --name DEFAULT --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rdest"},
		{v4, "-j REJECT", "-j REJECT --reject-with icmp-port-unreachable"},
		{v6, "-j REJECT", "-j REJECT --reject-with icmp6-port-unreachable"},
		{v6, "-d 2001:DB8:0::1 -p icmpv6 --icmpv6-type 135", "-d 2001:db8::1/128 -p ipv6-icmp -m icmp6 --icmpv6-type 135"},
	} {
		t.Run(tt.written, func(t *testing.T) {
			f := iptablestest.NewFake(iptables.NFT)
			must(t, f.RestoreNoflush(tt.family, "*mangle\n:T - [0:0]\n:X - [0:0]\n-A T "+tt.written+"\nCOMMIT\n"))
			got := read(t, f, tt.family).Tables[rules.Mangle].Chain("T").Rules[0].Spec
			if diff := cmp.Diff(tt.saved, got); diff != "" {
				t.Errorf("saved rule (-want +got):\n%s", diff)
			}
			again := "*mangle\n-C T " + got + "\n-D T " + tt.written + "\nCOMMIT\n"
			if err := f.RestoreNoflush(tt.family, again); err != nil {
				t.Errorf("the saved spelling does not name the same rule: %v", err)
			}
		})
	}
}

// TestFakeRefusesRules: a program writes bad rules; the Fake must refuse them and write nothing.
func TestFakeRefusesRules(t *testing.T) {
	for _, tt := range []struct{ spec, want string }{
		{"garbage", "Bad argument `garbage'"},
		{"--nonsense", `unknown option "--nonsense"`},
		{"-j", `option "-j" requires an argument`},
		{"-m comment --comment", `option "--comment" requires an argument`},
		{"-j RETURN -j ACCEPT", "multiple -j flags not allowed"},
		{"-s fd00::1", "host/network `fd00::1' not found"},
		{"-d 1.2.3.4/33", "host/network `1.2.3.4/33' not found"},
		{"-j DROP", `The "nat" table is not intended for filtering`},
		{"-j OUTPUT", "RULE_APPEND failed"},
		{`-m comment --comment "open`, "has a quote that is not closed"},
	} {
		t.Run(tt.spec, func(t *testing.T) {
			f := iptablestest.NewFake(iptables.NFT)
			err := f.RestoreNoflush(v4, "*nat\n-A OUTPUT "+tt.spec+"\nCOMMIT\n")
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want one with %q", err, tt.want)
			}
			if text := f.Save(v4); text != "" {
				t.Errorf("written:\n%s", text)
			}
		})
	}
}

// TestFakeCommands: a program writes to canaryText's table in each way; the remaining rules must
// be right.
func TestFakeCommands(t *testing.T) {
	merge := func(lines ...string) func(*iptablestest.Fake) error {
		return func(f *iptablestest.Fake) error {
			return f.RestoreNoflush(v4, "*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n")
		}
	}
	const canary, svc, jump = `-A CANARY -m comment --comment "canaryd-canary:1"`, "-A SVC -s 10.0.0.1/32 -j RETURN", "-A OUTPUT -j SVC"
	whole := []string{":CANARY", ":SVC", jump, canary, svc}
	nftOnly := "only nft can do this"
	for _, tt := range []struct {
		name        string
		write       func(f *iptablestest.Fake) error
		nft, legacy []string // the remaining lines
		err         string   // "" if it works
		legacyErr   string
	}{
		{"flush one chain", func(f *iptablestest.Fake) error { return f.Flush(v4, rules.Nat, "SVC") }, []string{":CANARY", ":SVC", jump, canary}, nil, "", ""},
		{"flush no chain", func(f *iptablestest.Fake) error { return f.Flush(v4, rules.Nat, "NOPE") }, whole, nil, "No chain/target/match", "line 2 failed"},
		{"flush all", func(f *iptablestest.Fake) error { return f.Flush(v4, rules.Nat, "") }, []string{":CANARY", ":SVC"}, nil, "", ""},
		{"delete chains in use", func(f *iptablestest.Fake) error { return f.DeleteChains(v4, rules.Nat) }, whole, nil, "Device or resource busy", "line 2 failed"},
		{"flush and delete", merge("-F", "-X"), []string{}, nil, "", ""},
		{"delete the jump", merge("-D OUTPUT -j SVC", "-F SVC", "-X SVC"), []string{":CANARY", canary}, nil, "", ""},
		{"unjump too late", merge("-F SVC", "-X SVC"), whole, nil, "Device or resource busy", "line 3 failed"},
		{"declare", merge(":SVC - [0:0]"), []string{":CANARY", ":SVC", jump, canary}, nil, "", ""},
		{"declare with policy", merge(":SVC ACCEPT [0:0]"), []string{":CANARY", ":SVC", jump, canary}, whole, "", "Can't set policy"},
		{"insert, replace, delete by number", merge("-I SVC 1 -s 10.0.0.2 -j RETURN", "-I SVC 3 -j RETURN", "-R SVC 3 -j ACCEPT", "-D SVC 1"),
			[]string{":CANARY", ":SVC", jump, canary, svc, "-A SVC -j ACCEPT"}, nil, "", ""},
		{"new chain", merge("-N A", "-N A"), whole, nil, "Chain already exists", "line 3 failed"},
		{"policy", merge("-P OUTPUT DROP"), whole, nil, "not intended for filtering", "not intended for filtering"},
		{"policy of a user's chain", merge("-P SVC ACCEPT"), whole, nil, "Bad built-in chain name", "line 2 failed"},
		{"replace the table", func(f *iptablestest.Fake) error { return f.Restore(v4, "*nat\n:A - [0:0]\nCOMMIT\n") }, []string{":A"}, nil, "", ""},
		{"replace another table", func(f *iptablestest.Fake) error { return f.Restore(v4, filterText) }, whole, nil, "", ""},
		{"nft flush table", func(f *iptablestest.Fake) error { return f.FlushTable(v4, rules.Nat) }, []string{":CANARY", ":SVC"}, whole, "", nftOnly},
		{"nft delete table", func(f *iptablestest.Fake) error { return f.DeleteTable(v4, rules.Nat) }, nil, whole, "", nftOnly},
		{"nft delete no table", func(f *iptablestest.Fake) error { return f.DeleteTable(v4, rules.Raw) }, whole, nil, "no such table", nftOnly},
		{"nft flush ruleset", func(f *iptablestest.Fake) error { return f.FlushRuleset() }, nil, whole, "", nftOnly},
		{"no such table", func(f *iptablestest.Fake) error { return f.Flush(v4, "nope", "") }, whole, nil, "table name 'nope' invalid", "unable to initialize table"},
		{"unfinished", func(f *iptablestest.Fake) error { return f.RestoreNoflush(v4, "*nat\n-F\n") }, whole, nil, "COMMIT expected at line 3", "COMMIT expected at line 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
				want, wantErr := tt.nft, tt.err
				if f.Info().Backend == iptables.Legacy {
					wantErr = tt.legacyErr
					if tt.legacy != nil {
						want = tt.legacy
					}
				}
				err := tt.write(f)
				if wantErr == "" && err != nil || wantErr != "" && (err == nil || !strings.Contains(err.Error(), wantErr)) {
					t.Errorf("error is %v, want %q", err, wantErr)
				}
				if diff := cmp.Diff(want, short(f.SaveTable(v4, rules.Nat))); diff != "" {
					t.Errorf("what is left (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// short returns the names of user's chains and the rules of a save; nil means that there is no
// table.
func short(text string) []string {
	if text == "" {
		return nil
	}
	left := []string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name, found := strings.CutSuffix(line, " - [0:0]"); found {
			line = name
		}
		if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":") && !strings.Contains(line, " ") {
			left = append(left, line)
		}
	}
	return left
}
