package packets

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestFlowsFromBeforeTheStandby: clients first call a service after a flush and
// before the standby translates. While it translates, and not only after the
// replay, they must get answers at the port that they kept. This holds over UDP,
// and over TCP, where each SYN keeps an untranslated flow alive.
func TestFlowsFromBeforeTheStandby(t *testing.T) {
	// settle is how long canaryd waits before it puts anything back.
	const settle = 8 * time.Second
	for _, test := range []struct {
		name      string
		flush     func(l *lab)
		tcp, dns  netip.AddrPort
		nativeToo bool
	}{
		{"iptables -t nat -F", (*lab).flushNat, cluster.Service(0), cluster.DNS(), false},
		{"nft flush table ip kube-proxy", func(l *lab) { nstest.Command(l.T, "nft", "flush", "table", "ip", "kube-proxy") },
			nativeService, cluster.Datagrams(nativeService), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			inCluster(t, func(l *lab) {
				nstest.NeedProgram(l.T, "nft")
				if l.Programs.With == iptables.Legacy && !test.nativeToo {
					l.Start("--standby=on")
					if s := l.Status().Standby[rules.IPv4]; s.State != string(api.StandbyOff) {
						l.Errorf("a standby of iptables-legacy is %+v: try it here", s)
					}
					return
				}
				if test.nativeToo {
					l.writeNative()
				}
				d := l.Start("--standby=on", "--settle="+settle.String())
				l.Until("the standby to be armed", func() error {
					s := l.Published()
					if test.nativeToo && (len(s.Native) != 1 || s.Native[0].Standby == nil || s.Native[0].Standby.State != string(api.StandbyArmed)) {
						return fmt.Errorf("%+v", s.Native)
					}
					if state := s.Standby[rules.IPv4].State; !test.nativeToo && state != string(api.StandbyArmed) {
						return fmt.Errorf("it is %s", state)
					}
					return nil
				})
				d.Suspend() // so that clients precede the standby
				test.flush(l)
				dns := l.dial("udp4", test.dns)
				knock := l.knock(cluster.Client, netip.Addr{}, test.tcp)
				l.wantSilence("before the standby", dns)
				l.wantStuck("before the standby", knock, silentFor)
				if !l.tracked(dns) {
					l.Fatal("conntrack does not know the flow to DNS: nothing would be shown")
				}
				d.Signal(syscall.SIGCONT)
				began := time.Now()
				l.wantAnswer("through the standby", dns, l.Endpoints(0)...)
				l.wantOpened("through the standby", knock)
				if took, log := time.Since(began), d.Log(); took > settle || strings.Contains(log, "back and proved") {
					l.Errorf("the clients were heard after %s, when the rules were back:\n%s", took, log)
				}
				l.Healed(1)
			})
		})
	}
}
