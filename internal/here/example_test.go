package here_test

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// A stored generation is bound to the boot and the network namespace in which it was learned.
func ExampleIdentify() {
	identity, err := here.Identify(iptables.Info{Backend: iptables.NFT, Version: "1.8.9"})
	if err != nil {
		panic(err)
	}
	fmt.Println(len(identity.BootID) > 0, len(identity.NetNS) > 0)
	// Output:
	// true true
}
