package api_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStandbyUsesAreJoined: the time until the standby translated counts from the joined record's
// first evidence, also if the other record began later or earlier.
func TestStandbyUsesAreJoined(t *testing.T) {
	families := func(after float64) *api.StandbyUse {
		return &api.StandbyUse{Families: []rules.Family{rules.IPv4}, AfterSeconds: after, OpenSeconds: 0.5}
	}
	table := func(after float64) *api.StandbyUse {
		return &api.StandbyUse{Families: []rules.Family{}, Tables: []string{"ip kube-proxy"}, AfterSeconds: after, OpenSeconds: 0.25}
	}
	both := func(after float64) *api.StandbyUse {
		return &api.StandbyUse{Families: []rules.Family{rules.IPv4}, Tables: []string{"ip kube-proxy"}, AfterSeconds: after, OpenSeconds: 0.5}
	}
	twice := table(0.125)
	twice.Tables = append(twice.Tables, "ip kube-proxy")
	for name, test := range map[string]struct {
		to, from, want *api.StandbyUse
		later          time.Duration
	}{
		"none":                          {},
		"only the record's own":         {to: families(2), later: time.Second, want: families(2)},
		"only the other's, later":       {from: table(0.25), later: time.Second, want: table(1.25)},
		"only the other's, earlier":     {from: table(1.25), later: -time.Second, want: table(0.25)},
		"before the record's own began": {from: table(0.25), later: -time.Second, want: table(0)},
		"the other's was later":         {to: families(0.5), from: table(0.25), later: time.Second, want: both(0.5)},
		"the other's was earlier":       {to: families(2), from: table(0.25), later: time.Second, want: both(1.25)},
		"no family":                     {to: table(0.125), from: table(0.25), want: twice},
	} {
		t.Run(name, func(t *testing.T) {
			got := test.to.Joined(test.from, test.later)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if got == nil {
				return
			}
			text, err := json.Marshal(got.Families)
			if err != nil || string(text) == "null" {
				t.Errorf("the families are %s in JSON: %v", text, err)
			}
		})
	}
}
