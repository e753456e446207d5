package api

import (
	"fmt"
	"slices"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// Lost counts the rules, chains and elements that a flush removed.
type Lost struct {
	Chains int `json:"chains"`
	Rules  int `json:"rules"`
	Jumps  int `json:"jumps"`
	// Elements counts those of native tables' sets and maps.
	Elements int `json:"elements,omitempty"`
	// Unread means that no guarded read showed the loss, or none has yet: the counts are unknown.
	Unread bool `json:"unread,omitempty"`
	// Unprotected counts the rules that --protect does not name and that the same flush
	// removed. Rules does not include them. UnprotectedUnknown means that there may be more,
	// because the count of some table is unknown.
	Unprotected        int  `json:"unprotectedRules,omitempty"`
	UnprotectedUnknown bool `json:"unprotectedUnknown,omitempty"`
	// Tables has the same counts for each table that was hit, with chains by name.
	Tables []TableLoss `json:"tables,omitempty"`
}

// Since returns the losses of the tables that were added to a record after it had the losses
// before.
func (l Lost) Since(before Lost) Lost {
	l.Chains, l.Rules, l.Jumps = l.Chains-before.Chains, l.Rules-before.Rules, l.Jumps-before.Jumps
	l.Elements, l.Unprotected, l.Tables = l.Elements-before.Elements, l.Unprotected-before.Unprotected, l.Tables[len(before.Tables):]
	l.UnprotectedUnknown = slices.ContainsFunc(l.Tables, func(t TableLoss) bool { return t.UnprotectedUnknown })
	return l
}

// UnprotectedText counts the lost rules that --protect does not name: ", and 3 rules that
// --protect does not name". It is "" if there were none, and says so if the number is unknown.
func (l Lost) UnprotectedText() string {
	switch n := l.Unprotected; {
	case n == 0 && l.UnprotectedUnknown:
		return "; how many rules went that --protect does not name is not known"
	case l.UnprotectedUnknown:
		return fmt.Sprintf(", and %d or more rules that --protect does not name", n)
	case n == 0:
		return ""
	case n == 1:
		return ", and 1 rule that --protect does not name"
	default:
		return fmt.Sprintf(", and %d rules that --protect does not name", n)
	}
}

// A TableLoss counts the rules and chains that a flush removed from one table.
type TableLoss struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Kind   canary.Verdict  `json:"kind"`
	Chains int             `json:"chains"`
	Rules  int             `json:"rules"` // jumps included
	Jumps  int             `json:"jumps"`
	// Unprotected counts rules that --protect does not name, unless UnprotectedUnknown; see Lost.
	Unprotected        int  `json:"unprotectedRules,omitempty"`
	UnprotectedUnknown bool `json:"unprotectedUnknown,omitempty"`
	// By has the pids of the Culprits that removed something from this table; empty if they are
	// unknown.
	By []uint32 `json:"by,omitempty"`
	// PerChain has the chains that lost most, with the largest loss first. Built-in chains that
	// lost jumps are among them. More is how many are not listed.
	PerChain []ChainLoss `json:"perChain,omitempty"`
	More     int         `json:"more,omitempty"`
}

// A ChainLoss counts the rules that one chain lost.
type ChainLoss struct {
	Chain string `json:"chain"`
	Rules int    `json:"rules"`           // jumps included
	Jumps int    `json:"jumps,omitempty"` // of a built-in chain
}
