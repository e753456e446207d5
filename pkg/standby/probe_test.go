package standby_test

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestAnEmptiedStandbyChainWithMoreJumps: an empty chain must count as lost, even if several jumps
// lead to it.
func TestAnEmptiedStandbyChainWithMoreJumps(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "iptables-nft-restore")
		conn := dial(t)
		restore(t, tableid.IPv4, "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A KUBE-SERVICES -d 10.0.0.9/32 -j RETURN\nCOMMIT\n")
		c := translate(t, source(t, conn, nat), nil)
		for _, step := range []struct {
			words []string
			want  standby.Loss
		}{
			{[]string{"-t", "nat", "-A", "OUTPUT", "-j", "KUBE-SERVICES"}, standby.Intact},
			{[]string{"-t", "nat", "-F", "KUBE-SERVICES"}, standby.Below},
		} {
			nstest.Command(t, "iptables-nft", step.words...)
			losses, err := c.Probe(conn)
			must(t, err)
			if got := losses[standby.Prerouting]; got != step.want {
				t.Errorf("after %q: %v, want %v", step.words, got, step.want)
			}
		}
	})
}
