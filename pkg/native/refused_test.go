package native_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// firewall is a table with one of everything that the kernel may refuse.
const firewall = `table inet fw {
	counter seen { }
	quota most { over 10 mbytes }
	set banned { type ipv4_addr; size 16; elements = { 10.0.0.1, 10.0.0.2, 10.0.0.3 }; }
	set ranges { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.3.0.0/16, 10.5.0.0/16 }; }
	map to { type inet_service : verdict; elements = { 80 : jump web, 81 : jump other, 82 : accept }; }
	chain web { counter; accept; }
	chain other { log prefix "other"; drop; }
	chain input {
		type filter hook input priority 0; policy accept;
		ct state established accept
		ip saddr @banned drop
		counter name "seen"
		tcp dport { 22, 23 } accept
		tcp dport vmap @to
		ip saddr @ranges accept
		tcp dport 99 jump { counter; drop; }
		udp dport 53 accept
		drop
	}
	chain forward { type filter hook forward priority 0; policy accept; jump other; accept; }
}`

// refusedRule returns a rule that compares by an unknown operator, which the kernel refuses.
func refusedRule(r native.Rule) native.Rule {
	data := nft.AppendAttr(nil, unix.NFTA_CMP_SREG, []byte{0, 0, 0, 1}, 0)
	data = nft.AppendAttr(data, unix.NFTA_CMP_OP, []byte{0, 0, 0, 99}, 0)
	data = nft.AppendAttr(data, unix.NFTA_CMP_DATA|unix.NLA_F_NESTED, nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, []byte{1, 2, 3, 4}, 0), 0)
	expression := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "cmp", 1)
	return before(r, nft.AppendAttr(expression, unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, data, 0))
}

// unknownRule returns a rule with another kernel's expression in front.
func unknownRule(r native.Rule) native.Rule {
	return before(r, nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "fromthefuture", 1))
}

// before returns a rule with an expression in front.
func before(r native.Rule, expression []byte) native.Rule {
	list := nft.AppendAttr(nil, unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, expression, 0)
	old, _ := nft.AttrOf(r.Attrs, unix.NFTA_RULE_EXPRESSIONS)
	list = append(list, old...)
	return native.Rule{Handle: r.Handle, Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, list, 0)}
}

// broken has tables with a part that this kernel refuses, and the parts that are left out then.
var broken = []struct {
	name string
	do   func(t *native.Table)
	held []string
	// refill is a flush of that chain or set. After it, the same parts are left out.
	refill string
}{
	{"nothing", func(*native.Table) {}, nil, "flush chain inet fw input; flush set inet fw banned"},
	{"elements beyond a set's size", func(t *native.Table) {
		s := setOf(t, "banned")
		for i := range 15 { // 3 exist, 13 more fit
			s.Elements = append(s.Elements, keyed(s.Elements[0], 10, 9, 9, byte(i)))
		}
	}, []string{"set element banned", "set element banned"}, "flush set inet fw banned"},
	{"an interval that overlaps", func(t *native.Table) {
		s := setOf(t, "ranges")
		for _, e := range s.Elements {
			if flags, _ := nft.AttrOf(e, unix.NFTA_SET_ELEM_FLAGS); flags == nil { // the beginning of an interval
				s.Elements = append(s.Elements, keyed(e, 10, 3, 128, 0), keyed(s.Elements[len(s.Elements)-1], 10, 4, 0, 0))
				return
			}
		}
	}, []string{"set element ranges"}, ""},
	{"a rule that only counts", func(t *native.Table) { breakRule(t, "web", 0) }, []string{"rule web"}, "flush chain inet fw web"},
	{"a rule of another kernel's, of which nothing is known", func(t *native.Table) {
		c := chainOf(t, "input")
		c.Rules[7] = unknownRule(c.Rules[7])
	}, []string{"rule input"}, "flush chain inet fw input"},
	{"a rule that drops", func(t *native.Table) { breakRule(t, "input", 1) },
		[]string{"rule input", "rule input waits", "rule input waits", "rule input waits", "rule input waits"}, "flush chain inet fw input"},
	{"a rule that accepts", func(t *native.Table) { breakRule(t, "input", 3) }, []string{"rule input"}, "flush chain inet fw input"},
	{"a rule that accepts, elsewhere", func(t *native.Table) { breakRule(t, "web", 1) }, []string{"rule web"}, "flush chain inet fw web"},
	{"a rule that drops, elsewhere", func(t *native.Table) { breakRule(t, "other", 1) },
		[]string{"rule other", "rule input waits", "rule input waits", "rule forward waits"}, ""},
	{"a rule of a chain without a name", func(t *native.Table) {
		for i := range t.Chains {
			if t.Chains[i].Bound {
				t.Chains[i].Rules[0] = refusedRule(t.Chains[i].Rules[0])
			}
		}
	}, []string{"rule input", "rule input waits"}, "flush chain inet fw input"},
	{"a base chain", func(t *native.Table) { breakChain(t, "forward") }, []string{"chain forward", "rule forward", "rule forward"},
		"flush chain inet fw forward; delete chain inet fw forward"},
	{"an object", func(t *native.Table) { breakObject(t, "seen") }, []string{"stateful object seen", "rule input"}, ""},
	{"an object that nothing names", func(t *native.Table) { breakObject(t, "most") }, []string{"stateful object most"}, ""},
	{"a set", func(t *native.Table) { breakSet(t, "ranges") },
		[]string{"set ranges", "set element ranges", "set element ranges", "set element ranges", "set element ranges", "rule input"}, ""},
	{"a map", func(t *native.Table) { breakSet(t, "to") },
		[]string{"set to", "set element to", "set element to", "set element to", "rule input", "rule input waits", "rule input waits"}, ""},
	{"a flowtable", func(t *native.Table) {
		t.Flowtables = []native.Flowtable{{Name: "fast", Attrs: nft.AppendAttr(nil, unix.NFTA_TABLE_FLAGS, []byte{0, 0, 0, 1}, 0)}}
	}, []string{"flowtable fast"}, ""},
}

