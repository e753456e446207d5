package packets

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// guest is a container of Docker that listens on UDP. ufw-docker lets the callers
// in, and keeps all others out.
var guest = netip.MustParseAddrPort("10.244.0.2:5353")

// ufwDocker is the table filter of a node with Docker 28 and ufw-docker, in the
// words of ufw-docker's after.rules. It has only the chains of Docker and ufw
// that a packet to the container meets.
const ufwDocker = `*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
:ufw-before-forward - [0:0]
:ufw-docker-logging-deny - [0:0]
:ufw-user-forward - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A FORWARD -j ufw-before-forward
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i to-pods -j ACCEPT
-A DOCKER-BRIDGE -o to-pods -j DOCKER
-A DOCKER -d 10.244.0.2/32 ! -i to-pods -o to-pods -p udp -m udp --dport 5353 -j ACCEPT
-A DOCKER-USER -j ufw-user-forward
-A DOCKER-USER -s 172.16.0.0/12 -j RETURN
-A DOCKER-USER -s 192.168.0.0/16 -j RETURN
-A DOCKER-USER -d 10.0.0.0/8 -p udp -m udp --dport 0:32767 -j ufw-docker-logging-deny
-A DOCKER-USER -j RETURN
-A ufw-before-forward -j ufw-user-forward
-A ufw-docker-logging-deny -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix "[UFW DOCKER BLOCK] "
-A ufw-docker-logging-deny -j DROP
-A ufw-user-forward -s 10.244.4.0/24 -d 10.244.0.2/32 -p udp -m udp --dport 5353 -j ACCEPT
COMMIT
`

// TestWhoWasKeptOutStaysOut: Docker's chains lead to chains of ufw, which have
// the DROP. After any flush of them and the replay, callers must get in as
// before, and others must be kept out.
func TestWhoWasKeptOutStaysOut(t *testing.T) {
	inCluster(t, func(l *lab) {
		l.Must(l.Programs.RestoreNoflush(l.Context(), rules.IPv4, ufwDocker))
		meets := func(when string) {
			l.Helper()
			l.wantAnswer(when+", a caller", l.dialFrom(cluster.Callers, "udp4", guest), guest.Addr())
			l.wantSilence(when+", another client", l.dialFrom(cluster.Client, "udp4", guest))
		}
		meets("at first")
		d := l.Start("--protect=kube,cni,docker")
		flush := func() { l.Must(l.Programs.Flush(l.Context(), rules.IPv4, rules.Filter, "")) }
		guarded, err := protect.NewSelector([]string{"kube", "cni", "docker", "ufw-docker-*", "ufw-user-forward"})
		l.Must(err)
		l.Protects = guarded.Protects
		want := l.Protected()
		for round, way := range []struct {
			name string
			do   func()
			only iptables.Backend
		}{
			{name: "iptables -F", do: flush},
			{name: "iptables -F and -X at once", do: func() {
				l.Must(l.Programs.RestoreNoflush(l.Context(), rules.IPv4, "*filter\n-F\n-X\nCOMMIT\n"))
			}},
			{name: "nft flush ruleset", do: func() { nstest.Command(l.T, "nft", "flush", "ruleset") }, only: iptables.NFT},
		} {
			if way.only != "" && way.only != l.Programs.With {
				continue
			}
			way.do()
			record := l.Healed(round + 1)
			meets("after " + way.name)
			if record.Outcome != "proved" {
				l.Errorf("after %s the record is %s: %s", way.name, record.Outcome, record.Detail)
			}
			l.Same("the protected rules after "+way.name, want, l.Protected())
		}
		var status api.Status
		l.Must(json.Unmarshal([]byte(l.Get("/api/v1/status")), &status))
		also := []api.LedTo{
			{Family: rules.IPv4, Table: rules.Filter, Chain: "ufw-docker-logging-deny", From: "DOCKER-USER"},
			{Family: rules.IPv4, Table: rules.Filter, Chain: "ufw-user-forward", From: "DOCKER-USER"},
		}
		if diff := cmp.Diff(also, status.LedTo); diff != "" {
			l.Errorf("chains that are guarded too (-want +got):\n%s", diff)
		}
		stdout, _ := l.Want(0, "status")
		for _, led := range also {
			if line := fmt.Sprintf("also guarded: %s\n", led); !strings.Contains(stdout, line) {
				l.Errorf("status lacks the line %q:\n%s", line, stdout)
			}
		}
		d.WantLog("Chains of other owners are guarded too", "ufw-user-forward, because DOCKER-USER leads to it")
		if lost := nodetest.Sum(l.Metrics(), "flushed_unprotected_rules_total"); lost > 2 {
			l.Errorf("%v rules that are not guarded are counted as lost, want at most the 2 of ufw-before-forward", lost)
		}
	})
}
