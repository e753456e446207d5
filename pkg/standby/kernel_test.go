package standby_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// sections returns the chains and sets of nft's list of a table, sorted. A table that was followed
// lists them in the order in which they were made.
func sections(text string) []string {
	all := strings.Split(text, "\n\n")
	for i := range all {
		all[i] = strings.Trim(all[i], "}\n")
	}
	slices.Sort(all)
	return all
}

// TestWhatIsFollowedIsWhatIsBuilt: a table that has followed changes must equal a table that is
// built from the last rules. It is shut or open, with a gate or without, in one transaction or in
// many.
func TestWhatIsFollowedIsWhatIsBuilt(t *testing.T) {
	for _, cfg := range []standby.Config{{}, {GateMost: -1}, {Piece: 2048}} {
		t.Run(fmt.Sprintf("gate most %d, piece %d", cfg.GateMost, cfg.Piece), func(t *testing.T) {
			t.Parallel()
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft")
				conn := dial(t)
				followed := open(t, cfg)
				for n := range testkit.Size(uint64(11), 30) {
					d := &deck{Rand: rand.New(rand.NewPCG(7, n)), family: tableid.IPv4, odd: n%4 == 0}
					restore(t, nat.Family, d.nat())
					src := source(t, conn, nat)
					c, err := standby.Translate(src, followed.Held(nat))
					if errors.Is(err, standby.ErrUnavailable) {
						continue
					}
					must(t, err)
					opens := n%3 == 0
					if n%2 == 0 && followed.Held(nat) != nil {
						must(t, followed.Open(nat, nil, c))
					} else {
						must(t, followed.Put(c))
					}
					if n := c.Outstanding(followed.Held(nat)); n != 0 {
						t.Fatalf("%d chains are outstanding after they were written", n)
					}
					if opens {
						must(t, followed.Open(nat, c.Hooks(), nil))
					}
					got := listed(t, nat)
					was := followed.Status(nat)
					must(t, followed.Remove(nat))
					must(t, followed.Put(translate(t, src, nil)))
					if len(was.Open) > 0 {
						must(t, followed.Open(nat, was.Open, nil))
					}
					if diff := cmp.Diff(sections(listed(t, nat)), sections(got)); diff != "" {
						t.Fatalf("table %d, open %v (-built +followed):\n%s", n, was.Open, diff)
					}
					if n%5 == 0 {
						must(t, followed.Shut(nat))
					}
				}
			})
		})
	}
}

// bigNat returns nat with a large KUBE-SERVICES, in an order that the seed chooses.
func bigNat(seed uint64, without int) string {
	r := rand.New(rand.NewPCG(3, seed))
	var b strings.Builder
	b.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-SVC - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n")
	for _, i := range r.Perm(300) {
		if i != without {
			fmt.Fprintf(&b, "-A KUBE-SERVICES -d 10.96.%d.%d/32 -p tcp -m tcp --dport 80 -j KUBE-SVC\n", i/200, i%200)
		}
	}
	b.WriteString("-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n-A KUBE-SVC -p tcp -j DNAT --to-destination 10.0.0.1:80\nCOMMIT\n")
	return b.String()
}

// TestALargeChainIsChangedByRules: kube-proxy writes the services in another order with each sync.
// The copy must write nothing for that, and a single rule for a new or removed service.
func TestALargeChainIsChangedByRules(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "iptables-nft")
		conn := dial(t)
		s := open(t, standby.Config{})
		const oneRule = 700 // bytes: the names of table and chain, and the rule
		for i, step := range []struct {
			without     int
			outstanding bool
		}{{-1, true}, {-1, false}, {17, true}, {17, false}, {250, true}, {-1, true}} {
			restore(t, nat.Family, bigNat(uint64(i), step.without))
			c := translate(t, source(t, conn, nat), s.Held(nat))
			if n := c.Outstanding(s.Held(nat)); (n > 0) != step.outstanding {
				t.Errorf("step %d: %d chains are outstanding", i, n)
			}
			must(t, s.Put(c))
			if bytes := s.Status(nat).Bytes; i > 0 && bytes > oneRule {
				t.Errorf("step %d: %d bytes were written", i, bytes)
			}
			got := listed(t, nat)
			fresh := open(t, standby.Config{})
			must(t, s.Remove(nat))
			must(t, fresh.Put(translate(t, source(t, conn, nat), nil)))
			if diff := cmp.Diff(sections(listed(t, nat)), sections(got)); diff != "" {
				t.Errorf("step %d (-built +followed):\n%s", i, diff)
			}
			must(t, fresh.Close())
			gone(t, conn)
			must(t, s.Put(translate(t, source(t, conn, nat), nil)))
		}
	})
}

