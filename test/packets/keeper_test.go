package packets

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A takedown is a way to remove rules. ends names the backends on which it ends
// established connections without a keeper.
type takedown struct {
	name string
	do   func(l *lab)
	ends []iptables.Backend
}

func (l *lab) flushEvery(too ...func(rules.Family, rules.TableName)) {
	l.Helper()
	for _, f := range rules.Families() {
		for _, t := range []rules.TableName{rules.Raw, rules.Mangle, rules.Nat, rules.Filter} {
			l.Must(l.Programs.Flush(l.Context(), f, t, ""))
			for _, do := range too {
				do(f, t)
			}
		}
	}
}

func takedowns() []takedown {
	nft, both := []iptables.Backend{iptables.NFT}, []iptables.Backend{iptables.NFT, iptables.Legacy}
	return []takedown{
		{"iptables -t nat -F", func(l *lab) { l.flushNat() }, nil},
		{"iptables -F of every table", func(l *lab) { l.flushEvery() }, both},
		{"iptables -F and -X of every table", func(l *lab) {
			l.flushEvery(func(f rules.Family, t rules.TableName) { l.Must(l.Programs.DeleteChains(l.Context(), f, t)) })
		}, both},
		{"iptables-restore of empty tables", func(l *lab) {
			l.Must(l.Programs.Restore(l.Context(), rules.IPv4, "*mangle\nCOMMIT\n*filter\nCOMMIT\n*nat\nCOMMIT\n"))
		}, both},
		{"nft flush ruleset", func(l *lab) { nstest.Command(l.T, "nft", "flush", "ruleset") }, nft},
		{"nft delete table ip nat", func(l *lab) {
			if l.Programs.With == iptables.NFT {
				l.Must(l.Programs.DeleteTable(l.Context(), rules.IPv4, rules.Nat))
			}
		}, nft},
	}
}

const (
	// outage is how long rules are missing: many pings.
	outage = 300 * time.Millisecond
	// afterwards is how long connections are tested after the rules are back.
	afterwards = 500 * time.Millisecond
	each       = 5 // connections of each kind
)

// story runs one of several stories on the same node, with connections of its
// own.
func (l *lab) story(name string, body func(l *lab)) {
	l.Run(name, func(t *testing.T) {
		body(&lab{&nodetest.Node{T: t, Programs: l.Programs, Families: l.Families, Protects: l.Protects}, l.Cluster})
	})
}

// TestWhatAFlushEnds removes rules for 0.3 s, with a Keeper alone and without
// one. With a Keeper no established connection ends, on either backend. Without
// one the test shows which flushes end them: the removal of the last nat base
// chain or of the last rule that uses conntrack.
func TestWhatAFlushEnds(t *testing.T) {
	for name, kept := range map[string]bool{"without a keeper": false, "with a keeper": true} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(l *lab) {
				var k iptables.Keeper
				defer k.Close()
				if kept {
					l.Must(k.Keep(rules.IPv4))
					l.Must(k.Keep(rules.IPv6))
				}
				for _, d := range takedowns() {
					l.story(d.name, func(l *lab) {
						l.Must(scenario.Wipe(l.Context(), l.Programs, rules.IPv4)) // all of it, as on a new node
						l.putBack()
						p := l.establish(each)
						d.do(l)
						testkit.Pass(l, outage, "how long the rules are missing")
						l.putBack()
						testkit.Pass(l, afterwards, "that connections ping on")
						p.finish()
						l.Logf("%s, %s: %s", d.name, name, p.summary())
						l.wantEnds(p, !kept && slices.Contains(d.ends, l.Programs.With))
					})
				}
			})
		})
	}
}

