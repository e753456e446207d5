package owners

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// neverMatches are matches that accept nothing. On at least one backend iptables
// 1.8.9 prints a rule with such a match like a rule that accepts.
var neverMatches = []string{
	"! -i +", "! -o +",
	"-p tcp -m tcp ! --sport :", "-p tcp -m tcp ! --dport 0:65535",
	"-p esp -m esp ! --espspi :", "-p ah -m ah ! --ahspi :", "-p ipcomp -m ipcomp ! --ipcompspi :",
	"! -f -p tcp -m tcp ! --dport :",
}

// TestARuleThatAcceptsNothingComesBackAsOne: a rule that accepts nothing precedes
// a rule that drops. iptables may print any text for it. Neither the replay nor a
// later flush may make an accepting rule of it.
func TestARuleThatAcceptsNothingComesBackAsOne(t *testing.T) {
	for _, flags := range [][]string{{}, {"--replay=text"}} {
		t.Run(fmt.Sprint(flags), func(t *testing.T) {
			nodetest.OnBoth(t, func(n *nodetest.Node) {
				listener, err := net.Listen("tcp4", "127.0.0.1:0")
				n.Must(err)
				n.Cleanup(func() { n.Must(listener.Close()) })
				address := listener.Addr().(*net.TCPAddr)
				open := func() bool {
					conn, err := net.DialTimeout("tcp4", address.String(), 300*time.Millisecond)
					if err != nil {
						return false
					}
					return conn.Close() == nil
				}
				drop := fmt.Sprintf("-A P2 -p tcp -m tcp --dport %d -j DROP", address.Port)
				restore := func(text string) error {
					return n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*filter\n"+text+"COMMIT\n")
				}
				n.Must(restore(":P1 - [0:0]\n:P2 - [0:0]\n-A INPUT -j P1\n-A INPUT -j P2\n" + drop + "\n"))
				daemon := n.Start(append(flags, "--protect=P[12]")...)
				flushes := 0
				for _, match := range neverMatches {
					before := n.Status().Generation.ID
					if err := restore(":P1 - [0:0]\n-A P1 " + match + " -j ACCEPT\n"); err != nil {
						n.Logf("%q is not taken here: %v", match, err)
						continue
					}
					if open() { // for some of them iptables-nft writes no condition
						n.Logf("%q accepts here", match)
						continue
					}
					n.Until(match+" to be learned", func() error {
						if s := n.Status(); s.Generation.ID == before || !s.LearningPendingSince.IsZero() {
							return fmt.Errorf("the generation is %s", s.Generation.ID)
						}
						return nil
					})
					for range 2 {
						n.Must(n.Programs.Flush(n.Context(), rules.IPv4, rules.Filter, ""))
						flushes++
						n.Until("the end of the replay", func() error {
							s := n.Status()
							if n := s.Count(); n < flushes || s.Flushes[0].Replaying() {
								return fmt.Errorf("%d flushes", n)
							}
							return nil
						})
						saved, err := n.Programs.Save(n.Context(), rules.IPv4)
						if err != nil || !strings.Contains(saved, drop) {
							n.Errorf("%q: P2 is not back: %v\n%s", match, err, saved)
						}
						if outcome := n.Status().Flushes[0].Outcome; len(flags) == 0 && (outcome != "proved" || strings.Count(saved, "-A P1 ") != 1) {
							n.Errorf("%q: it does not come back by its bytes: the replay is %s\n%s", match, outcome, saved)
						}
						if open() {
							saved, _ := n.Programs.Save(n.Context(), rules.IPv4)
							n.Errorf("%q: the replay opened the port\n%s", match, saved)
						}
					}
				}
				if flushes < 6 {
					n.Errorf("only %d flushes", flushes)
				}
				daemon.Stop()
			})
		})
	}
}
