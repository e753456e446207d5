package standby_test

import (
	"errors"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// natWithOutput returns nat with a service in PREROUTING and OUTPUT, at an address of the family.
func natWithOutput(address string) string {
	return "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n" +
		"-A KUBE-SERVICES -d " + address + " -p udp -m udp --dport 80 -j DNAT --to-destination :8080\nCOMMIT\n"
}

// inetNAT is the same as a native table of both families.
const inetNAT = `table inet proxy {
	chain in { type nat hook prerouting priority dstnat; udp dport 80 redirect to :8080; }
	chain out { type nat hook output priority -100; udp dport 80 redirect to :8080; }
}
`

// TestOpenedByAKnock: hooks must open without a transaction, because that would wait for other
// processes' transactions. They must also shut again. If the node's own packets do not reach nat, a
// transaction must open the hooks.
func TestOpenedByAKnock(t *testing.T) {
	const deaf = `table inet deaf { chain c { type filter hook output priority -300; meta l4proto udp notrack; }; }`
	tables := map[string]struct {
		id  tableid.TableID
		set func(t *testing.T)
	}{
		"IPv4": {nat, func(t *testing.T) { restore(t, tableid.IPv4, natWithOutput("192.0.2.9")) }},
		"IPv6": {tableid.IPv6.Table("nat"), func(t *testing.T) { restore(t, tableid.IPv6, natWithOutput("2001:db8::9")) }},
		"inet": {tableid.Inet.Table("proxy"), func(t *testing.T) { nstest.CommandInput(t, inetNAT, "nft", "-f", "-") }},
	}
	for name, table := range tables {
		for _, step := range []struct {
			name, rules string
			commits     uint64 // of the opening
		}{
			{"heard", "", 0},
			{"untracked", deaf, 1},
			{"dropped", strings.Replace(deaf, "notrack", "drop", 1), 1},
			{"dropped behind nat", strings.NewReplacer("notrack", "drop", "-300", "0").Replace(deaf), 0},
		} {
			t.Run(name+", "+step.name, func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, "nft", "iptables-nft-restore", "ip6tables-nft-restore")
					table.set(t)
					nstest.CommandInput(t, step.rules, "nft", "-f", "-")
					conn, s := dial(t), open(t, standby.Config{})
					c := copyOf(t, table.id)
					must(t, s.Put(c))
					before := s.Commits()
					must(t, s.Open(table.id, []standby.Hook{standby.Output}, nil))
					if got := s.Commits() - before; got != step.commits {
						t.Errorf("%d transactions opened it, want %d", got, step.commits)
					}
					want := map[standby.Hook]bool{standby.Prerouting: false, standby.Output: true}
					if diff := cmp.Diff(want, elements(t, s, table.id)); diff != "" {
						t.Errorf("elements of the gates (-want +got):\n%s", diff)
					}
					must(t, s.Open(table.id, c.Hooks(), nil))
					want[standby.Prerouting] = true
					if diff := cmp.Diff(want, elements(t, s, table.id)); diff != "" {
						t.Errorf("elements of the gates, opened further (-want +got):\n%s", diff)
					}
					if diff := cmp.Diff(c.Hooks(), s.OpenHooks(table.id)); diff != "" {
						t.Errorf("open hooks (-want +got):\n%s", diff)
					}
					must(t, s.Shut(table.id))
					if diff := cmp.Diff(map[standby.Hook]bool{standby.Prerouting: false, standby.Output: false}, elements(t, s, table.id)); diff != "" {
						t.Errorf("elements of gates that were shut (-want +got):\n%s", diff)
					}
					must(t, s.Close())
					goneOf(t, conn, table.id)
				})
			})
		}
	}
}

// copyOf makes the copy of a table, native or of iptables.
func copyOf(t *testing.T, id tableid.TableID) *standby.Copy {
	t.Helper()
	if id.Name == "nat" {
		return translate(t, source(t, dial(t), id), nil)
	}
	captured, err := native.Capture(dial(t), func(of nft.Table) bool { return of.Name == id.Name })
	must(t, err)
	c, err := standby.TranslateNative(captured.Tables[id], nil)
	must(t, err)
	return c
}

// elements reports for each hook of the table whether its gate's set has the elements for all of
// the table's packets. It fails if the set has only some of them.
func elements(t *testing.T, s *standby.Standby, id tableid.TableID) map[standby.Hook]bool {
	t.Helper()
	conn, all := dial(t), map[standby.Hook]bool{}
	families := []tableid.Family{id.Family}
	if id.Family == tableid.Inet {
		families = []tableid.Family{tableid.IPv4, tableid.IPv6}
	}
	for _, h := range s.Held(id).Hooks() {
		var stand []bool
		for _, f := range families {
			is, err := conn.HasElement(id.Family, standby.NameOf(id), "open-"+h.String(), []byte{uint8(f)})
			must(t, err)
			stand = append(stand, is)
		}
		if stand = slices.Compact(stand); len(stand) != 1 {
			t.Errorf("hook %s is open for one family of two", h)
		}
		all[h] = stand[0]
	}
	return all
}

