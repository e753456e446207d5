package iptablestest_test

import (
	"bytes"
	"errors"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An operation is a command for the kernel and its equivalent for a Fake.
type operation struct {
	name    string
	family  rules.Family // 0 is IPv4
	nftOnly bool
	program string // a leading "-" replaces "iptables-BACKEND"
	args    []string
	input   string
	fake    func(f *iptablestest.Fake, family rules.Family) error
}

func merge(name string, lines ...string) operation {
	text := strings.Join(lines, "\n") + "\n"
	return operation{
		name: name, program: "-restore", args: []string{"--noflush"}, input: text,
		fake: func(f *iptablestest.Fake, family rules.Family) error { return f.RestoreNoflush(family, text) },
	}
}

func replace(name string, lines ...string) operation {
	op := merge(name, lines...)
	op.args = nil
	op.fake = func(f *iptablestest.Fake, family rules.Family) error { return f.Restore(family, op.input) }
	return op
}

func flush(table rules.TableName, chain ...string) operation {
	return operation{
		name: "flush " + strings.Join(chain, ""), program: "-", args: append([]string{"-t", string(table), "-F"}, chain...),
		fake: func(f *iptablestest.Fake, family rules.Family) error {
			return f.Flush(family, table, strings.Join(chain, ""))
		},
	}
}

func deleteChains(table rules.TableName) operation {
	return operation{
		name: "delete chains", program: "-", args: []string{"-t", string(table), "-X"},
		fake: func(f *iptablestest.Fake, family rules.Family) error { return f.DeleteChains(family, table) },
	}
}

func policy(table rules.TableName, chain, policy string) operation {
	return operation{
		name: "policy", program: "-", args: []string{"-t", string(table), "-P", chain, policy},
		fake: func(f *iptablestest.Fake, family rules.Family) error {
			return f.SetPolicy(family, table, chain, policy)
		},
	}
}

func native(fake func(*iptablestest.Fake) error, args ...string) operation {
	return operation{
		name: strings.Join(args, " "), program: "nft", args: args, nftOnly: true,
		fake: func(f *iptablestest.Fake, _ rules.Family) error { return fake(f) },
	}
}

func in6(op operation) operation {
	op.family = rules.IPv6
	return op
}

// operations are the commands in one long life of a namespace.
func operations() []operation {
	return []operation{
		flush("raw"), deleteChains("raw"), flush("raw", "NOPE"),
		merge("empty table", "*raw", "COMMIT"),
		policy("raw", "OUTPUT", "DROP"),
		flush("security", "FORWARD"),
		merge("first rules", "*nat", ":A - [0:0]", ":B - [0:0]", "-A A -m comment --comment canaryd-canary:abcd",
			"-A A -j B", "-A PREROUTING -j A", "-A B -d 1.2.3.4 -p tcp --dport 80 -j DNAT --to-destination 10.0.0.1:80",
			`-A B -m comment --comment "it's \"q\" \\ b"`, "-A B -m comment --comment ab_c-d", "-A B -j MARK --or-mark 0x4000", "COMMIT"),
		merge("spellings", "*mangle", ":AA - [0:0]", ":T - [0:0]",
			`-A T -m comment --comment "a b" -m tcp -p tcp -d 10.1.2.3/24 --dport 80 -j AA`,
			"-A T -j MARK --set-mark 7", "-A T -m mark --mark 1", "-A T -m mark ! --mark 0x4000/0x4000 -j RETURN",
			"-A T -p tcp --syn -j ACCEPT", "-A T -p tcp --source-port 1 -j ACCEPT",
			"-A T -m statistic --mode random --probability 0.33", "-A T -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
			"-A T -p 17 --destination-port 53 -j ACCEPT", "-A T -p icmp", "-A T -p icmp --icmp-type 8", "-A T -p all -s 0.0.0.0/0",
			"-A T --source 1.2.3.4/255.255.0.0 ! --in-interface lo --jump RETURN",
			"-A T -j MARK --and-mark 0xff", "-A T -j MARK --xor-mark 0xff", `-A T -m comment --comment ""`,
			`-A T -m comment --comment -j -m comment --comment "-g x"`,
			"-A T -p tcp -m multiport --dports 80,443", "-A T -p tcp -m comment --comment x --dport 80:90 -g AA",
			"-A T -m addrtype --dst-type LOCAL", "-A T -p tcp -m tcp ! --dport 22 -j AA",
			"-A T -j LOG --log-prefix a.b", "[3:4] -A T -j RETURN", "# a remark", "", "COMMIT"),
		merge("session affinity", "*nat", ":SEP - [0:0]", ":SVC - [0:0]",
			`-A SVC -m comment --comment "ns/svc:p -> 10.1.0.1:80" -m recent --name SEP --rcheck --seconds 60 --reap -j SEP`,
			"-A SEP -m recent --name SEP --set -m tcp -p tcp -j DNAT --to-destination 10.1.0.1:80", "COMMIT"),
		in6(merge("session affinity in IPv6", "*nat", ":SEP - [0:0]", "-A SEP -m recent --name SEP --set -p tcp -j RETURN", "-A SEP -m recent --rcheck --rdest", "COMMIT")),
		in6(merge("spellings in IPv6", "*filter", ":T - [0:0]", "-A T -d 2001:DB8:0::1 -p icmpv6 --icmpv6-type 135 -j ACCEPT",
			"-A T -s fd00::/8 -p tcp --dport 80 -j REJECT", "-A T -j REJECT", "-A INPUT -j T", "COMMIT")),
		merge("reject", "*filter", "-A INPUT -j REJECT", "COMMIT"),
		merge("jump to a missing chain", "*filter", ":C - [0:0]", "-A C -j NOPE", "COMMIT"),
		merge("goto a missing chain", "*filter", "-A INPUT -g NOPE", "COMMIT"),
		merge("forward reference", "*filter", ":C - [0:0]", "-A C -j LATER", ":LATER - [0:0]", "COMMIT"),
		merge("append to a missing chain", "*filter", ":C - [0:0]", "-A NOPE -j ACCEPT", "COMMIT"),
		merge("insert into a missing chain", "*filter", "-I NOPE -j ACCEPT", "COMMIT"),
		merge("flush a missing chain", "*filter", "-F NOPE", "COMMIT"),
		merge("policy of a missing chain", "*filter", "-P NOPE DROP", "COMMIT"),
		merge("delete a missing rule", "*filter", ":C - [0:0]", "-D C -j ACCEPT", "COMMIT"),
		merge("delete in a missing chain", "*filter", "-D NOPE -j ACCEPT", "COMMIT"),
		merge("check a missing rule", "*filter", ":C - [0:0]", "-C C -j ACCEPT", "COMMIT"),
		merge("delete a missing number", "*filter", ":C - [0:0]", "-D C 4", "COMMIT"),
		merge("insert too far", "*filter", ":C - [0:0]", "-I C 3 -j ACCEPT", "COMMIT"),
		merge("insert at 0", "*filter", "-I INPUT 0 -j ACCEPT", "COMMIT"),
		merge("delete a chain in use", "*nat", "-X B", "COMMIT"),
		merge("delete a chain with rules", "*nat", "-X A", "COMMIT"),
		merge("delete a chain that is not", "*nat", "-X ZZ", "COMMIT"),
		merge("make a chain twice", "*nat", "-N A", "COMMIT"),
		merge("make a built-in chain", "*nat", "-N OUTPUT", "COMMIT"),
		merge("jump to a built-in chain", "*nat", "-A A -j OUTPUT", "COMMIT"),
		merge("garbage", "*nat", ":NEW - [0:0]", "garbage", "COMMIT"),
		merge("option of nobody", "*nat", "-A OUTPUT --nonsense", "COMMIT"),
		merge("jump without a chain", "*nat", "-A OUTPUT -j", "COMMIT"),
		merge("comment without a text", "*nat", "-A OUTPUT -m comment --comment", "COMMIT"),
		merge("two jumps", "*nat", "-A OUTPUT -j RETURN -j ACCEPT", "COMMIT"),
		merge("address of the other family", "*nat", "-A OUTPUT -s fd00::1", "COMMIT"),
		merge("an impossible address", "*nat", "-A OUTPUT -d 1.2.3.400", "COMMIT"),
		merge("flushed and deleted", "*security", "-N A", "-A A -j RETURN", "-F", "-X", "COMMIT"),
		merge("drop in nat", "*nat", "-A OUTPUT -j DROP", "COMMIT"),
		merge("policy drop in nat", "*nat", "-P OUTPUT DROP", "COMMIT"),
		merge("no such table", "*nope", "COMMIT"),
		merge("outside of a table", "-A OUTPUT -j ACCEPT"),
		merge("no COMMIT", "*nat", "-N NC"),
		merge("bad policy", "*filter", ":FORWARD RETURN [0:0]", "COMMIT"),
		merge("policy of a user's chain", "*mangle", ":AA ACCEPT [0:0]", "COMMIT"),
		merge("the first table stays written", "*filter", ":P - [0:0]", "-A P -j ACCEPT", "COMMIT",
			"*mangle", ":Q - [0:0]", "-D Q -j ACCEPT", "COMMIT", "*raw", ":R - [0:0]", "COMMIT"),
		merge("built-in chain declared", "*filter", ":FORWARD DROP [0:0]", "-A FORWARD -j ACCEPT", "COMMIT"),
		merge("built-in chain declared with a dash", "*filter", ":FORWARD - [0:0]", "COMMIT"),
		merge("policy again", "*filter", "-P FORWARD DROP", "COMMIT"),
		merge("chain in use emptied", "*nat", ":B - [0:0]", "COMMIT"),
		merge("empty chain emptied", "*nat", ":B - [0:0]", "COMMIT"),
		merge("declared and deleted", "*nat", ":NEW - [0:0]", "-X NEW", "COMMIT"),
		merge("check that holds", "*nat", "-C A -j B", "COMMIT"),
		merge("check in another spelling", "*mangle", "-C T -j MARK --set-xmark 0x7/0xffffffff", "COMMIT"),
		merge("delete in another spelling", "*mangle", "-D T --jump MARK --set-mark 7", "COMMIT"),
		merge("first of two is deleted", "*nat", ":Q - [0:0]", "-A Q -s 9.9.9.9 -j ACCEPT", "-A Q -j RETURN",
			"-A Q -s 9.9.9.9 -j ACCEPT", "-D Q -s 9.9.9.9/32 -j ACCEPT", "COMMIT"),
		merge("insert by number", "*nat", "-I Q 2 -s 2.2.2.2 -j ACCEPT", "-I Q -s 1.1.1.1 -j ACCEPT", "COMMIT"),
		merge("insert behind the end", "*nat", "-I Q 5 -s 5.5.5.5 -j ACCEPT", "COMMIT"),
		merge("insert before a rule of the same section", "*nat", ":Q2 - [0:0]", "-A Q2 -s 1.1.1.1 -j ACCEPT",
			"-A Q2 -s 2.2.2.2 -j ACCEPT", "-I Q2 2 -s 3.3.3.3 -j ACCEPT", "COMMIT"),
		merge("delete by number", "*nat", "-D Q 2", "-D Q 1", "COMMIT"),
		merge("replace", "*nat", "-R Q 1 -s 7.7.7.7 -j RETURN", "COMMIT"),
		merge("append, flush, append", "*filter", ":F1 - [0:0]", "-A F1 -j ACCEPT", "-F F1", "-A F1 -j DROP", "COMMIT"),
		merge("flush an absent built-in chain", "*nat", "-F INPUT", "COMMIT"),
		merge("insert far into an empty built-in chain", "*nat", "-I POSTROUTING 2 -j ACCEPT", "COMMIT"),
		merge("unjump and delete", "*nat", "-F A", "-D PREROUTING -j A", "-X A", "COMMIT"),
		merge("delete what is not empty, then more", "*nat", "-X Q", "-A NOPE -j ACCEPT", "COMMIT"),
		merge("delete, then unjump", "*filter", ":H - [0:0]", "-A FORWARD -j H", "-X H", "-D FORWARD -j H", "COMMIT"),
		merge("chains in a loop", "*nat", ":L1 - [0:0]", ":L2 - [0:0]", "-A L1 -j L2", "-A L2 -j L1", "COMMIT"),
		merge("delete all chains, one in use", "*nat", "-X", "COMMIT"),
		deleteChains("nat"),
		flush("nat", "Q"), flush("nat", "Q"), flush("nat"), flush("nat"), deleteChains("nat"), deleteChains("nat"),
		replace("one table", "*filter", ":INPUT ACCEPT [0:0]", ":K - [0:0]", "-A K -j ACCEPT", "COMMIT"),
		replace("undeclared built-in chain", "*nat", "-A OUTPUT -j ACCEPT", "COMMIT"),
		replace("the same again", "*nat", "-A OUTPUT -j ACCEPT", "COMMIT"),
		replace("bad line", "*nat", ":Z - [0:0]", "-A NOPE -j ACCEPT", "COMMIT"),
		replace("one table twice", "*raw", ":ONE - [0:0]", "COMMIT", "*raw", ":TWO - [0:0]", "COMMIT"),
		replace("with nothing", "*raw", "COMMIT"),
		replace("with nothing again", "*raw", "COMMIT"),
		policy("filter", "FORWARD", "DROP"), policy("filter", "FORWARD", "DROP"), policy("filter", "K", "DROP"),
		deleteChains("filter"),
		flush("filter"), deleteChains("filter"),
		policy("filter", "FORWARD", "ACCEPT"), deleteChains("filter"),
		native(func(f *iptablestest.Fake) error { return f.FlushTable(rules.IPv4, rules.Mangle) }, "flush", "table", "ip", "mangle"),
		native(func(f *iptablestest.Fake) error { return f.DeleteTable(rules.IPv4, rules.Mangle) }, "delete", "table", "ip", "mangle"),
		native(func(f *iptablestest.Fake) error { return f.DeleteTable(rules.IPv4, rules.Mangle) }, "delete", "table", "ip", "mangle"),
		native(func(f *iptablestest.Fake) error { return f.FlushRuleset() }, "flush", "ruleset"),
		native(func(f *iptablestest.Fake) error { return f.FlushRuleset() }, "flush", "ruleset"),
		merge("after all that", "*nat", ":A - [0:0]", "-A A -j RETURN", "-I POSTROUTING -j A", "COMMIT"),
	}
}

// TestFakeConformance: the Fake and the kernel execute the same commands. After each, the output
// of iptables-save and the refusal must be equal, and on nft also the number of commits and the
// existing chains.
func TestFakeConformance(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
			nstest.Run(t, func(t *testing.T) { conform(t, backend) })
		})
	}
}

