package metrics_test

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// One event is one call, however many series it changes.
func ExampleMetrics() {
	registry := prometheus.NewRegistry()
	m := metrics.NewMetrics(registry, metrics.MetricsOptions{Families: []rules.Family{rules.IPv4}})
	m.ObserveFlush(time.Now(), map[rules.Family]api.Verdicts{rules.IPv4: {rules.Nat: canary.Emptied}})
	n, err := testutil.GatherAndCount(registry, "canaryd_flushes_total")
	fmt.Println(n > 0, err)
	// Output:
	// true <nil>
}