// gone waits until the kernel has removed IPv4's table of a closed socket.
func gone(t *testing.T, conn *nft.Conn) {
	t.Helper()
	goneOf(t, conn, nat)
}

// goneOf is gone for the copy of another table.
func goneOf(t *testing.T, conn *nft.Conn, id tableid.TableID) {
	t.Helper()
	testkit.Until(t, "the kernel to remove the copy of "+id.NFT(), func() error {
		there, err := conn.HasTable(id.Family, standby.NameOf(id))
		if err == nil && there {
			err = errors.New("it is there")
		}
		return err
	})
}

// TestTheCopyOfKubeProxysRules: nft's list of the copy must be that of a golden file.
func TestTheCopyOfKubeProxysRules(t *testing.T) {
	for _, name := range []string{"v4-affinity", "v6-small"} {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft")
				id := tableid.IPv4.Table("nat")
				if strings.HasPrefix(name, "v6") {
					id = tableid.IPv6.Table("nat")
				}
				text, err := os.ReadFile("../../internal/testkit/scenario/testdata/kube-proxy/" + name + "/expected.rules")
				must(t, err)
				restore(t, id.Family, string(text))
				s := open(t, standby.Config{})
				c := translate(t, source(t, dial(t), id), nil)
				must(t, s.Put(c))
				must(t, s.Open(id, []standby.Hook{standby.Postrouting}, nil))
				text = []byte(listed(t, id))
				golden.Compare(t, name+".golden", text)
				if left := c.LeftOut(); len(left) > 0 {
					t.Errorf("left out: %v", left)
				}
			})
		})
	}
}

// TestANameThatIsTaken: another table has the standby's name. It must stay as it is, and the error
// must say so.
func TestANameThatIsTaken(t *testing.T) {
	for _, owned := range []bool{false, true} {
		t.Run(fmt.Sprintf("owned %t", owned), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft")
				restore(t, nat.Family, simple)
				conn := dial(t)
				c := translate(t, source(t, conn, nat), nil)
				if owned {
					must(t, open(t, standby.Config{}).Put(c))
				} else {
					nstest.Command(t, "nft", "add", "table", "ip", standby.TableName)
				}
				before := listed(t, nat)
				s := open(t, standby.Config{})
				if err := s.Put(c); !errors.Is(err, standby.ErrTaken) {
					t.Errorf("got %v, want that the name is taken", err)
				}
				if s.Held(nat) != nil || s.Status(nat).Built {
					t.Error("something counts as built")
				}
				if err := s.Open(nat, c.Hooks(), nil); !errors.Is(err, standby.ErrNotBuilt) {
					t.Errorf("opening what is not built: %v", err)
				}
				if diff := cmp.Diff(before, listed(t, nat)); diff != "" {
					t.Errorf("the other table changed (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// TestOtherProcessesCannotTouchIt: other processes flush and change all tables. The open standby
// must stay as it is.
func TestOtherProcessesCannotTouchIt(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "iptables-nft", "iptables-nft-save")
		restore(t, nat.Family, simple)
		s := open(t, standby.Config{})
		c := translate(t, source(t, dial(t), nat), nil)
		must(t, s.Put(c))
		must(t, s.Open(nat, c.Hooks(), nil))
		before := listed(t, nat)
		for _, words := range []string{"nft delete table ip canaryd-standby", "nft flush table ip canaryd-standby", "nft add chain ip canaryd-standby x"} {
			command := strings.Fields(words)
			if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err == nil {
				t.Errorf("%s worked: %s", words, out)
			}
		}
		for _, words := range []string{"iptables-nft -t nat -F", "iptables-nft -t nat -X", "iptables-nft-save", "iptables-nft -t nat -S", "nft flush ruleset"} {
			command := strings.Fields(words)
			if out := nstest.Command(t, command[0], command[1:]...); strings.Contains(out, "canaryd") || strings.Contains(out, "Warning") {
				t.Errorf("%s prints %s", words, out)
			}
		}
		if diff := cmp.Diff(before, listed(t, nat)); diff != "" {
			t.Errorf("the table changed (-before +after):\n%s", diff)
		}
	})
}

const simple = `*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SVC-A - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-SVC-A
-A KUBE-SVC-A ! -s 10.244.0.0/16 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -p udp -m udp -j DNAT --to-destination 10.244.1.2:53
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`
