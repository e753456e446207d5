package iptables

import (
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// described is a Snapshot in a form to compare and print.
type described struct {
	Tables     map[rules.TableName][]rules.Chain
	Unreadable []rules.TableName
}

func describe(set rules.Ruleset, unreadable map[rules.TableName]error) described {
	d := described{Tables: map[rules.TableName][]rules.Chain{}, Unreadable: slices.Sorted(maps.Keys(unreadable))}
	for name, table := range set {
		for _, chain := range table.Chains {
			chain.Rules = append([]rules.Rule{}, chain.Rules...) // nil counts as empty
			d.Tables[name] = append(d.Tables[name], chain)
		}
	}
	return d
}

// wantAsSaved compares what the mirror says with what iptables-save prints.
func wantAsSaved(t *testing.T, k *Kernel, family rules.Family, after string) Snapshot {
	t.Helper()
	got := mustRead(t, k, family)
	set := k.save(t, family)
	exist, err := iptablesTables(dialTest(t), family)
	if err != nil {
		t.Fatal(err)
	}
	mirrored := maps.Clone(got.Tables)
	for name, table := range set { // iptables has words for more rules than canaryd
		for i := range table.Chains {
			for n, r := range mirrored[name].Rules(table.Chains[i].Name) {
				if _, opaque := r.Opaque(); opaque && n < len(table.Chains[i].Rules) && table.Chains[i].Rules[n].Target == r.Target {
					table.Chains[i].Rules[n] = r
				}
			}
		}
	}
	for _, table := range exist {
		if set[table] != nil { // else save prints nothing of it because of a native rule
			continue
		}
		if countOpaque(got.Tables[table]) == 0 {
			t.Fatalf("after %s: iptables-save does not print %s, of which no rule is opaque", after, table)
		}
		delete(mirrored, table)
	}
	saved, shown := describe(set, nil), describe(mirrored, got.Unreadable)
	for _, p := range notAsIptablesMakesThem(t, got, after) {
		for _, d := range []described{saved, shown} {
			d.Tables[p.Table] = slices.DeleteFunc(d.Tables[p.Table], func(c rules.Chain) bool { return c.Name == p.Chain })
		}
	}
	if diff := cmp.Diff(saved, shown); diff != "" {
		t.Fatalf("after %s (-saved +mirrored):\n%s", after, diff)
	}
	if now := mustStamp(t, k, family); now.Value != got.Digest {
		t.Errorf("after %s: the digest is %d, the genid %d", after, got.Digest, now.Value)
	}
	return got
}

// notAsIptablesMakesThem returns the built-in chains that another program
// declared in its own way. iptables-save prints no rule of them, or prints them
// as a user's chains. The mirror shows the rules that are in force.
func notAsIptablesMakesThem(t *testing.T, s Snapshot, after string) (places []Place) {
	t.Helper()
	conn := dialTest(t)
	for name, table := range s.Tables {
		for _, chain := range rules.BuiltinChains(name) {
			p := Place{Table: name, Chain: chain}
			c, ok, err := conn.Chain(s.Family, name, chain)
			if err != nil {
				t.Fatal(err)
			}
			fit, held := fits, 0
			if ok {
				fit = fitOf(p, baseOf(&c))
				err = conn.EachRule(s.Family, name, chain, func(nft.RuleMessage) error { held++; return nil })
			}
			if err != nil {
				t.Fatal(err)
			}
			if fit == misfit {
				held = 0
			}
			if shown := len(table.Rules(chain)); fit != fits && shown != held || (s.Misfits[p] != nil) != (fit == misfit) {
				t.Errorf("after %s: of %v, which fits as %d, %d of %d rules are shown, misfit: %v", after, p, fit, shown, held, s.Misfits[p])
			}
			if fit != fits {
				places = append(places, p)
			}
		}
	}
	return places
}

// countOpaque counts the rules of a table that have no text.
func countOpaque(t *rules.Table) int {
	n := 0
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			if _, opaque := r.Opaque(); opaque {
				n++
			}
		}
	}
	return n
}

// attempt executes a line of shell, which may fail.
func attempt(t *testing.T, input, line string) {
	t.Helper()
	_, _ = tryTool(t, input, "sh", "-c", line)
}

