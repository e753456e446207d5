package iptables

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd cannot spell a text. It reads the text back as it was written, in the
// words of the latest writer. Another process knows the rule only by its bytes,
// until it writes the same text.
func TestATextIsReadBackAsItWasWritten(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		const usual, other = "-p tcp -m cpu --cpu 0 -j ACCEPT", "-m cpu --cpu 0 -p tcp -j ACCEPT"
		script := func(spec string) Script {
			return replayOf(rules.Filter, "MINE", []rules.Rule{{Spec: "-p udp -j RETURN", Target: "RETURN"}, {Spec: spec, Target: "ACCEPT"}})
		}
		texts := func(k *Kernel) (specs []string) {
			for _, r := range mustRead(t, k, family).Tables[rules.Filter].Rules("MINE") {
				if _, opaque := r.Opaque(); opaque {
					specs = append(specs, "opaque")
				} else {
					specs = append(specs, r.Spec)
				}
			}
			return specs
		}
		first := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		second := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		for _, step := range []struct {
			writer *Kernel
			spec   string
			want   map[*Kernel]string
		}{
			{first, usual, map[*Kernel]string{first: usual, second: "opaque"}},
			{second, usual, map[*Kernel]string{first: usual, second: usual}},
			{first, other, map[*Kernel]string{first: other, second: usual}},
		} {
			if step.writer == second {
				writeStale(t, second, family, script(usual))
				if got := texts(second)[1]; got != usual {
					t.Errorf("the rule is in force, and read as %s", got)
				}
			}
			if w := restoreAll(t, step.writer, family, script(step.spec)); w.Detour != nil || backend == NFT && len(w.Direct) != 1 {
				t.Errorf("%s: %+v", step.spec, w)
			}
			for k, want := range step.want {
				if diff := cmp.Diff([]string{"-p udp -j RETURN", want}, texts(k)); diff != "" {
					t.Errorf("after %s (-want +got):\n%s", step.spec, diff)
				}
			}
		}
		// A text in other words than canaryd's for the same rule is also written
		// only once.
		restoreAll(t, first, family, script("-p tcp --dport 22 -j ACCEPT"))
		calls := countPrograms(t, first, family)
		for _, spec := range []string{other, usual, "-p tcp --dport 22 -j ACCEPT"} {
			restoreAll(t, first, family, script(spec))
			if got := mustRead(t, first, family).Tables[rules.Filter].Rules("MINE")[1]; !got.Equal(rules.Rule{Spec: spec, Target: "ACCEPT"}) {
				t.Errorf("%s is read as %s", spec, got.Label())
			}
		}
		if n := calls(); n != 0 {
			t.Errorf("%d programs were executed for texts that are known", n)
		}
	})
}

// writeStale writes a script whose rules turn out to be in force, and expects
// ErrStale.
func writeStale(t *testing.T, k *Kernel, family rules.Family, script Script) {
	t.Helper()
	if w := restoreOnce(t, k, family, script); !errors.Is(w.Err, nft.ErrStale) {
		t.Errorf("written: %+v", w)
	}
}

// A declared rule is in force in a built-in chain, although its bytes do not
// contain the declared text. canaryd must not write it a second time.
func TestADeclaredRuleInForceIsNotDoubled(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		iptablesCommand(t, backend, family, "-N MINE")
		iptablesCommand(t, backend, family, "-A INPUT -m cpu --cpu 0 -j MINE")
		want := []rules.Rule{{Spec: "-m cpu --cpu 0 -j MINE", Target: "MINE"}}
		k := openKernel(t, Config{Backend: backend, Families: []rules.Family{family}})
		script := replayOf(rules.Filter, "MINE", nil)
		script.Steps = append(script.Steps, Step{Verb: Append, Chain: "INPUT", Rule: want[0]})
		writeStale(t, k, family, script)
		if diff := cmp.Diff(want, mustRead(t, k, family).Tables[rules.Filter].Rules("INPUT")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// To nf_tables TRACE is an expression that sets packets' metadata, and to
// iptables a target.
func TestATextOfTRACEIsKept(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		want := []rules.Rule{{Spec: "-p tcp -j TRACE", Target: "TRACE"}}
		before := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		restoreAll(t, before, family, replayOf(rules.Raw, "MINE", want))
		kept, ok := before.RawRule(family, want[0], nil)
		if !ok {
			t.Fatal("the rule's bytes are not known")
		}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}})
		k.KnowEarlier(earlierOf(family, []RawRule{kept}))
		if diff := cmp.Diff(want, mustRead(t, k, family).Tables[rules.Raw].Rules("MINE")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// A jump is written as text. canaryd must know its bytes from the first write on:
// otherwise the proof would fail, and each try would add another jump.
func TestAJumpThatGoesAsTextIsWrittenOnce(t *testing.T) {
	onNFT(t, func(t *testing.T, family rules.Family) {
		jump := rules.Rule{Spec: "-m cpu --cpu 0 -j MINE", Target: "MINE"}
		k := openKernel(t, Config{Backend: NFT, Families: []rules.Family{family}, Replay: ReplayText})
		script := replayOf(rules.Filter, "MINE", []rules.Rule{{Spec: "-m cpu --cpu 1 -j ACCEPT", Target: "ACCEPT"}})
		script.Steps = append(script.Steps, Step{Verb: Append, Chain: "INPUT", Rule: jump})
		if w := restoreAll(t, k, family, script); len(w.Direct) != 0 {
			t.Errorf("written directly: %v", w.Direct)
		}
		got := mustRead(t, k, family).Tables[rules.Filter]
		if diff := cmp.Diff([]rules.Rule{jump}, got.Rules("INPUT")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		for _, chain := range []string{TextChain, TrialTarget} {
			if got.Chain(chain) != nil {
				t.Errorf("%s was left behind", chain)
			}
		}
	})
}
