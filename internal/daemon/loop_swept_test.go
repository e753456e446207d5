package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestChainsThatAreDeletedBehindTheReplay: the -X of a flusher comes after the replay of what its
// -F took. It can delete the chains only that hold no rule and that none leads to. They come back,
// too, and a chain that goes so at another time is its owner's decision.
func TestChainsThatAreDeletedBehindTheReplay(t *testing.T) {
	hint := ":KUBE-IPTABLES-HINT - [0:0]"
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
				r.write(rules.Mangle, hint)
				r.after(20 * time.Second)
				before := r.tables()
				if tt.flush {
					for _, table := range protect.Tables() {
						must(t, r.fake.Flush(rules.IPv4, table, ""))
					}
				}
				r.after(tt.pause)
				must(t, r.fake.RestoreNoflush(rules.IPv4, section(rules.Mangle, hint, "-X KUBE-IPTABLES-HINT")))
				r.after(20 * time.Second)
				r.wantReady()
				if back := r.tables()[rules.IPv4][rules.Mangle].Chain("KUBE-IPTABLES-HINT") != nil; back != tt.back {
					t.Errorf("the chain is back: %v", back)
				}
				if tt.back {
					r.wantTables(before, r.tables())
				}
			})
		})
	}
}