func conform(t *testing.T, backend iptables.Backend) {
	fake := iptablestest.NewFake(backend)
	for _, op := range operations() {
		if op.family == 0 {
			op.family = rules.IPv4
		}
		if op.nftOnly && backend != iptables.NFT {
			continue
		}
		kernelBefore, fakeBefore := genid(t), stamp(t, fake, op.family)
		want := real(t, backend, op)
		err := op.fake(fake, op.family)
		if refused := (*iptables.RestoreError)(nil); errors.As(err, &refused) {
			got := refusal{refused.Exit, sortWords(refused.Stderr)}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: how it was refused (-want +got):\n%s", op.name, diff)
			}
		} else if (err != nil) != (want.Exit != 0) {
			t.Errorf("%s: the program says %+v, the Fake %v", op.name, want, err)
		}
		same := true
		for _, family := range rules.Families() {
			kernel := parsed(t, save(t, backend, family))
			if diff := cmp.Diff(kernel, parsed(t, fake.Save(family))); diff != "" {
				same = false
				t.Errorf("%s: %v (-want +got):\n%s", op.name, family, diff)
			}
		}
		if backend == iptables.NFT {
			if want, got := genid(t)-kernelBefore, stamp(t, fake, op.family)-fakeBefore; got != want {
				t.Errorf("%s: %d commits, want %d", op.name, got, want)
			}
			if diff := cmp.Diff(chainsInKernel(t), chainsInFake(t, fake)); diff != "" {
				t.Errorf("%s: chains that exist (-want +got):\n%s", op.name, diff)
			}
		}
		if !same {
			t.Fatalf("the contents differ since %q; what comes behind it would only follow from that", op.name)
		}
	}
}

