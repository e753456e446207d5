package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestChainsThatAreDeletedBehindTheReplay: a flusher's -X follows the replay of its -F, and
// deletes kubelet's hint, which has no rule. canaryd restores it too. At other times its
// deletion is a decision, and that of another empty chain is always kube-proxy's decision.
func TestChainsThatAreDeletedBehindTheReplay(t *testing.T) {
	hint, stale := ":KUBE-IPTABLES-HINT - [0:0]", ":KUBE-SVC-STALESTALESTALE0 - [0:0]"
	for name, tt := range map[string]struct {
		pause time.Duration // between -F, and -X
		flush bool
		back  bool
	}{
		"at once":          {0, true, true},
		"after the replay": {300 * time.Millisecond, true, true},
		"seconds later":    {5 * time.Second, true, true},
		"long after":       {time.Minute, true, false},
		"without a flush":  {time.Minute, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{})
				r.write(rules.Mangle, hint, stale)
				r.after(20 * time.Second)
				if tt.flush {
					for _, table := range protect.Always() {
						must(t, r.fake.Flush(rules.IPv4, table, ""))
					}
				}
				r.after(tt.pause)
				must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, hint, stale, "-X KUBE-IPTABLES-HINT", "-X KUBE-SVC-STALESTALESTALE0")))
				r.after(20 * time.Second)
				r.wantReady()
				if back := r.tables()[rules.IPv4][rules.Mangle].Chain("KUBE-IPTABLES-HINT") != nil; back != tt.back {
					t.Errorf("the chain is back: %v", back)
				}
				if r.tables()[rules.IPv4][rules.Mangle].Chain("KUBE-SVC-STALESTALESTALE0") != nil {
					t.Error("a chain that its owner deleted is back")
				}
			})
		})
	}
}
