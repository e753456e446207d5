package api

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A PolicyDrop is a built-in chain whose policy has become DROP since its table was learned.
// canaryd sets no policies: the kernel drops what no rule of the chain accepts, and a healthy node
// may be cut off. It does not affect Healthy, and ends when the policy is another one, or with
// canaryd dismiss.
type PolicyDrop struct {
	Family rules.Family    `json:"family"`
	Table  rules.TableName `json:"table"`
	Chain  string          `json:"chain"`
	Was    string          `json:"was"`   // the policy before
	Since  time.Time       `json:"since"` // when that was seen
	// Flush is the ID of the flush with which it came; empty if it came with none.
	Flush string `json:"flush,omitempty"`
}

// String names the chain.
func (p PolicyDrop) String() string { return fmt.Sprintf("%s %s %s", p.Family, p.Table, p.Chain) }

// policiesNamed is how many chains a headline names.
const policiesNamed = 4

// policyText says which built-in chains have become closed: "policy of ipv4 filter FORWARD is DROP
// since flush 1; canaryd sets none". It is "" if none have.
func (s Status) policyText() string {
	list := s.PolicyDrops
	if len(list) == 0 {
		return ""
	}
	names, since, flush := "", list[0].Since, list[0].Flush
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
	return fmt.Sprintf("policy of %s is DROP since %s; canaryd sets none", names, when)
}
