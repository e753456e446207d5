package conntrack_test

import (
	"context"
	"fmt"
	"time"

	"github.com/canaryd/canaryd/pkg/conntrack"
	"github.com/canaryd/canaryd/pkg/rules"
)

// After nat is back, end the flows that began without it. This example needs CAP_NET_ADMIN, so
// it is compiled and not run.
func ExampleKernel_Sweep() {
	var generation rules.Generation // the rules that are in force again
	var lastComplete time.Time      // when nat was last seen complete
	var kernel conntrack.Kernel
	site, err := kernel.Look()
	if err != nil {
		panic(err)
	}
	nat := generation.Translations(rules.IPv4, site)
	deleted, err := kernel.Sweep(context.Background(), rules.IPv4, lastComplete, nat)
	if err != nil { // flows that were ended before the error still count
		fmt.Println("the sweep ended early:", err)
	}
	fmt.Println(deleted.ByProtocol[rules.UDP], "flows of UDP were ended")
}
