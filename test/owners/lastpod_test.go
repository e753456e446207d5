package owners

import (
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

// onePod is the rules of portmap for a node's only pod with a host port.
const onePod = `*nat
:CNI-DN-31c7af326e67a1a733e30 - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A CNI-DN-31c7af326e67a1a733e30 -s 10.244.0.0/24 -p tcp -m tcp --dport 8081 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-31c7af326e67a1a733e30 -p tcp -m tcp --dport 8081 -j DNAT --to-destination 10.244.0.3:8080
-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8081 -j CNI-DN-31c7af326e67a1a733e30
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
`

// lastPod is portmap's DEL of that pod on a busy machine: canaryd looks after
// each command. The first command leaves the mark that all pods share without a
// jump to it.
func lastPod() story {
	return story{
		name: "portmap's DEL of the last pod, with a look after each command", same: true,
		prepare: func(n *nodetest.Node, _ *story) []string {
			n.Must(n.Programs.Restore(n.Context(), rules.IPv4, onePod))
			n.Must(scenario.Load(n.Context(), n.Programs, rules.IPv6))
			return nil
		},
		happens: func(n *nodetest.Node, _ *nodetest.Process) {
			const pod = "CNI-DN-31c7af326e67a1a733e30"
			for _, command := range []string{"-F " + pod, "-D CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8081 -j " + pod, "-X " + pod} {
				nstest.Command(n.T, program(n, rules.IPv4, ""), append([]string{"-w", "5", "-t", "nat"}, strings.Fields(command)...)...)
				n.Polled(1)
				n.Looked()
			}
			left, err := n.Programs.Save(n.Context(), rules.IPv4)
			n.Must(err)
			if strings.Contains(left, pod) || !strings.Contains(left, "-A CNI-HOSTPORT-SETMARK ") {
				n.Errorf("after the pod's end the node has\n%s", left)
			}
		},
	}
}