// A refusal is a program's exit code and complaint.
type refusal struct {
	Exit   int
	Stderr string
}

// noise matches output of the programs that the Fake omits.
var noise = regexp.MustCompile("(?m)^(# Warning: .*|Try `.*)\n")

func real(t *testing.T, backend iptables.Backend, op operation) refusal {
	t.Helper()
	program := op.program
	if rest, found := strings.CutPrefix(program, "-"); found {
		program = tool(backend, op.family, rest)
	}
	cmd := exec.CommandContext(t.Context(), program, op.args...)
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = strings.NewReader(op.input), &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return refusal{cmd.ProcessState.ExitCode(), sortWords(noise.ReplaceAllString(stderr.String(), ""))}
}

// sortWords makes a text comparable in which semicolons replaced line breaks, and a hash
// determined the order of the kernel's complaints.
func sortWords(text string) string {
	words := strings.Fields(strings.ReplaceAll(text, "; ", " "))
	slices.Sort(words)
	return strings.Join(words, " ")
}

func tool(backend iptables.Backend, family rules.Family, what string) string {
	name := "iptables-" + string(backend)
	if family == rules.IPv6 {
		name = "ip6tables-" + string(backend)
	}
	if what == "" {
		return name
	}
	return name + "-" + what
}

func save(t *testing.T, backend iptables.Backend, family rules.Family) string {
	t.Helper()
	return nstest.Command(t, tool(backend, family, "save"))
}

