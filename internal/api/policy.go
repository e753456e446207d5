package api

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A PolicyDrop is a built-in chain, or a base chain of a native table, whose policy has become
// DROP since its table was learned. canaryd sets no policies of built-in chains, and does not
// change policies of a native table that still exists. The kernel drops all packets that no
// rule of the chain accepts, and a healthy node may be cut off. A PolicyDrop does not affect
// Healthy. It ends when the policy changes again, or with canaryd dismiss.
type PolicyDrop struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Native bool            `json:"native,omitempty"` // the table is a native one
	Chain  string          `json:"chain"`
	Was    string          `json:"was"`   // the policy before
	Since  time.Time       `json:"since"` // when that was seen
	// Flush is the ID of the flush in which the policy changed; empty if it changed without
	// one.
	Flush string `json:"flush,omitempty"`
}

// String names the chain.
func (p PolicyDrop) String() string {
	if p.Native {
		return TableCell(p.Family.Table(p.Table).NFT()) + " " + p.Chain
	}
	return fmt.Sprintf("%s %s %s", p.Family, p.Table, p.Chain)
}

// Left is the remark of status and page that canaryd does not open the chain.
func (p PolicyDrop) Left() string {
	if p.Native {
		return "canaryd leaves it so"
	}
	return "canaryd sets none"
}

// policiesNamed is how many chains a headline names.
const policiesNamed = 4

// policyText names the chains that have become closed: "policy of ipv4 filter FORWARD is DROP
// since flush 1; canaryd sets none". It is "" if there are none.
func (s Status) policyText() string {
	list := s.PolicyDrops
	if len(list) == 0 {
		return ""
	}
	names, since, flush, left := "", list[0].Since, list[0].Flush, list[len(list)-1].Left()
	for i, p := range list {
		if i < policiesNamed {
			names = joined(", ", names, p.String())
		}
		if p.Since.Before(since) {
			since = p.Since
		}
		if p.Flush != flush {
			flush = ""
		}
	}
	if more := len(list) - policiesNamed; more > 0 {
		names += " and " + CountText(more, math.MaxInt, "more chain")
	}
	when := since.UTC().Format(time.RFC3339)
	if i := slices.IndexFunc(s.Flushes, func(f Flush) bool { return f.ID == flush }); i >= 0 {
		when = fmt.Sprintf("flush %d", i+1)
	}
	return fmt.Sprintf("policy of %s is DROP since %s; %s", names, when, left)
}