// TestKnocks: no flow may get another destination before it can get a source, or after that has
// ended.
func TestKnocks(t *testing.T) {
	pre, in, out, post := standby.Prerouting, standby.Input, standby.Output, standby.Postrouting
	for _, c := range []struct {
		name        string
		hooks, open []standby.Hook
		want        []standby.Hook
	}{
		{"all", []standby.Hook{pre, in, out, post}, nil, []standby.Hook{post, in, pre, out, post, in}},
		{"sources only", []standby.Hook{in, post}, nil, []standby.Hook{post, in}},
		{"sources only, next to destinations", []standby.Hook{post}, []standby.Hook{pre, out}, []standby.Hook{post}},
		{"destinations only", []standby.Hook{pre, out}, nil, []standby.Hook{pre, out}},
		{"one more destination", []standby.Hook{out}, []standby.Hook{pre, post}, []standby.Hook{out, post}},
		{"none", nil, []standby.Hook{post}, nil},
	} {
		if diff := cmp.Diff(c.want, standby.Knocks(c.hooks, c.open)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
}

// TestAForgedKnock: a datagram must open nothing, unless it begins with the secret and a process of
// the same user sends it.
func TestAForgedKnock(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft-restore")
		restore(t, tableid.IPv4, natWithOutput("192.0.2.9"))
		s := open(t, standby.Config{})
		must(t, s.Put(copyOf(t, nat)))
		knock := standby.KnockOf(standby.Output)
		forged := slices.Clone(knock)
		forged[3] ^= 1
		for _, datagram := range []struct {
			name    string
			content []byte
			user    int
			opens   bool
		}{
			{"of zeros", make([]byte, len(knock)), 0, false},
			{"another secret", forged, 0, false},
			{"of a hook that is none", append(slices.Clone(knock[:len(knock)-1]), 77), 0, false},
			{"cut off", knock[:len(knock)-1], 0, false},
			{"the knock, by another user", knock, 65534, false},
			{"the knock", knock, 0, true},
		} {
			must(t, sendAs(datagram.user, datagram.content))
			if got := elements(t, s, nat)[standby.Output]; got != datagram.opens {
				t.Errorf("a datagram %s: open %t, want %t", datagram.name, got, datagram.opens)
			}
		}
	})
}

// sendAs sends a datagram over loopback from a thread of that user.
func sendAs(user int, datagram []byte) error {
	sent := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the function
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(user), uintptr(user), uintptr(user)); errno != 0 {
			sent <- errno
			return
		}
		conn, err := net.Dial("udp4", "127.0.0.1:9")
		if err == nil {
			_, err = conn.Write(datagram)
			err = errors.Join(err, conn.Close())
		}
		sent <- err
	}()
	return <-sent
}

// TestAKnockThatIsNotSeen: no rule sees a knock, and no transaction opens the hook either. No hook
// may stay open, and the error must name both failures.
func TestAKnockThatIsNotSeen(t *testing.T) {
	for name, story := range map[string]struct {
		rules string
		opens bool
	}{
		"seen":     {"", true},
		"not seen": {"table ip deaf { chain c { type filter hook output priority -300; notrack; }; }", false},
	} {
		t.Run(name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-nft-restore")
				restore(t, tableid.IPv4, natWithOutput("192.0.2.9"))
				nstest.CommandInput(t, story.rules, "nft", "-f", "-")
				s := open(t, standby.Config{})
				c := copyOf(t, nat)
				must(t, s.Put(c))
				s.Deaf(t, func() {
					err := s.Open(nat, c.Hooks(), nil)
					if (err == nil) != story.opens {
						t.Errorf("it says %v", err)
					}
					if err != nil && !strings.Contains(err.Error(), "knocking at prerouting for ipv4: no rule saw it") {
						t.Errorf("it does not say what became of the knock: %v", err)
					}
				})
				if got := s.Status(nat); got.Built != story.opens || (len(got.Open) > 0) != story.opens {
					t.Errorf("the table then: %+v", got)
				}
				if err := s.Put(c); errors.Is(err, net.ErrClosed) == story.opens {
					t.Errorf("the socket that could shut nothing goes on: %v", err)
				}
			})
		})
	}
}