func setOf(t *native.Table, name string) *native.Set {
	t.Sets = slices.Clone(t.Sets)
	s := &t.Sets[slices.IndexFunc(t.Sets, func(s native.Set) bool { return s.Name == name })]
	s.Elements = slices.Clone(s.Elements)
	return s
}

// keyed returns a copy of an element with another key.
func keyed(e native.Element, key ...byte) native.Element {
	nested, _ := nft.AttrOf(e, unix.NFTA_SET_ELEM_KEY)
	old, _ := nft.AttrOf(nested, unix.NFTA_DATA_VALUE)
	return bytes.Replace(e, old, key, 1)
}

func chainOf(t *native.Table, name string) *native.Chain {
	c := &t.Chains[slices.IndexFunc(t.Chains, func(c native.Chain) bool { return c.Name == name })]
	c.Rules = slices.Clone(c.Rules)
	return c
}

func breakRule(t *native.Table, chain string, at int) {
	c := chainOf(t, chain)
	c.Rules[at] = refusedRule(c.Rules[at])
}

func breakChain(t *native.Table, name string) {
	c := chainOf(t, name)
	c.Attrs = append(slices.Clone(c.Attrs), nft.AppendAttr(nil, unix.NFTA_CHAIN_TYPE, "fromthefuture", 1)...)
}

func breakObject(t *native.Table, name string) {
	t.Objects = slices.Clone(t.Objects)
	for i := range t.Objects {
		if o := &t.Objects[i]; o.Name == name {
			o.Attrs = nft.AppendAttr(slices.Clone(o.Attrs), unix.NFTA_OBJ_DATA|unix.NLA_F_NESTED, nft.AppendAttr(nil, 1, "x", 0), 0)
		}
	}
}

func breakSet(t *native.Table, name string) {
	s := setOf(t, name)
	s.Attrs = nft.AppendAttr(slices.Clone(s.Attrs), unix.NFTA_SET_KEY_LEN, []byte{0, 0, 9, 9}, 0)
}

func heldText(list []native.Held) (text []string) {
	for _, h := range list {
		line := fmt.Sprintf("%s %s", h.Kind, h.Name)
		if h.Waits {
			line += " waits"
		}
		text = append(text, line)
	}
	return text
}

// TestOneRefusedPartCostsItself: the kernel refuses a part of a table. The replay must leave out
// this part, parts that name it, and parts that must not be in force without it. All others must be
// back, by each remedy, and be proved.
func TestOneRefusedPartCostsItself(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		for _, b := range broken {
			for _, remedy := range []native.Remedy{native.ByCreate, native.ByReplace, native.ByRefill} {
				if remedy == native.ByRefill && b.refill == "" {
					continue
				}
				t.Run(fmt.Sprintf("%s, by %d", b.name, remedy), func(t *testing.T) {
					was, id := stage(t, conn, firewall)
					want := *was
					want.Chains = slices.Clone(want.Chains)
					b.do(&want)
					switch remedy {
					case native.ByCreate:
						nstest.Command(t, "nft", "flush", "ruleset")
					case native.ByRefill:
						nstest.CommandInput(t, b.refill, "nft", "-f", "-")
					}
					now := capture(t, conn)
					repairs := []native.Repair{{Remedy: remedy, Want: &want, Now: now.Tables[id]}}
					if _, err := k.Write(now.Genid, repairs, map[tableid.Family]string{tableid.IPv6: "nonce"}); err != nil {
						t.Fatal(err)
					}
					r := repairs[0]
					if diff := cmp.Diff(b.held, heldText(r.Held())); diff != "" {
						t.Errorf("left out (-want +got):\n%s", diff)
					}
					is := capture(t, conn)
					if !r.Repaired(is.Tables[id], false) {
						t.Errorf("not proved: %v", native.Diff(r.Written(), is.Tables[id]))
					}
					if is.Genid != nft.Following(now.Genid) {
						t.Errorf("%d commits", is.Genid-now.Genid)
					}
				})
			}
		}
	})
}

