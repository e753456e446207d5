package tableid_test

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// Values by table are a map that is never changed in place: With returns a changed copy.
func ExampleWith() {
	nat := tableid.IPv4.Table("nat")
	before := map[tableid.TableID]int{nat: 120}
	now := tableid.With(before, nat, 0)
	fmt.Println(nat, before[nat], now[nat])
	text, err := tableid.Marshal(now)
	fmt.Println(string(text), err)
	// Output:
	// ipv4 nat 120 0
	// {"ipv4":{"nat":0}} <nil>
}
