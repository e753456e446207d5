package iptables_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A counter is a Kernel that counts its sessions' writes, and calls before first.
type counter struct {
	*iptables.Kernel
	guarded, anyway int
	before          func(write int)
}

func (c *counter) Begin(ctx context.Context) (iptables.Session, error) {
	s, err := c.Kernel.Begin(ctx)
	return countedSession{s, c}, err
}

type countedSession struct {
	iptables.Session
	*counter
}

func (s countedSession) Close() error { return s.Session.Close() }

func (s countedSession) Read(ctx context.Context, f rules.Family) (iptables.Snapshot, error) {
	return s.Session.Read(ctx, f)
}

func (s countedSession) Restore(ctx context.Context, p ...iptables.Payload) map[rules.Family]iptables.Written {
	if s.guarded++; s.before != nil {
		s.before(s.guarded)
	}
	return s.Session.Restore(ctx, p...)
}

func (s countedSession) RestoreAnyway(ctx context.Context, p ...iptables.Payload) map[rules.Family]iptables.Written {
	s.anyway++
	return s.Session.RestoreAnyway(ctx, p...)
}

// The kernel names the rule that it refuses in a transaction. It refuses three of
// a thousand rules, so the fourth transaction has all others, of both families.
// Nothing is tried by halves, unless very many rules are refused.
// iptables-restore tries a rule that has a text alone.
func TestTheKernelNamesTheRuleThatItRefuses(t *testing.T) {
	for _, test := range []struct {
		name    string
		refused []int // of the rules of P-MINE, by index
		text    bool  // they have a text, and name an object that was deleted
		// writer has commands of another process right before a write.
		writer map[int]string
		want   int // transactions
		trials int // writes to the chain of trials, if a rule has a text
	}{
		{name: "none", want: 1},
		{name: "one", refused: []int{500}, want: 2},
		{name: "the first, the last and their neighbours", refused: []int{0, 1, 998, 999}, want: 5},
		{name: "another process writes meanwhile", refused: []int{7, 400}, writer: map[int]string{2: "-N OTHER", 3: "-A OTHER -p tcp -j DROP"}, want: 5},
		{name: "so many that the last are bisected", refused: first(70), want: 66, trials: 29},
		{name: "rules with a text", refused: []int{3, 700}, text: true, want: 3, trials: 6},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "iptables-nft-restore", "ip6tables-nft-restore")
				n := newRefusingNode(t, test.refused, test.text)
				n.counter.before = func(write int) {
					if line := test.writer[write]; line != "" {
						nstest.Command(t, "iptables-nft", strings.Fields(line)...)
					}
				}
				result, err := n.replayer.Heal(t.Context(), n.job)
				if err != nil {
					t.Fatal(err)
				}
				if n.counter.guarded != test.want || n.counter.anyway != test.trials {
					t.Errorf("it took %d transactions and %d on trial, want %d and %d", n.counter.guarded, n.counter.anyway, test.want, test.trials)
				}
				var held []rules.Rule
				reason := "the kernel refused a rule of chain"
				if test.text {
					reason = "iptables-nft-restore refused the rules"
				}
				for _, h := range result[rules.IPv4].Tables[rules.Filter].Quarantined {
					if held = append(held, h.Rule); !h.Refused || !strings.Contains(h.Reason, reason) {
						t.Errorf("held: %.100s, refused %t: %s", h.Rule.Label(), h.Refused, h.Reason)
					}
				}
				if diff := cmp.Diff(n.refused, held); diff != "" {
					t.Errorf("in quarantine (-want +got):\n%s", diff)
				}
				for family, want := range map[rules.Family][]rules.Rule{rules.IPv4: n.others, rules.IPv6: n.v6} {
					if tr := result[family].Tables[rules.Filter]; !tr.Proved {
						t.Errorf("%s is not proved: %v", family, result[family].Err)
					}
					if diff := cmp.Diff(want, n.read(t, family).Rules("P-MINE")); diff != "" {
						t.Errorf("%s P-MINE (-want +got):\n%s", family, diff)
					}
				}
			})
		})
	}
}

// A refusingNode has lost a thousand rules, and the kernel refuses some of them.
// Their bytes name a match that it lacks. If they have a text, it names a deleted
// nfacct object. The rules decide nothing, so none waits for another.
type refusingNode struct {
	counter             *counter
	replayer            reload.Replayer
	job                 reload.Job
	refused, others, v6 []rules.Rule
}

