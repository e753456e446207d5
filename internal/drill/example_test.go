package drill_test

import (
	"fmt"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/drill"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A drill takes the canary of nat, unless the request names another table.
func ExampleNew() {
	x, err := drill.New(api.DrillRequest{}, drill.Guarded{Iptables: true})
	fmt.Println(x.Takes(), err)

	_, err = drill.New(api.DrillRequest{ForReal: true, Table: rules.Filter}, drill.Guarded{Iptables: true})
	fmt.Println(err)
	// Output:
	// its canary of table nat <nil>
	// a drill for real takes the protected jumps of nat PREROUTING and nothing else: leave out --table and --kind
}