// parsed returns the relevant parts of a save: for each chain of each table the policy and the
// rules' texts, in order.
func parsed(t *testing.T, text string) map[rules.TableName]map[string][]string {
	t.Helper()
	all := map[rules.TableName]map[string][]string{}
	for name, table := range savefile.Tables(t, text) {
		all[name] = map[string][]string{}
		for _, c := range table.Chains {
			all[name][c.Name] = []string{c.Policy}
			for _, r := range c.Rules {
				all[name][c.Name] = append(all[name][c.Name], r.Spec)
			}
		}
	}
	return all
}

// chainsInKernel lists nf_tables' chains, "ip nat OUTPUT".
func chainsInKernel(t *testing.T) []string {
	t.Helper()
	var all []string
	table := ""
	for line := range strings.Lines(nstest.Command(t, "nft", "list", "chains")) {
		words := strings.Fields(line)
		switch {
		case len(words) == 4 && words[0] == "table":
			table = words[1] + " " + words[2]
		case len(words) == 3 && words[0] == "chain":
			all = append(all, table+" "+words[1])
		}
	}
	slices.Sort(all)
	return all
}

// chainsInFake probes a Fake for the chains that its save names.
func chainsInFake(t *testing.T, fake *iptablestest.Fake) []string {
	t.Helper()
	var all []string
	for _, family := range rules.Families() {
		var places []iptables.Place
		for table, chains := range parsed(t, fake.Save(family)) {
			for name := range chains {
				places = append(places, iptables.Place{Table: table, Chain: name})
			}
		}
		probed, err := fake.Probe(t.Context(), family, places)
		if err != nil {
			t.Fatal(err)
		}
		prefix := map[rules.Family]string{rules.IPv4: "ip ", rules.IPv6: "ip6 "}[family]
		for place, holding := range probed.Holdings {
			if holding.Presence == iptables.Present {
				all = append(all, prefix+string(place.Table)+" "+place.Chain)
			}
		}
	}
	slices.Sort(all)
	return all
}

func stamp(t *testing.T, fake *iptablestest.Fake, family rules.Family) uint64 {
	t.Helper()
	s, err := fake.Stamp(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	return s.Value
}

// genid reads the kernel's ruleset counter.
func genid(t *testing.T) uint64 {
	t.Helper()
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answers, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, 0, 0, 0},
	})
	if err != nil || len(answers) == 0 || len(answers[0].Data) < 12 {
		t.Fatalf("GETGEN: %v, %v", answers, err)
	}
	id := answers[0].Data[8:12] // behind nfgenmsg and the attribute's header
	return uint64(id[0])<<24 | uint64(id[1])<<16 | uint64(id[2])<<8 | uint64(id[3])
}
