package daemon

import (
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestWhatAReplayChangesEndsNoQuarantine: a replay leaves out a rule whose ipset is missing, and in
// the same chain a rule to a chain that its owner removed, or the nfacct match of another one. Only
// the owner's word ends the quarantine, and that was none.
func TestWhatAReplayChangesEndsNoQuarantine(t *testing.T) {
	const chain = "KUBE-FORWARD"
	const counted, leads, odd, last = "-p icmp -m nfacct --nfacct-name dropped -j DROP", "-p tcp -j KUBE-SVC-B", "-m set --match-set KUBE-CLUSTER-IP dst,dst -j DROP", "-j ACCEPT"
	tests := []struct {
		name   string
		during func(t *testing.T, fake *iptablestest.Fake) // after the flush, before the replay
		want   []string                                    // the chain when the set is back
	}{
		{"its owner removes a chain", func(t *testing.T, fake *iptablestest.Fake) {
			must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, "-X KUBE-SVC-B")))
		}, []string{counted, odd, last}},
		{"an nfacct object is missing", func(t *testing.T, fake *iptablestest.Fake) {
			fake.Sets().Refuse("dropped", nft.ErrPermission)
			fake.Sets().Destroy("dropped")
		}, []string{"-p icmp -j DROP", leads, odd, last}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				fake := iptablestest.NewFake(backend, rules.IPv4)
				fake.Sets().Put(clusterIPs)
				must(t, fake.Sets().Account(t.Context(), "dropped"))
				must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Filter, ":KUBE-SVC-B - [0:0]", ":KUBE-SVC-C - [0:0]", ":KUBE-SVC-D - [0:0]", ":"+chain+" - [0:0]",
					"-A FORWARD -j "+chain, "-A "+chain+" "+counted, "-A "+chain+" "+leads, "-A "+chain+" "+odd, "-A "+chain+" "+last,
					"-A KUBE-SVC-B -j ACCEPT", "-A KUBE-SVC-C -j ACCEPT", "-A KUBE-SVC-D -j ACCEPT")))
				r := run(t, fake, setup{protect: []string{"KUBE-*"}})
				r.settled()
				fake.Sets().Refuse(clusterIPs.Name, nft.ErrPermission)
				fake.Sets().Destroy(clusterIPs.Name)
				must(t, fake.Flush(rules.IPv4, rules.Filter, ""))
				test.during(t, fake)
				r.settled()
				r.wantQuarantine(2)
				r.after(5 * time.Minute)
				r.wantQuarantine(2)
				fake.Sets().Put(clusterIPs) // by its owner
				r.after(lastTry + time.Second)
				r.wantQuarantine(0)
				if got := r.chain(rules.IPv4, rules.Filter, chain); !slices.Equal(got, test.want) {
					t.Errorf("%s is %q, want %q", chain, got, test.want)
				}
			})
		})
	}
}