// corpus returns rules of whole nodes by the names of their files, in order: of
// kube-proxy for all clusters of the corpus, and of others.
func corpus(t *testing.T) iter.Seq2[string, string] {
	t.Helper()
	var files []string
	for _, pattern := range []string{"kube-proxy/*/expected.rules", "node/*.rules"} {
		found, err := filepath.Glob("../../internal/testkit/scenario/testdata/" + pattern)
		if err != nil || len(found) == 0 {
			t.Fatal("no rules in", pattern, err)
		}
		files = append(files, found...)
	}
	return func(yield func(file, text string) bool) {
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !yield(file, string(text)) {
				return
			}
		}
	}
}

// The mirror must equal the output of iptables-save, for the rules of all
// clusters of the corpus. Each cluster's rules replace the previous ones.
func TestMirrorCorpus(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft")
		k := openKernel(t, Config{Backend: NFT})
		loaded := 0
		for file, text := range corpus(t) {
			for _, flags := range [][]string{nil, {"--noflush"}} {
				_, _ = tryTool(t, text, "iptables-nft-restore", flags...)
				s := wantAsSaved(t, k, rules.IPv4, fmt.Sprint(file, flags))
				for _, table := range s.Tables {
					loaded += table.RuleCount()
				}
			}
		}
		if loaded < 1000 {
			t.Errorf("only %d rules were loaded in all", loaded)
		}
	})
}

// ruleTexts are rules that nf_tables holds in many ways: native expressions, xt
// matches and targets, inverted, with comments that imitate other options.
func ruleTexts(family rules.Family) []string {
	address := "10.1.2.0/24"
	if family == rules.IPv6 {
		address = "fd00:1::/64"
	}
	return []string{
		"",
		"-j ACCEPT",
		"-p tcp -m tcp --dport 80 -j ACCEPT",
		"! -p udp -j RETURN",
		"-s " + address + " ! -i eth0 -p tcp -m multiport --dports 1,2,3:9 -j DROP",
		"-m comment --comment \"hello, \\\"world\\\" -j DROP\" -j ACCEPT",
		"-m comment --comment plain",
		"-m comment --comment canaryd-0123456789abcdef",
		"-m comment --comment \"canaryd-witness-0123\" -j RETURN",
		"-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-m limit --limit 5/sec --limit-burst 7 -j LOG --log-prefix \"a b -j \"",
		"-m mark --mark 0x4000/0x4000 -j RETURN",
		"-m statistic --mode random --probability 0.33333333349 -j ACCEPT",
		"-m addrtype --dst-type LOCAL -j ACCEPT",
		"-m set --match-set mine src -j ACCEPT",
		"-m set ! --match-set other dst,src",
		"-j SET --add-set mine src",
		"-m recent --rcheck --seconds 10800 --reap --name X --rsource -j ACCEPT",
		"-m physdev --physdev-is-in -j ACCEPT",
		"-p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu",
		"-j MARK --or-mark 0x4000",
		"-j CONNMARK --save-mark",
		"-p tcp -j REJECT --reject-with tcp-reset",
		"-j A",
		"-g B",
		"-j C",
	}
}

// An editor changes one family's tables at random.
type editor struct {
	t      *testing.T
	rand   *rand.Rand
	family rules.Family
	rules  []string
}

func (e *editor) pick(words ...string) string { return words[e.rand.IntN(len(words))] }

func (e *editor) table() string { return e.pick("filter", "nat", "mangle", "filter", "raw") }

func (e *editor) chain() string {
	return e.pick("A", "B", "C", "D", "KUBE-SVC-0123456789ABCDEF", "INPUT", "OUTPUT", "PREROUTING")
}

