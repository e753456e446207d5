package nft

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMirrorFollows: after some commands the notifications suffice, and the
// mirror reads nothing. After the others it reads.
func TestMirrorFollows(t *testing.T) {
	const start = `table inet guarded {
		chain base { type filter hook input priority 0; tcp dport 1 accept; jump plain; }
		chain plain { tcp dport 1 accept; tcp dport 2 accept; tcp dport 3 accept; }
		chain empty { }
	}`
	for _, test := range []struct {
		command string
		reads   bool
	}{
		{"add rule inet guarded plain tcp dport 4 accept", false},
		{"insert rule inet guarded plain tcp dport 4 accept", false},
		{"add rule inet guarded plain index 1 tcp dport 4 accept", false},
		{"insert rule inet guarded plain index 1 tcp dport 4 accept", false},
		{"add rule inet guarded plain accept; add rule inet guarded plain drop; insert rule inet guarded plain accept", false},
		{"flush chain inet guarded plain", false},
		{"flush chain inet guarded plain; add rule inet guarded plain tcp dport 9 accept", false},
		{"flush table inet guarded", false},
		{"add chain inet guarded new; add rule inet guarded new accept; add rule inet guarded base jump new", false},
		{"delete chain inet guarded empty", false},
		{"delete chain inet guarded empty; add chain inet guarded empty; add rule inet guarded empty accept", false},
		{"chain inet guarded base { policy drop; }", false},
		{"add chain inet guarded plain; add rule inet guarded plain accept", false},
		{"add chain inet guarded other { type filter hook output priority 0; }; add rule inet guarded other accept", false},
		{"add rule inet elsewhere c accept", false},
		{"rename chain inet guarded empty renamed", true},
		{"delete table inet guarded", true},
		{"add table inet guarded2; add chain inet guarded2 c", true},
		{"flush ruleset", true},
	} {
		t.Run(test.command, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				x := newMirrorTest(t, nil)
				nstest.CommandInput(t, start+"\ntable inet elsewhere { chain c { }; }", "nft", "-f", "-")
				x.want(t, "the start")
				nstest.Command(t, "nft", test.command)
				if follows := x.follows(t); follows == test.reads {
					t.Errorf("it follows: %t, want that it reads: %t", follows, test.reads)
				}
				x.want(t, test.command)
			})
		})
	}
}

// TestMirrorFollowsIptables does the same with changes by iptables to counters
// and rules in place, which keep their handles.
func TestMirrorFollowsIptables(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		x := newMirrorTest(t, nil)
		x.m.parts[0].cfg.Family, x.m.parts[0].cfg.Tables = tableid.IPv4, func(name string) bool { return name == "filter" }
		words := func() (words []string) {
			x.read(t)
			for _, chain := range x.f.Chains("filter") {
				c := x.f.Chain(Place{"filter", chain})
				for i, id := range c.IDs {
					words = append(words, fmt.Sprintf("%s %d %x", chain, c.Handles[i], x.store.Rule(id, nil)))
				}
			}
			return slices.Sorted(slices.Values(words))
		}
		dumped := func() (words []string) {
			err := x.conn.EachRuleIn(tableid.IPv4, "filter", func(m RuleMessage) error {
				words = append(words, fmt.Sprintf("%s %d %x", m.Chain, m.Handle, m.Rule))
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			return slices.Sorted(slices.Values(words))
		}
		nstest.CommandInput(t, "*filter\n:A - [0:0]\n-A INPUT -j A\n-A INPUT -p tcp -j A\n-A A -j RETURN\n-A A -p tcp -j RETURN\n-A A -p udp -j RETURN\nCOMMIT\n", "iptables-nft-restore")
		words()
		for _, command := range []string{
			"-P INPUT ACCEPT", "-Z", "-Z A 2", "-R A 1 -p sctp -j RETURN", "-R A 3 -p icmp -j RETURN", "-I A 2 -j RETURN", "-D A 1", "-P INPUT DROP", "-N B", "-A B -j A", "-F B", "-X B", "-F",
		} {
			nstest.Command(t, "iptables-nft", strings.Fields(command)...)
			if !x.follows(t) {
				t.Errorf("it reads after iptables %s", command)
			}
			if diff := cmp.Diff(dumped(), words()); diff != "" {
				t.Fatalf("after iptables %s (-kernel +mirror):\n%s", command, diff)
			}
		}
	})
}

// A takingView notes the mirror's content when Taking is called.
type takingView struct {
	blind
	x    *mirrorTest
	seen []string
}