// TestWhatIsHeldComesBack: each part of a table is left out once. Later it must be put back into
// its place in the present table.
func TestWhatIsHeldComesBack(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		was, id := stage(t, conn, firewall)
		var spots []native.Spot
		for i, c := range was.Chains {
			spots = append(spots, native.Spot{Kind: nft.Chains, At: i})
			for j := range c.Rules {
				spots = append(spots, native.Spot{Kind: nft.Rules, At: i, In: j})
			}
		}
		for i, s := range was.Sets {
			spots = append(spots, native.Spot{Kind: nft.Sets, At: i})
			for j := range s.Elements {
				spots = append(spots, native.Spot{Kind: nft.Elements, At: i, In: j})
			}
		}
		for i := range was.Objects {
			spots = append(spots, native.Spot{Kind: nft.Objects, At: i})
		}
		for _, spot := range spots {
			t.Run(fmt.Sprintf("%s %d %d", spot.Kind, spot.At, spot.In), func(t *testing.T) {
				nstest.Command(t, "nft", "flush", "ruleset")
				now := capture(t, conn)
				repairs := []native.Repair{{Remedy: native.ByCreate, Want: was}}
				if !repairs[0].Leave(spot, "a test") {
					t.Fatal("it cannot be left out")
				}
				if _, err := k.Write(now.Genid, repairs, nil); err != nil {
					t.Fatal(err)
				}
				// Its owner writes meanwhile.
				nstest.Command(t, "nft", "add", "chain", "inet", "fw", "more")
				nstest.Command(t, "nft", "add", "rule", "inet", "fw", "more", "tcp", "dport", "{ 7, 8 }", "drop")
				now = capture(t, conn)
				held := repairs[0].Held()
				if len(held) == 0 || len(native.Diff(was, now.Tables[id])) < 2 {
					t.Fatalf("held %v, %v", heldText(held), native.Diff(was, now.Tables[id]))
				}
				back, still := native.Admission(now.Tables[id], held)
				if diff := cmp.Diff(heldText(held), heldText(still)); diff != "" {
					t.Errorf("still held (-want +got):\n%s", diff)
				}
				again := []native.Repair{back}
				if _, err := k.Write(now.Genid, again, nil); err != nil {
					t.Fatal(err)
				}
				is := capture(t, conn)
				if !again[0].Whole() || !again[0].Repaired(is.Tables[id], false) {
					t.Errorf("not proved: %v", native.Diff(back.Want, is.Tables[id]))
				}
				if got := native.Diff(was, is.Tables[id]); len(got) != 1 || got[0].Name != "more" {
					t.Errorf("afterwards it differs by %v", got)
				}
				if _, still := native.Admission(is.Tables[id], held); len(still) > 0 {
					t.Errorf("held although it stands: %v", heldText(still))
				}
			})
		}
	})
}

// TestWhatStaysRefusedCommitsNothing: the kernel still refuses quarantined parts. They must stay in
// quarantine, and no process may hear of the try.
func TestWhatStaysRefusedCommitsNothing(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		for _, b := range broken {
			was, id := stage(t, conn, firewall)
			want := *was
			want.Chains = slices.Clone(want.Chains)
			b.do(&want)
			nstest.Command(t, "nft", "flush", "ruleset")
			now := capture(t, conn)
			repairs := []native.Repair{{Remedy: native.ByCreate, Want: &want}}
			if _, err := k.Write(now.Genid, repairs, nil); err != nil {
				t.Fatal(err)
			}
			now = capture(t, conn)
			held := repairs[0].Held()
			again, still := native.Admission(now.Tables[id], held)
			tries := []native.Repair{again}
			if _, err := k.Write(now.Genid, tries, nil); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(b.held, heldText(tries[0].Held())); diff != "" || len(still) != len(held) {
				t.Errorf("%s: left out once more (-want +got):\n%s", b.name, diff)
			}
			if genid, err := conn.Genid(); err != nil || genid != now.Genid {
				t.Errorf("%s: the genid moved, %v", b.name, err)
			}
		}
	})
}