// edit makes one change and returns its description.
func (e *editor) edit() string {
	prefix := familyPrefix(e.family) + "tables-nft"
	nft := "nft -- "
	table, chain := e.table(), e.chain()
	ip := map[rules.Family]string{rules.IPv4: "ip", rules.IPv6: "ip6"}[e.family]
	native := fmt.Sprintf("%s %s %s", ip, table, chain)
	var line, input string
	switch e.rand.IntN(26) {
	case 0, 1, 2, 3, 4:
		line = fmt.Sprintf("%s -t %s -A %s %s", prefix, table, chain, e.pick(e.rules...))
	case 5, 6, 7:
		line = fmt.Sprintf("%s -t %s -I %s %d %s", prefix, table, chain, 1+e.rand.IntN(3), e.pick(e.rules...))
	case 8:
		line = fmt.Sprintf("%s -t %s -D %s %d", prefix, table, chain, 1+e.rand.IntN(3))
	case 9:
		line = fmt.Sprintf("%s -t %s -R %s 1 %s", prefix, table, chain, e.pick(e.rules...))
	case 10:
		line = fmt.Sprintf("%s -t %s -F %s", prefix, table, chain)
	case 11:
		line = fmt.Sprintf("%s -t %s %s", prefix, table, e.pick("-F", "-X", "-F; "+prefix+" -t "+table+" -X"))
	case 12:
		line = fmt.Sprintf("%s -t %s -E %s %s", prefix, table, chain, e.pick("A", "B", "E"))
	case 13:
		line = fmt.Sprintf("%s -t %s -P %s %s", prefix, table, e.pick("INPUT", "OUTPUT"), e.pick("DROP", "ACCEPT"))
	case 14:
		line = fmt.Sprintf("%s -t %s -X %s", prefix, table, chain)
	case 15, 16, 17:
		line, input = prefix+"-restore --noflush", e.restore(table)
	case 18:
		line, input = prefix+"-restore", e.restore(table)
	case 19, 20: // iptables does not understand this table
		line = nft + "add rule " + native + " ct state vmap '{ new : accept }'"
	case 21:
		line = nft + "flush chain " + native
	case 22, 23: // a table, a hook and names that are not iptables'
		line = nft + e.pick(
			"delete table "+ip+" "+table,
			"add table "+ip+" "+table,
			"flush ruleset "+ip,
			"add chain "+ip+" "+table+" odd '{ type filter hook input priority 7; policy drop; }'",
			"add rule "+ip+" "+table+" odd ct state vmap '{ new : accept }'",
			"add chain "+ip+" "+table+" INPUT '{ type filter hook input priority 7; }'",
			"add chain "+ip+" "+table+" INPUT",
			"add chain "+ip+" "+table+" A_name_that_is_much_longer_than_iptables_takes_at_all",
			"add table "+ip+" else; nft add chain "+ip+" else A; nft add rule "+ip+" else A accept",
			"delete chain "+ip+" "+table+" odd",
		)
	default: // many things at once
		var script []string
		for _, c := range []string{"A", "B", "C"} {
			script = append(script, fmt.Sprintf("add chain %s %s %s", ip, table, c), fmt.Sprintf("add rule %s %s %s counter return", ip, table, c))
		}
		line, input = "nft -f -", strings.Join(script, "\n")
	}
	attempt(e.t, input, line)
	if input != "" {
		return line + " <<.\n" + input
	}
	return line
}

func (e *editor) restore(table string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", table)
	chains := []string{"A", "B", "C", "D"}[:2+e.rand.IntN(3)]
	for _, c := range chains {
		fmt.Fprintf(&b, ":%s - [0:0]\n", c)
	}
	for _, c := range chains {
		for range e.rand.IntN(4) {
			fmt.Fprintf(&b, "-A %s %s\n", c, e.pick(e.rules...))
		}
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// After any changes to the tables the mirror equals the output of iptables-save.
func TestMirrorRandomEdits(t *testing.T) {
	for _, family := range rules.Families() {
		for seed := range testkit.Size(uint64(1), 3) {
			t.Run(fmt.Sprint(family, "/", seed), func(t *testing.T) {
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "nft", "ipset")
					inet := map[rules.Family]string{rules.IPv4: "inet", rules.IPv6: "inet6"}[family]
					for _, set := range []string{"mine", "other"} {
						nstest.Command(t, "ipset", "create", set, "hash:net", "family", inet)
					}
					k := openKernel(t, Config{Backend: NFT})
					e := &editor{t: t, rand: rand.New(rand.NewPCG(seed, 1)), family: family, rules: ruleTexts(family)}
					opaque, read := 0, 0
					edits := testkit.Size(50, 150)
					for range edits {
						done := e.edit()
						for e.rand.IntN(3) == 0 {
							done += "\n" + e.edit()
						}
						s := wantAsSaved(t, k, family, done)
						for _, table := range s.Tables {
							read += table.RuleCount()
							opaque += countOpaque(table)
						}
						if s.Tables[rules.Nat] == nil && s.Tables[rules.Filter] == nil {
							attempt(t, "", "nft flush ruleset")
						}
					}
					if opaque == 0 || read < 2*edits {
						t.Errorf("%d rules were opaque, %d rules were read: this shows nothing", opaque, read)
					}
				})
			})
		}
	}
}

// iptablesTables returns the existing tables among iptables' five.
func iptablesTables(conn *nft.Conn, family rules.Family) ([]rules.TableName, error) {
	var found []rules.TableName
	for _, table := range rules.AllTables() {
		ok, err := conn.HasTable(family, table)
		if err != nil {
			return nil, err
		}
		if ok {
			found = append(found, table)
		}
	}
	return found, nil
}