// wantEnds fails unless TCP connections ended and a UDP client is still answered, or unless every
// connection lives.
//
// A connection ends by a reset, or is left without an answer: if the pod has acknowledged a
// question and answers after the flush, the answer leaves untranslated, and the client sends
// nothing that could be reset. With pods that answer 150 ms late, nearly all end so (Linux 6.18).
func (l *lab) wantEnds(p *pingers, want bool) {
	l.Helper()
	ended, answered := 0, 0
	for _, one := range p.all {
		switch tcp := strings.HasPrefix(one.kind, "tcp"); {
		case tcp && (one.end == reset || one.end == dead):
			ended++
		case !tcp && one.end == "":
			answered++
		}
	}
	ends, _ := p.ended()
	switch {
	case want && ended == 0:
		l.Errorf("no TCP connection ended, so that a keeper would show nothing: %s", p.summary())
	case want && answered == 0:
		l.Errorf("no UDP client was answered, so that the silence shows nothing: %s", p.summary())
	case !want && len(ends) > 0:
		l.Errorf("established connections ended: %s", p.summary())
	}
}

// TestEstablishedConnectionsLive: canaryd heals, and no connection of any kind
// may end, however late the heal is. With --keeper=off the same flush ends
// connections.
func TestEstablishedConnectionsLive(t *testing.T) {
	for _, keeper := range []string{"auto", "off"} {
		t.Run("keeper "+keeper, func(t *testing.T) {
			inCluster(t, func(l *lab) {
				canaryd := l.Start("--keeper=" + keeper)
				if keeper == "auto" {
					l.wantKept(true)
				}
				for _, d := range takedowns() {
					if !slices.Contains(d.ends, l.Programs.With) {
						continue
					}
					l.story(d.name, func(l *lab) {
						records := len(l.Status().Flushes)
						p := l.establish(each)
						canaryd.Suspend()
						d.do(l)
						testkit.Pass(l, outage, "how long the rules are missing")
						canaryd.Signal(syscall.SIGCONT)
						record := l.Healed(records + 1)
						testkit.Pass(l, afterwards, "that connections ping on")
						p.finish()
						l.Logf("%s, keeper %s: %s", d.name, keeper, p.summary())
						l.wantEnds(p, keeper == "off")
						if strings.Contains(record.Culprit.Comm, "canaryd") || l.Programs.With == iptables.NFT && record.Culprit.PID == 0 {
							l.Errorf("the record blames %+v", record.Culprit)
						}
						l.wantKept(keeper == "auto")
					})
				}
			})
		})
	}
}

// TestConnectionsThroughManyFlushes: canaryd runs without interruption, and a
// flush follows each repair at once. A takedown of several commands makes several
// records, the last of them late. So the rules themselves show when the next
// takedown can remove them.
func TestConnectionsThroughManyFlushes(t *testing.T) {
	inCluster(t, func(l *lab) {
		l.Start()
		l.wantKept(true)
		p := l.establish(each)
		whole, n := l.Protected(), 0
		for range 3 {
			for _, d := range takedowns() {
				takes := d.ends == nil || slices.Contains(d.ends, l.Programs.With)
				if !takes || strings.Contains(d.name, "-X") { // the heal could fall in between
					continue
				}
				records := len(l.Published().Flushes)
				d.do(l)
				n++
				l.Until("another repaired flush", func() error { return l.repaired(records+1, whole) })
			}
		}
		p.finish()
		l.Logf("%d flushes: %s", n, p.summary())
		l.wantEnds(p, false)
	})
}

// repaired returns nil if at least that many flushes have records, and the
// protected rules are back.
func (l *lab) repaired(records int, whole []string) error {
	if got := len(l.Published().Flushes); got < records {
		return fmt.Errorf("%d flush records, want %d", got, records)
	}
	if err := nodetest.Ready(); err != nil {
		return err
	}
	if diff := cmp.Diff(whole, l.Protected()); diff != "" {
		return fmt.Errorf("protected rules (-want +got):\n%s", diff)
	}
	return nil
}

// wantKept waits until the keeper of IPv4 is there, or fails if it is there and should not.
func (l *lab) wantKept(want bool) {
	l.Helper()
	is := func() bool {
		return strings.Contains(nstest.Command(l.T, "nft", "list", "tables", "ip"), "table ip "+iptables.KeeperTable+"\n")
	}
	if !want {
		if is() {
			l.Error("there is a keeper")
		}
		return
	}
	l.Until("the keeper", func() error {
		if !is() {
			return errors.New("there is none")
		}
		return nil
	})
}
