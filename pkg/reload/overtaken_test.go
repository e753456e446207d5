package reload

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// flusher returns a process that ignores the lock.
func (n *testNode) flusher() interface {
	DeleteChains(rules.Family, rules.TableName) error
	RestoreNoflush(rules.Family, string) error
} {
	w := n.As(7, "flusher")
	if n.Info().Backend == iptables.Legacy {
		return w.Bypassing()
	}
	return w
}

// tried reports whether rules were tried one by one.
func (n *testNode) tried() bool {
	return strings.Contains(strings.Join(n.Payloads(v4), ""), trialChain)
}

// inQuarantine counts the quarantined rules of a result.
func inQuarantine(result Result) int {
	count := 0
	for _, tr := range result[v4].Tables {
		count += len(tr.Quarantined)
	}
	return count
}

// TestARefusalBecauseAFlusherGoesOnIsStale: a flusher runs -X between canaryd's read and its write.
// The write is refused for a chain that the read showed. No rule is to blame.
func TestARefusalBecauseAFlusherGoesOnIsStale(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.FailRestores(1, iptables.ReasonMissingChain)
		n.BeforeRestore(func() {
			n.BeforeRestore(nil)
			for _, table := range protect.Always() {
				must(t, n.flusher().DeleteChains(v4, table))
			}
		})
		result := n.heal()
		n.outcome(result, v4, Proved)
		if n.tried() || inQuarantine(result) > 0 {
			t.Errorf("rules were tried: %t, %d are in quarantine", n.tried(), inQuarantine(result))
		}
		n.same(v4)
	})
}

// TestAFlusherThatNeverEndsQuarantinesNothing: each write is refused while the flusher continues,
// and the next replay begins again.
func TestAFlusherThatNeverEndsQuarantinesNothing(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.FailRestores(-1, iptables.ReasonMissingChain)
		writes := 0
		n.BeforeRestore(func() {
			writes++
			chain := map[bool]string{true: "one", false: "other"}[writes%2 == 0]
			must(t, n.flusher().RestoreNoflush(v4, "*filter\n:"+chain+" - [0:0]\n-A "+chain+" -j ACCEPT\n-A "+chain+" -j DROP\nCOMMIT\n"+
				"*filter\n:both - [0:0]\n-A both -j "+chain+"\nCOMMIT\n"))
		})
		result := n.heal()
		n.outcome(result, v4, Failed)
		if n.tried() || inQuarantine(result) > 0 || !result[v4].Beaten() {
			t.Errorf("rules were tried: %t, %d are in quarantine, beaten: %t", n.tried(), inQuarantine(result), result[v4].Beaten())
		}
		n.BeforeRestore(nil)
		n.FailRestores(0, "")
		n.outcome(n.heal(), v4, Proved)
	})
}

// TestASetThatIsDestroyedRightBeforeTheWriteIsMadeAgain: a flusher destroys an ipset after the
// rules, which moves no table.
func TestASetThatIsDestroyedRightBeforeTheWriteIsMadeAgain(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.flushAll(v4)
		n.BeforeRestore(func() {
			n.BeforeRestore(nil)
			n.Sets().Destroy("bad")
		})
		result := n.heal()
		n.outcome(result, v4, Proved)
		if n.tried() {
			t.Error("rules were tried one by one")
		}
		n.same(v4)
	})
}

// TestATrialBesideAnotherWriterCountsForNothing: another process may have caused the refusals of a
// trial.
func TestATrialBesideAnotherWriterCountsForNothing(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.replayer.Supplier = nil // nothing knows which set is missing
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		n.BeforeRestore(func() {
			texts := n.Payloads(v4)
			if last := texts[len(texts)-1]; strings.HasPrefix(last, "*filter") && strings.Contains(last, "-X "+trialChain) {
				// The trial of filter has found its rules.
				n.BeforeRestore(nil)
				must(t, n.flusher().RestoreNoflush(v4, "*filter\n:other - [0:0]\n-A other -j ACCEPT\nCOMMIT\n"))
				n.Sets().Put(setBad)
			}
		})
		result := n.heal()
		n.outcome(result, v4, Proved)
		if !n.tried() || inQuarantine(result) > 0 {
			t.Errorf("rules were tried: %t, %d are in quarantine", n.tried(), inQuarantine(result))
		}
		must(t, n.RestoreNoflush(v4, "*filter\n-F other\n-X other\nCOMMIT\n"))
		n.same(v4)
	})
}

// TestATrialThatIsInterruptedBlamesNoRule: the next replay begins it again.
func TestATrialThatIsInterruptedBlamesNoRule(t *testing.T) {
	eachNode(t, func(t *testing.T, n *testNode) {
		n.replayer.Supplier = nil
		n.flushAll(v4)
		n.Sets().Destroy("bad")
		asked := 0
		n.job.Interrupted = func() bool { asked++; return asked > 2 }
		before := n.Restores()
		result := n.heal()
		n.outcome(result, v4, Partial) // mangle and nat are back
		if tables := result[v4].Tables; inQuarantine(result) > 0 || tables[rules.Filter].Proved || !tables[rules.Nat].Proved || n.Restores()-before > 8 {
			t.Errorf("%d rules are in quarantine after %d restores: %v", inQuarantine(result), n.Restores()-before, result[v4].Err)
		}
		n.job.Interrupted = nil
		result = n.heal()
		missing := missingIn(Quarantine{v4.Table(rules.Filter): result[v4].Tables[rules.Filter].Quarantined}) // two more wait for them
		if len(missing) != 2 || inQuarantine(result) != 4 || !result[v4].DoneExceptQuarantined() {
			t.Errorf("then %d rules are in quarantine: %v", inQuarantine(result), result[v4].Err)
		}
	})
}
