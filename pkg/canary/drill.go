package canary

import (
	"slices"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// DrillChain is the chain that replaces a table's canary during a drill, its stand-in. Nothing
// jumps to it. It holds one rule with a nonce of its own. A flush takes it just as it would
// have taken the canary. Its name has the ending of all canaries' names: no preset, glob or
// file names such a chain.
const DrillChain = "KUBE-CANARYD-DRILL-CANARY"

// DrillKinds returns the verdicts that a drill can cause without a change of a protected rule.
// A drill never takes a witness, because nothing else would show a flush of that built-in
// chain.
func DrillKinds() []Verdict { return []Verdict{ChainDeleted, Emptied, Replaced} }

// Drilling returns m with the record that a drill took the canary, and planted a stand-in.
func (m Mark) Drilling(standIn Nonce) Mark {
	m.Tried, m.Drill = nil, standIn
	return m
}

// drilled reports whether a read shows the stand-in of a drill exactly as it was planted. Then
// only the drill took the canary.
func (m Mark) drilled(t *rules.Table) bool {
	return m.Drill != "" && m.Drill.standsIn(t.Rules(DrillChain))
}

// DrillScript returns a transaction that takes a canary away and plants the stand-in. kind is
// the verdict that it causes. The first step deletes the canary by its nonce: if the canary is
// already gone, nothing is written.
func (m Mark) DrillScript(table rules.TableName, chain string, kind Verdict, standIn Nonce) iptables.Script {
	s := iptables.Script{Table: table, Declare: []string{DrillChain}, Steps: []iptables.Step{
		{Verb: iptables.Delete, Chain: chain, Rule: m.Nonce.Rule()},
		{Verb: iptables.Append, Chain: DrillChain, Rule: standIn.Rule()},
	}}
	switch kind {
	case ChainDeleted:
		s.Steps = append(s.Steps, iptables.Step{Verb: iptables.Drop, Chain: chain})
	case Replaced:
		s.Steps = append(s.Steps, iptables.Step{Verb: iptables.Append, Chain: chain, Rule: NewNonce().Rule()})
	}
	return s
}

// OnlyDrilled reports whether a drill took the canary, and nothing else is lost.
func (f Finding) OnlyDrilled() bool {
	return f.Drilled && slices.Contains(DrillKinds(), f.Verdict) &&
		len(f.Witnesses)+len(f.Jumps)+len(f.Emptied)+len(f.Missing)+len(f.Drift) == 0
}
