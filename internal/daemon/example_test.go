package daemon_test

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/go-logr/logr"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/daemon"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// The loop learns the rules of a kernel in memory, and puts them back after a flush.
func Example() {
	ctx, stop := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
	kernel := iptablestest.NewFake(iptables.NFT, rules.IPv4) // *iptables.Kernel on a node
	if err := kernel.RestoreNoflush(rules.IPv4, "*nat\n:MY-DNAT - [0:0]\n-A PREROUTING -j MY-DNAT\n"+
		"-A MY-DNAT -d 192.0.2.1/32 -j DNAT --to-destination 10.1.0.1\nCOMMIT\n"); err != nil {
		panic(err)
	}
	selector, err := protect.NewSelector([]string{"MY-*"})
	if err != nil {
		panic(err)
	}
	d := daemon.New(daemon.Config{
		Kernel: kernel, Hints: watch.NewHints(), Writers: &watch.Writers{},
		Metrics: metrics.NewMetrics(prometheus.NewRegistry(), metrics.MetricsOptions{Families: kernel.Families()}),
		Mode:    api.Heal, Source: "snapshot", Protection: selector.Protection(), Canary: canary.DefaultChain,
		PollInterval: 10 * time.Millisecond, Settle: 10 * time.Millisecond, JumpGrace: 15 * time.Second,
		Uptime: func() time.Duration { return time.Hour },
	})
	ended := make(chan error)
	go func() { ended <- d.Run(ctx) }()
	wait := func(good func(api.Status) bool) api.Status {
		ctx, enough := context.WithCancel(ctx)
		var last api.Status
		_ = d.Watch(ctx, func(s api.Status) error {
			if last = s; good(s) {
				enough()
			}
			return nil
		})
		return last
	}

	wait(func(s api.Status) bool { return s.Healthy && s.Generation.Rules > 0 })
	if err := kernel.As(4711, "nft").FlushRuleset(); err != nil {
		panic(err)
	}
	status := wait(func(s api.Status) bool { return len(s.Flushes) > 0 && !s.Flushes[0].Open() })
	flush := status.Flushes[0]
	fmt.Println(flush.Kind, flush.Lost.Rules, "rules were lost:", flush.Outcome)

	stop()
	fmt.Println(<-ended)
	// Output:
	// table_deleted 2 rules were lost: proved
	// <nil>
}
