package reload

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/rules"
)

// youngPods loads a pod, saves nat's rules, and replaces the pod by another one.
func youngPods(t *testing.T, n *testNode) (saved string) {
	t.Helper()
	n.replayer.Protection.Chain = func(chain string) bool { return protects(chain) || strings.HasPrefix(chain, "CNI-") }
	must(t, n.RestoreNoflush(v4, `*nat
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-DN-1 - [0:0]
-A PREROUTING -j CNI-HOSTPORT-DNAT
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 1 -j CNI-DN-1
-A CNI-DN-1 -p tcp -j DNAT --to-destination 10.0.0.1:80
COMMIT
`))
	n.learn()
	saved = n.SaveTable(v4, rules.Nat)
	must(t, n.RestoreNoflush(v4, `*nat
-F CNI-HOSTPORT-DNAT
-F CNI-DN-1
-X CNI-DN-1
:CNI-DN-2 - [0:0]
-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 2 -j CNI-DN-2
-A CNI-DN-2 -p tcp -j DNAT --to-destination 10.0.0.2:80
COMMIT
`))
	n.learn()
	return saved
}

// wantYoungPods fails unless there is the second pod and nothing of the first.
func wantYoungPods(t *testing.T, n *testNode) {
	t.Helper()
	now := n.SaveTable(v4, rules.Nat)
	if strings.Contains(now, "CNI-DN-1") || strings.Count(now, "CNI-DN-2") != 3 {
		t.Errorf("want the second pod and nothing of the first:\n%s", now)
	}
	n.marked(v4)
}

// TestSavedRulesAreFlushedInTheMiddleOfAReplay: a read shows saved rules, and another process
// flushes them before the write. Only the first read shows which rules they lacked.
func TestSavedRulesAreFlushedInTheMiddleOfAReplay(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		saved := youngPods(t, n)
		must(t, n.Restore(v4, saved))
		flushed := false
		n.replayer.Kernel = &recorder{Beginner: n.Fake, before: func(step string) {
			if strings.HasPrefix(step, "restore") && !flushed {
				flushed = true
				must(t, n.Bypassing().Flush(v4, rules.Nat, ""))
			}
		}}
		n.outcome(n.heal(), v4, Proved)
		wantYoungPods(t, n)
	})
}

// TestSavedRulesAreFlushedAfterAReplayThatFailed: the next try knows the findings of the try
// before.
func TestSavedRulesAreFlushedAfterAReplayThatFailed(t *testing.T) {
	onBoth(t, func(t *testing.T, n *testNode) {
		saved := youngPods(t, n)
		must(t, n.Restore(v4, saved))
		n.FailRestores(1, "other")
		n.job.Strict = true // refused rules are not searched
		first := n.heal()
		n.outcome(first, v4, Failed)
		n.job.Memory = n.job.Memory.After(first)
		must(t, n.Flush(v4, rules.Nat, ""))
		n.outcome(n.heal(), v4, Proved)
		wantYoungPods(t, n)
	})
}
