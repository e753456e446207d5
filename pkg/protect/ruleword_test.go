package protect_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

func noMark(rules.Rule) bool { return false }

// tableOf returns filter, or another table, with these rules in its chains.
func tableOf(t *testing.T, name rules.TableName, lines ...string) *rules.Table {
	t.Helper()
	text := "*" + name + "\n"
	for _, chain := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
		if rules.Builtin(name, chain) {
			text += ":" + chain + " ACCEPT [0:0]\n"
		}
	}
	for _, line := range lines {
		if chain, is := strings.CutPrefix(line, ":"); is {
			text += ":" + chain + " - [0:0]\n"
		}
	}
	for _, line := range lines {
		if !strings.HasPrefix(line, ":") {
			text += "-A " + line + "\n"
		}
	}
	set := savefile.Tables(t, text+"COMMIT\n")
	return set[name]
}

// singles returns the single rules of a chain that nothing guards.
func singles(t *rules.Table, chain string, p rules.Protection) []protect.Unguarded {
	return slices.DeleteFunc(protect.UnguardedIn(p.OthersIn(t, rules.Section{}, noMark), t),
		func(u protect.Unguarded) bool { return !u.Single || u.Chain != chain })
}

// TestUnguarded: the chains and rules that nothing guards, and their likely owners. A jump is
// listed with its chain, and chains that protected rules lead to are guarded.
func TestUnguarded(t *testing.T) {
	table := tableOf(t, rules.Filter,
		":MINE", ":KUBE-FORWARD", ":corp", ":corp-log", ":empty", ":lonely", ":ufw-before-input", ":INPUT_ZONES", ":OTHER-CANARY", ":declared", ":ufw-user-forward", ":f2b-sshd",
		"INPUT -j MINE", "INPUT -i wg0 -j ACCEPT", "INPUT -p tcp -j f2b-sshd", "INPUT -j ufw-before-input", "INPUT -j INPUT_ZONES",
		"INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "INPUT -i lo -j ACCEPT", "INPUT -j empty", "INPUT -j OTHER-CANARY", "INPUT -j declared",
		`INPUT -p tcp -m comment --comment "004 allow web" -j ACCEPT`,
		"FORWARD -j KUBE-FORWARD", "FORWARD -j corp", "FORWARD -j ufw-user-forward", "FORWARD -i lo -j ACCEPT", "FORWARD",
		"KUBE-FORWARD -j corp", "KUBE-FORWARD -j ufw-user-forward", "corp -j corp-log", "corp-log -j LOG", "MINE -j RETURN", "MINE -j DROP", "ufw-before-input -j RETURN", "INPUT_ZONES -j RETURN",
		"OTHER-CANARY -j RETURN", "declared -j RETURN", "f2b-sshd -j RETURN")
	p := selector(t, "kube").Protection()
	want := []string{
		"MINE 2", "rule INPUT -i wg0 -j ACCEPT (wg-quick and its PostUp)", "f2b-sshd 1 (fail2ban with iptables)", "ufw-before-input 1 [ufw]", "INPUT_ZONES 1 [firewalld]",
		"rule INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT [firewalld]", "rule INPUT -i lo -j ACCEPT [firewalld]", "empty 0",
		`rule INPUT -p tcp -m comment --comment "004 allow web" -j ACCEPT [Puppet's firewall module]`,
		"rule FORWARD -j corp", "rule FORWARD -j ufw-user-forward [ufw]", "rule FORWARD -i lo -j ACCEPT", "rule FORWARD ",
	}
	var got []string
	section := rules.Section{Chains: []rules.Chain{{Name: "declared"}}} // declared
	for _, u := range protect.UnguardedIn(p.OthersIn(table, section, noMark), table) {
		text := fmt.Sprint(u.Chain, " ", u.Rules)
		if u.Single {
			text = "rule " + u.Chain + " " + u.Rule.Spec
		}
		if u.Owner != "" {
			text += " (" + u.Owner + ")"
		}
		if u.Manager != "" {
			text += " [" + u.Manager + "]"
		}
		got = append(got, text)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if got := protect.UnguardedIn(p.OthersIn(nil, section, noMark), nil); got != nil {
		t.Errorf("of a table that does not exist: %v", got)
	}
}

// TestProposals: the word for each rule, or for many rules.
func TestProposals(t *testing.T) {
	many := func(format string, n int) (list []string) {
		for i := range n {
			list = append(list, fmt.Sprintf(format, i))
		}
		return list
	}
	long := strings.Repeat("x", 300)
	for name, test := range map[string]struct {
		table   rules.TableName
		chain   string
		lines   []string
		most    int
		want    []string
		more    int
		unnamed bool // not each rule has a word
	}{
		"text": {lines: []string{"INPUT -i eth1 -j ACCEPT", "INPUT"}, unnamed: true, want: []string{"1 rule:filter:INPUT:-i eth1 -j ACCEPT", "1 none"}},
		"a comment that is its own": {
			lines: []string{`INPUT -p tcp -m comment --comment "my shop, \"web\"" -j ACCEPT`, `INPUT -i a -m comment --comment two -j ACCEPT`, `INPUT -i b -m comment --comment two -j ACCEPT`},
			want: []string{
				"1 rule:filter:INPUT:my shop? ?web?",
				"1 rule:filter:INPUT:-i a -m comment --comment two -j ACCEPT", "1 rule:filter:INPUT:-i b -m comment --comment two -j ACCEPT",
			},
		},
		"commas and globs": {
			lines: []string{"INPUT -p tcp -m multiport --dports 22,80 -j DROP", `INPUT -i a+ -m string --string "[a]*" --algo bm -j DROP`},
			want:  []string{"1 rule:filter:INPUT:-p tcp -m multiport --dports 22?80 -j DROP", "1 rule:filter:INPUT:-i a+ -m string --string ??a??? --algo bm -j DROP"},
		},
		"equal but for a comma": {
			lines: []string{"INPUT -m x --y a,b -j DROP", "INPUT -m x --y a.b -j DROP"}, unnamed: true,
			want: []string{"1 none", "1 rule:filter:INPUT:-m x --y a.b -j DROP"},
		},
		"twice": {lines: []string{"INPUT -i a -j DROP", "INPUT -i b -j DROP", "INPUT -i a -j DROP"}, want: []string{"2 rule:filter:INPUT:-i a -j DROP", "1 rule:filter:INPUT:-i b -j DROP"}},
		"long":  {lines: []string{"INPUT -m x --y " + long + " -j DROP", "INPUT -i a"}, want: []string{"1 rule:filter:INPUT:-m x --y " + long[:256-1-9] + "*", "1 rule:filter:INPUT:-i a"}},
		"a blocklist": {
			lines: append(many("INPUT -s 198.51.100.%d/32 -j DROP", 200), "INPUT -i a -j DROP"),
			want:  []string{"200 rule:filter:INPUT:-s * -j DROP", "1 rule:filter:INPUT:-i a -j DROP"},
		},
		"interfaces": {
			lines: append(many("INPUT -i veth%d -j ACCEPT", 6), "INPUT -i eth0 -j ACCEPT"),
			want:  []string{"6 rule:filter:INPUT:-i veth* -j ACCEPT", "1 rule:filter:INPUT:-i eth0 -j ACCEPT"},
		},
		"a blocklist whose form names others": {
			lines: append(many("INPUT -s 198.51.100.%d/32 -j DROP", 9), "INPUT -s 192.0.2.1/32 -p tcp -j DROP"), unnamed: true,
			want: []string{"9 alike", "1 rule:filter:INPUT:-s 192.0.2.1/32 -p tcp -j DROP"},
		},
		"more than are shown": {lines: append(many("INPUT -i x%[1]d --in-%[1]d -j DROP", 30), "INPUT --in-0 -j DROP"), most: 4, more: 27, unnamed: true,
			want: many("1 rule:filter:INPUT:-i x%[1]d --in-%[1]d -j DROP", 4)},
		"owners": {
			table: rules.Nat, chain: "PREROUTING", lines: []string{
				"PREROUTING -d 169.254.169.254/32 -i cali+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181",
				"PREROUTING -d 169.254.169.254/32 -i eni+ -p tcp -m tcp --dport 80 -j DNAT --to-destination 192.0.2.10:8181",
			}, want: []string{"2 kube2iam"},
		},
		"a chain that protected rules lead to": {
			lines: []string{":KUBE-FORWARD", ":corp", "KUBE-FORWARD -j corp", "corp -j DROP", "INPUT -j corp"}, want: []string{"1 [c]orp"},
		},
		"a rule without a text": {lines: []string{"INPUT", "INPUT -m comment --comment \"x\x01y\" -j DROP", "INPUT -m comment --comment \"x\x01z\" -j DROP"}, unnamed: true, want: []string{"1 none", "2 none"}},
		"odd bytes":             {lines: []string{"INPUT -m comment --comment \"h\u00fc\" -j DROP"}, want: []string{"1 rule:filter:INPUT:h?"}},
	} {
		t.Run(name, func(t *testing.T) {
			if test.table == "" {
				test.table, test.chain = rules.Filter, "INPUT"
			}
			if test.most == 0 {
				test.most = 100
			}
			kube := selector(t, "kube").Protection()
			table := tableOf(t, test.table, test.lines...)
			list := singles(table, test.chain, kube)
			proposals, more := protect.Propose(list, test.table, []*rules.Table{table, nil}, test.most)
			var got []string
			left := len(list)
			for _, p := range proposals {
				text := p.Word
				switch {
				case p.Alike:
					text = "alike"
				case p.Word == "":
					text = "none"
				}
				got = append(got, fmt.Sprint(p.Count, " ", text))
				left -= p.Count
			}
			if d := cmp.Diff(test.want, got); d != "" || more != test.more || left != more {
				t.Errorf("%d more, %d are left (-want +got):\n%s", more, left, d)
			}
			guardedByProposals(t, table, test.chain, proposals, !test.unnamed)
		})
	}
}

// guardedByProposals fails unless each word alone guards as many rules of the chain as it is
// proposed for, including its own rule. all: together the words must leave no rule unguarded.
func guardedByProposals(t *testing.T, table *rules.Table, chain string, proposals []protect.Proposal, all bool) {
	t.Helper()
	before := singles(table, chain, selector(t, "kube").Protection())
	words := []string{"kube"}
	for _, p := range proposals {
		if p.Word == "" {
			continue
		}
		split, err := protect.Split("kube," + p.Word) // in its printed form
		if err != nil || len(split) != 2 {
			t.Fatalf("%s is split into %q: %v", p.Word, split, err)
		}
		words = append(words, p.Word)
		after := singles(table, chain, selector(t, split...).Protection())
		if n := len(before) - len(after); n != p.Count || slices.ContainsFunc(after, func(u protect.Unguarded) bool { return u.Rule.Is(p.Rule) }) {
			t.Errorf("%s guards %d rules, want %d with %q", p.Word, n, p.Count, p.Rule.Spec)
		}
	}
	if left := singles(table, chain, selector(t, words...).Protection()); all && len(left) > 0 {
		t.Errorf("the words leave %v", left)
	}
}

// TestProposalsForBothFamilies: a word applies to both families, and must not name a rule of
// the other family by accident.
func TestProposalsForBothFamilies(t *testing.T) {
	v4, v6 := tableOf(t, rules.Filter, "INPUT -m x --y a,b -j DROP"), tableOf(t, rules.Filter, "INPUT -m x --y a.b -j DROP")
	proposals, _ := protect.Propose(singles(v4, "INPUT", rules.Protection{Chain: func(string) bool { return false }}), rules.Filter, []*rules.Table{v4, v6}, 9)
	if len(proposals) != 1 || proposals[0].Word != "" {
		t.Errorf("%+v", proposals)
	}
}

// FuzzPropose: a chain has any rules. --protect must accept a proposed word as printed, and the
// word must guard exactly the rules that it is proposed for.
func FuzzPropose(f *testing.F) {
	f.Add("-i eth0 -j ACCEPT", `-m comment --comment "a, b" -j DROP`, "-m x --y 'a' [b]* ?", 3)
	f.Add("-s 10.0.0.1/32 -j DROP", "-s 10.0.0.2/32 -j DROP", "\xff\xfe -m comment --comment \xc3", 1)
	f.Add("", " ", `\`, 1)
	f.Fuzz(func(t *testing.T, a, b, c string, most int) {
		if most < 0 || most > 100 {
			return
		}
		table := rules.NewTable(rules.Filter)
		chain := rules.Chain{Name: "INPUT", Policy: "ACCEPT"}
		for _, spec := range []string{a, b, c, a, b + "1", b + "2", b + "3", b + "4", b + "5"} {
			r, err := rules.ParseRule(spec)
			if err != nil {
				return
			}
			chain.Rules = append(chain.Rules, r)
		}
		table.Add(chain)
		list := singles(table, "INPUT", selector(t, "kube").Protection())
		proposals, _ := protect.Propose(list, rules.Filter, []*rules.Table{table}, most)
		for _, p := range proposals {
			if strings.HasPrefix(p.Word, "rule:") {
				guardedByProposals(t, table, "INPUT", []protect.Proposal{p}, false)
			}
		}
	})
}
