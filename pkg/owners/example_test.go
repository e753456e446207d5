package owners_test

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/owners"
)

// A word of --protect names rows of the table. A chain's owner says when the chain may be empty.
func ExampleNamed() {
	for _, o := range owners.Named("cni") {
		fmt.Println(o.Title)
	}
	fmt.Println(owners.EmptyingOf("nat", "KUBE-SERVICES") == owners.EmptyNever)
	// Output:
	// the CNI plugin portmap
	// the CNI plugins bridge and ptp
	// the CNI plugin firewall
	// true
}
