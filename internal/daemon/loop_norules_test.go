package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRecordsOfNoRules: a process deletes only marks. canaryd records that and plants them
// again, and no alert fires.
func TestRecordsOfNoRules(t *testing.T) {
	for _, mode := range []api.Mode{api.Heal, api.Observe} {
		t.Run(string(mode), func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				r := start(t, backend, setup{mode: mode})
				before := r.tables()
				must(t, r.fake.Flush(rules.IPv4, rules.Nat, canary.DefaultChain))
				r.settled()
				r.after(20 * time.Second)
				r.wantBack(before, before)
				if record := r.oneRecord(); record.Lost.Rules != 0 || record.Kind != canary.Emptied {
					t.Errorf("the record is %+v", record)
				}
				if moved := r.metrics("flush_events", "flushes_total", "last_flush", "rules_absent_seconds", "loss_since"); len(moved) != 0 {
					t.Errorf("metrics: %v", moved)
				}
				r.flushNat()
				r.settled()
				if moved := r.metrics("flush_events", "flushes_total"); moved["flush_events_total"] != 1 || moved["flushes_total{family=ipv4,kind=emptied,table=nat}"] != 1 {
					t.Errorf("metrics after a flush of rules: %v", moved)
				}
			})
		})
	}
}

// TestARecordThatGrowsIsCounted: a record first has a table without lost rules, and then one
// with lost rules. From then on both count.
func TestARecordThatGrowsIsCounted(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60})
		must(t, err)
		must(t, r.fake.Flush(rules.IPv4, rules.Filter, canary.DefaultChain))
		r.settled()
		if moved := r.metrics("flush_events", "flushes_total"); len(moved) != 0 {
			t.Errorf("metrics: %v", moved)
		}
		r.flushNat()
		r.settled()
		want := series{"flush_events_total": 1, "flushes_total{family=ipv4,kind=emptied,table=filter}": 1, "flushes_total{family=ipv4,kind=emptied,table=nat}": 1}
		wantMoved(t, r.metrics("flush_events", "flushes_total"), want)
	})
}
