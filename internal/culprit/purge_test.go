package culprit

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestSweptBehindAReplay: a hint chain that is gone from a table that is lost, or was a moment
// ago, was deleted by the flusher. Any other missing chain may be its owner's doing.
func TestSweptBehindAReplay(t *testing.T) {
	now, nat, filter := time.Unix(1e9, 0), rules.IPv4.Table(rules.Nat), rules.IPv4.Table(rules.Filter)
	for name, test := range map[string]struct {
		backAgo time.Duration // when nat was put back
		lost    flushes.Verdicts
		id      rules.TableID
		chain   string
		target  string
		want    bool
	}{
		"of a table that was back a moment ago": {time.Second, nil, nat, owners.HintChain, "", true},
		"of one that was back long ago":         {time.Minute, nil, nat, owners.HintChain, "", false},
		"of a table that is lost":               {time.Minute, flushes.Verdicts{filter: canary.Emptied}, filter, owners.HintChain, "", true},
		"of another table":                      {time.Second, nil, filter, owners.HintChain, "", false},
		"another chain":                         {time.Second, nil, nat, "KUBE-SERVICES", "", false},
		"a jump to it":                          {time.Second, nil, nat, owners.HintChain, "RETURN", false},
	} {
		var p Purges
		p.BackIs(flushes.Verdicts{nat: canary.Emptied}, now.Add(-test.backAgo))
		swept := p.Swept(now, test.lost)
		if got := swept != nil && swept(test.id, test.chain, test.target); got != test.want {
			t.Errorf("%s: swept: %t, want %t", name, got, test.want)
		}
	}
}