// TestARefusedSetThatManyRulesName: the kernel complains of more messages than a socket's queue can
// take. The first complaints must be enough.
func TestARefusedSetThatManyRulesName(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		const many = 2000
		was, id := stage(t, conn, "table ip many {\nset s { type ipv4_addr; }\nchain c {\ncounter\n"+strings.Repeat("ip saddr @s counter\n", many)+"}\n}\n")
		breakSet(was, "s")
		nstest.Command(t, "nft", "flush", "ruleset")
		now := capture(t, conn)
		repairs := []native.Repair{{Remedy: native.ByCreate, Want: was}}
		if _, err := k.Write(now.Genid, repairs, nil); err != nil {
			t.Fatal(err)
		}
		is := capture(t, conn).Tables[id]
		if n := len(repairs[0].Held()); n != many+1 || is == nil || len(is.Chain("c").Rules) != 1 {
			t.Errorf("%d parts are held, want the set and %d rules", n, many)
		}
	})
}

// TestATableThatIsRefusedIsNotTornApart: the kernel refuses a table whose name exists already.
// Nothing must be written into the existing table, and no part may be quarantined.
func TestATableThatIsRefusedIsNotTornApart(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		was, id := stage(t, conn, firewall)
		nstest.Command(t, "nft", "flush", "set", "inet", "fw", "banned")
		now := capture(t, conn)
		repairs := []native.Repair{{Remedy: native.ByCreate, Want: was}}
		_, err := k.Write(now.Genid, repairs, nil)
		var refused *nft.RefusedError
		if !errors.As(err, &refused) || !errors.Is(err, unix.EEXIST) || !repairs[0].Whole() {
			t.Errorf("%v, held %v", err, heldText(repairs[0].Held()))
		}
		if got := native.Diff(now.Tables[id], capture(t, conn).Tables[id]); len(got) > 0 {
			t.Errorf("it changed: %v", got)
		}
	})
}

// TestHandlesSurviveARefusedRule: a rule of an owner that remembers handles is left out. All other
// rules must keep their handles.
func TestHandlesSurviveARefusedRule(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn, k := dial(t), openKernel(t)
		was, id := stage(t, conn, strings.Replace(firewall, "table inet fw", "table ip libvirt_network", 1))
		breakRule(was, "input", 7)
		nstest.Command(t, "nft", "flush", "ruleset")
		now := capture(t, conn)
		repairs := []native.Repair{{Remedy: native.ByCreate, Want: was}}
		if _, err := k.Write(now.Genid, repairs, nil); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"rule input"}, heldText(repairs[0].Held())); diff != "" {
			t.Errorf("left out (-want +got):\n%s", diff)
		}
		handles := func(table *native.Table) (all []uint64) {
			for _, c := range table.Chains {
				for _, r := range c.Rules {
					all = append(all, r.Handle)
				}
			}
			return all
		}
		if diff := cmp.Diff(handles(repairs[0].Written()), handles(capture(t, conn).Tables[id])); diff != "" {
			t.Errorf("handles (-want +got):\n%s", diff)
		}
	})
}

// TestARehearsalNamesWhatIsRefused: a rehearsal must name each refused part, as a whole and in
// pieces.
func TestARehearsalNamesWhatIsRefused(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		for _, b := range broken {
			was, _ := stage(t, conn, firewall)
			b.do(was)
			for _, most := range []int{1000, 3} {
				var text []string
				for from, next := 0, -1; next != 0; from = next {
					var piece *native.Table
					piece, next = was.Piece(from, most)
					err := piece.Rehearse()
					var refused *native.UnreplayableError
					if errors.As(err, &refused) {
						for _, h := range refused.Parts {
							if line := heldText([]native.Held{h})[0]; !h.Waits && !(most == 3 && slices.Contains(text, line)) {
								text = append(text, line)
							}
						}
					} else if err != nil {
						t.Fatal(err)
					}
				}
				want := slices.DeleteFunc(slices.Clone(b.held), func(s string) bool { return strings.HasSuffix(s, " waits") })
				if most == 3 { // in any order, and each once
					slices.Sort(want)
					want = slices.Compact(want)
					slices.Sort(text)
				}
				if most == 3 && len(want) == 1 && strings.HasPrefix(want[0], "set element") {
					continue // only a whole set is too large or overlaps, not its pieces
				}
				if diff := cmp.Diff(want, text, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("%s in pieces of %d (-want +got):\n%s", b.name, most, diff)
				}
			}
		}
	})
}
