package api_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStandbyUseOfAnEarlierRecord: the time until the standby translated counts from the record's
// first evidence, also if the record begins earlier than it did before.
func TestStandbyUseOfAnEarlierRecord(t *testing.T) {
	use := func(after float64) *api.StandbyUse {
		return &api.StandbyUse{Families: []rules.Family{rules.IPv4}, Tables: []string{"ip kube-proxy"}, AfterSeconds: after, OpenSeconds: 0.5}
	}
	was := use(0.25)
	if diff := cmp.Diff(use(1.25), was.Later(time.Second)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(use(0.25), was); diff != "" {
		t.Errorf("the record before (-want +got):\n%s", diff)
	}
	if got := (*api.StandbyUse)(nil).Later(time.Second); got != nil {
		t.Errorf("got %v for a record without a use", got)
	}
}
