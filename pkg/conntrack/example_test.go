package conntrack_test

import (
	"context"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/rules"
)

// After nat is back, end the flows that began without it. This example needs CAP_NET_ADMIN, so
// it is compiled and not run.
func ExampleKernel_Sweep() {
	var generation rules.Generation // the rules that are in force again
	var lastComplete time.Time      // when nat was last seen complete
	var kernel conntrack.Kernel
	site, err := kernel.Look(context.Background())
	if err != nil {
		panic(err)
	}
	translations := nat.New(site, generation.NatHooks(rules.IPv4))
	deleted, err := kernel.Sweep(context.Background(), rules.IPv4, lastComplete, translations)
	if err != nil { // flows that were ended before the error still count
		fmt.Println("the sweep ended early:", err)
	}
	fmt.Println(deleted.ByProtocol[nat.UDP], "flows of UDP were ended")
}