func newRefusingNode(t *testing.T, refused []int, withText bool) *refusingNode {
	t.Helper()
	if err := iptables.NewSets().Account(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	for program, has := range map[string]bool{"iptables-nft-restore": withText, "ip6tables-nft-restore": false} {
		var text strings.Builder
		text.WriteString("*filter\n:P-MINE - [0:0]\n-A INPUT -j P-MINE\n")
		for i := range 1000 {
			fmt.Fprintf(&text, "-A P-MINE -p tcp -m tcp --dport %d", i+1)
			if has && slices.Contains(refused, i) {
				text.WriteString(" -m nfacct --nfacct-name gone")
			}
			text.WriteString("\n")
		}
		text.WriteString("COMMIT\n")
		nstest.CommandInput(t, text.String(), program)
	}
	nstest.Command(t, "iptables-nft", "-N", "P-ODD")
	nstest.Command(t, "iptables-nft", "-A", "P-ODD", "-m", "comment", "--comment", "line\nbreak", "-j", "LOG")
	n := &refusingNode{counter: &counter{Kernel: iptables.OpenKernel(t, iptables.Config{Backend: iptables.NFT})}}
	n.learn(t)
	v4 := n.job.Generation[rules.IPv4.Table(rules.Filter)]
	mine := slices.Clone(v4.Chains[0].Rules)
	n.v6 = n.job.Generation[rules.IPv6.Table(rules.Filter)].Chains[0].Rules
	odd := n.read(t, rules.IPv4).Rules("P-ODD")[0]
	for at, r := range mine {
		if !slices.Contains(refused, at) {
			n.others = append(n.others, r)
			continue
		}
		if withText {
			n.refused = append(n.refused, r)
			continue
		}
		expressions, userdata, _, ok := odd.Bytes()
		if !ok {
			t.Fatalf("it has no bytes: %v", odd)
		}
		bad := strings.Replace(string(expressions), "comment\x00", fmt.Sprintf("no%05d\x00", at), 1)
		mine[at] = rules.OpaqueBytes([]byte(bad), userdata, "LOG", "spoiled")
		n.refused = append(n.refused, mine[at])
	}
	v4.Chains = []rules.Chain{{Name: "P-MINE", Rules: mine}}
	n.job.Generation = n.job.Generation.With(rules.IPv4.Table(rules.Filter), v4)
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
		nstest.Command(t, program, "-F")
		nstest.Command(t, program, "-X")
	}
	deleteAccounts(t)
	n.counter.guarded, n.counter.anyway = 0, 0
	return n
}

// read returns the filter table of a family.
func (n *refusingNode) read(t *testing.T, family rules.Family) *rules.Table {
	t.Helper()
	snapshot, err := n.counter.Read(t.Context(), family)
	if err != nil {
		t.Fatal(err)
	}
	return snapshot.Tables[rules.Filter]
}

// deleteAccounts deletes all nfacct objects that no rule names.
func deleteAccounts(t *testing.T) {
	t.Helper()
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const acctDel = unix.NFNL_SUBSYS_ACCT<<8 | 3                                                                                           // NFNL_MSG_ACCT_DEL
	message := netlink.Message{Header: netlink.Header{Type: acctDel, Flags: netlink.Request | netlink.Acknowledge}, Data: make([]byte, 4)} // struct nfgenmsg
	if _, err := conn.Execute(message); err != nil {
		t.Fatal(err)
	}
}

// first returns the indexes of the first n rules.
func first(n int) (list []int) {
	for i := range n {
		list = append(list, i)
	}
	return list
}

// The kernel refuses a rule only in its place, and only that rule must be
// missing. The match owner works in some hooks, and the flusher jumps to its
// chain from another hook.
func TestARuleThatIsRefusedInItsPlaceCostsItself(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		run := func(lines ...string) {
			for _, line := range lines {
				nstest.Command(t, "iptables-nft", strings.Fields(line)...)
			}
		}
		run("-N P-MINE", "-A P-MINE -p tcp", "-A P-MINE -m owner --uid-owner 0", "-A P-MINE -p udp", "-A OUTPUT -j P-MINE")
		n := &refusingNode{counter: &counter{Kernel: iptables.OpenKernel(t, iptables.Config{Backend: iptables.NFT})}}
		n.learn(t)
		run("-F", "-X", "-N P-MINE", "-A INPUT -j P-MINE")
		n.counter.guarded = 0
		result, err := n.replayer.Heal(t.Context(), n.job)
		if err != nil {
			t.Fatal(err)
		}
		filter := result[rules.IPv4].Tables[rules.Filter]
		if !filter.Proved || n.counter.guarded != 3 { // by bytes, as text, and without the rule
			t.Errorf("proved %t after %d writes: %v", filter.Proved, n.counter.guarded, result[rules.IPv4].Err)
		}
		if h := filter.Quarantined; len(h) != 1 || h[0].Rule.Label() != "-m owner --uid-owner 0" || !strings.Contains(h[0].Reason, "the kernel refused a rule of chain P-MINE") {
			t.Errorf("in quarantine: %+v", h)
		}
		want := []rules.Rule{{Spec: "-p tcp"}, {Spec: "-p udp"}}
		if diff := cmp.Diff(want, n.read(t, rules.IPv4).Rules("P-MINE")); diff != "" {
			t.Errorf("P-MINE (-want +got):\n%s", diff)
		}
	})
}

// learn learns the rules of the filter tables, and plants marks.
func (n *refusingNode) learn(t *testing.T) {
	t.Helper()
	selector, err := protect.NewSelector([]string{"P-MINE", "P-OTHER"})
	if err != nil {
		t.Fatal(err)
	}
	protection := selector.Protection()
	n.replayer = reload.Replayer{Kernel: n.counter, Canary: canary.DefaultChain, Protection: protection}
	n.job = reload.Job{Families: rules.Families()}
	for _, family := range rules.Families() {
		section := protection.Extract(n.read(t, family), canary.IsMark)
		n.job.Generation = n.job.Generation.With(family.Table(rules.Filter), section)
	}
	planted, err := n.replayer.Plant(t.Context(), n.job)
	if err != nil {
		t.Fatal(err)
	}
	for family, result := range planted {
		for name, table := range result.Tables {
			n.job.Marks = n.job.Marks.With(family.Table(name), table.Mark)
		}
	}
}
