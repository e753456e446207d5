package api

import (
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// QuarantinedShown is how many parts, or chains with rules that wait, a Status lists.
const QuarantinedShown = 100

// A Quarantined is a quarantined rule of the generation, or a quarantined part of a native table,
// in a Status. Rule and Reason leave through the control socket only.
type Quarantined struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"` // the table is a native one
	// Kind is that of a native table's part, such as "rule" or "set element". Chain is its own
	// name, or that of its chain or set, and Rule describes it.
	Kind   string `json:"kind,omitempty"`
	Chain  string `json:"chain"`
	Rule   string `json:"rule,omitempty"`
	Reason string `json:"reason,omitempty"`
	// Waits means that the rule is fine, but waits for a quarantined rule before it.
	Waits bool `json:"waits,omitempty"`
}

// QuarantinedOf returns a quarantined rule of a table as a Status has it.
func QuarantinedOf(id rules.TableID, h reload.QuarantinedRule) Quarantined {
	return Quarantined{Family: id.Family, Table: id.Name, Chain: h.Chain, Rule: h.Rule.Label(), Reason: h.Reason, Waits: h.Waits}
}

// HeldOf is QuarantinedOf for a part of a native table.
func HeldOf(id tableid.TableID, h native.Held) Quarantined {
	return Quarantined{Family: id.Family, Table: id.Name, Native: true, Kind: h.Kind.String(), Chain: h.Name, Rule: h.Text, Reason: h.Why, Waits: h.Waits}
}

// TableName returns the table's name for people: "ipv4 nat", or "ip kube-proxy" of a native table.
func (q Quarantined) TableName() string {
	if q.Native {
		return TableCell(q.Family.Table(q.Table).NFT())
	}
	return q.Family.Table(q.Table).String()
}

// Part describes the part: "rule CHAIN ..." or "element SET ...".
func (q Quarantined) Part() string {
	if q.Native {
		return q.Rule
	}
	return "rule " + q.Chain + " " + q.Rule
}

// A WaitingChain counts the rules of a chain that wait for the same reason.
type WaitingChain struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"`
	Chain  string          `json:"chain"`
	Rules  int             `json:"rules"`
	Reason string          `json:"reason,omitempty"`
}

// WaitingChains counts the rules of a list that wait for a quarantined rule, by chain and
// reason. A status and the log show these counts in place of each rule.
func WaitingChains(list []Quarantined) []WaitingChain {
	var chains []WaitingChain
	at := map[WaitingChain]int{}
	for _, q := range list {
		if !q.Waits {
			continue
		}
		w := WaitingChain{Family: q.Family, Table: q.Table, Native: q.Native, Chain: q.Chain, Reason: q.Reason}
		i, known := at[w]
		if !known {
			i, at[w] = len(chains), len(chains)
			chains = append(chains, w)
		}
		chains[i].Rules++
	}
	return chains
}

// ShowQuarantined lists the first parts of list, and counts the rest.
func (s *Status) ShowQuarantined(list []Quarantined) {
	chains := WaitingChains(list)
	s.Quarantined = list[:min(len(list), QuarantinedShown)]
	s.QuarantinedMore, s.WaitingChains = len(list)-len(s.Quarantined), chains[:min(len(chains), QuarantinedShown)]
}