func (v *takingView) Taking(genid uint32, exact []string, missed bool) {
	if !slices.Contains(exact, "guarded") {
		return
	}
	c := v.x.f.Chain(Place{"guarded", "young"})
	v.seen = append(v.seen, fmt.Sprintf("at %d, missed %t, %d rules, young: %t", genid, missed, len(v.x.f.Chain(Place{"guarded", "c"}).IDs), c != nil))
}

// TestMirrorBeforeAnOverflow: the kernel drops a part of a large commit's
// notifications. The mirror applies the complete commits, shows the table as of
// then, and reads everything again.
func TestMirrorBeforeAnOverflow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		x := newMirrorTest(t, nil)
		view := &takingView{x: &x}
		x.f.cfg.View = view
		var script strings.Builder
		script.WriteString("add table inet guarded\nadd chain inet guarded c\n")
		const many = 4000
		for i := range many {
			fmt.Fprintf(&script, "add rule inet guarded c tcp dport %d accept\n", i+1)
		}
		nstest.CommandInput(t, script.String(), "nft", "-f", "-")
		x.want(t, "the start")
		if err := x.m.events.conn.SetReadBuffer(64 << 10); err != nil {
			t.Fatal(err)
		}
		nstest.Command(t, "nft", "add chain inet guarded young; add rule inet guarded c tcp dport 9999 drop")
		at, err := x.conn.Genid()
		if err != nil {
			t.Fatal(err)
		}
		nstest.Command(t, "nft", "flush", "chain", "inet", "guarded", "c")
		for range 20 { // messages after the gap are ignored
			nstest.Command(t, "nft", "add", "rule", "inet", "guarded", "c", "accept")
		}
		x.want(t, "an overflow")
		want := []string{fmt.Sprintf("at %d, missed true, %d rules, young: true", at, many+1)}
		if diff := cmp.Diff(want, view.seen); diff != "" {
			t.Errorf("what it says of the moment before (-want +got):\n%s", diff)
		}
	})
}

// TestMirrorBeforeACommit: right before a commit of another process that takes
// something, the mirror shows its state, if it is the kernel's. While a chain
// waits to be read the mirror shows nothing.
func TestMirrorBeforeACommit(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(x mirrorTest)
		want []string
	}{
		{"as heard", func(mirrorTest) {}, []string{"missed false, 2 rules, young: true"}},
		{"a chain waits to be read", func(x mirrorTest) { x.f.Reread(Place{"guarded", "c"}) }, nil},
		{"a chain of another table waits", func(x mirrorTest) { x.f.Reread(Place{"guarded2", "c"}) }, []string{"missed false, 2 rules, young: true"}},
		{"the commit may have been read", func(x mirrorTest) { x.f.tables["guarded"].upTo += 10 }, nil},
		{"it is its own", func(x mirrorTest) { x.m.events.own = func(uint32, uint32) bool { return true } }, nil},
		{"one of its own came before", func(x mirrorTest) {
			own := true // the first of two commits
			x.m.events.own = func(uint32, uint32) bool { was := own; own = false; return was }
		}, []string{"missed false, 2 rules, young: true"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				x := newMirrorTest(t, nil)
				view := &takingView{x: &x}
				x.f.cfg.View = view
				nstest.CommandInput(t, "table inet guarded { chain c { accept; }; }\ntable inet guarded2 { chain c { accept; }; }", "nft", "-f", "-")
				x.want(t, "the start")
				nstest.Command(t, "nft", "add chain inet guarded young; add rule inet guarded c drop")
				test.do(x)
				nstest.Command(t, "nft", "flush", "chain", "inet", "guarded", "c")
				x.want(t, "the flush")
				for i, seen := range view.seen {
					_, view.seen[i], _ = strings.Cut(seen, ", ")
				}
				if diff := cmp.Diff(test.want, view.seen); diff != "" {
					t.Errorf("what it says of the moment before (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestMirrorReadsItsOwnWrites: the mirror reads the writes of the user's own
// commits, even if it received their notifications.
func TestMirrorReadsItsOwnWrites(t *testing.T) {
	for _, own := range []bool{true, false} {
		t.Run(fmt.Sprint(own), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				x := newMirrorTest(t, nil)
				nstest.CommandInput(t, "table inet guarded { chain c { accept; }; }", "nft", "-f", "-")
				x.want(t, "the start")
				x.m.events.own = func(uint32, uint32) bool { return own }
				nstest.Command(t, "nft", "add rule inet guarded c drop")
				x.follows(t)
				x.f.tables["guarded"].chains["c"].IDs[1] = 1 // as by a wrong notification
				got, _ := x.read(t)
				want, _ := x.kernel(t)
				if same := cmp.Equal(want, got); same != own {
					t.Errorf("the mirror has what the kernel has: %t, want %t", same, own)
				}
			})
		})
	}
}
