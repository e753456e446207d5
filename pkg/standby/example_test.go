package standby_test

import (
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A copy of nat is built while all rules are in force. When some are lost, it translates until they
// are back. This example needs CAP_NET_ADMIN, so it is compiled but not run.
func Example() {
	conn, err := nft.Dial()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	s, err := standby.Dial(standby.Config{})
	if err != nil {
		panic(err)
	}
	defer s.Close() // the kernel removes the table
	id := tableid.IPv4.Table("nat")
	raw, found, err := conn.RawTable(id)
	if err != nil || !found {
		return
	}
	protects := func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }
	c, err := standby.Translate(standby.Source{RawTable: raw, Protects: protects}, s.Held(id))
	if err != nil {
		fmt.Println("there will be no standby:", err)
		return
	}
	if err := s.Put(c); err != nil {
		fmt.Println("the kernel does not take it:", err)
		return
	}

	// Then another process flushes.

	losses, err := c.Probe(conn)
	if err != nil {
		return // an unknown state opens nothing
	}
	hooks, shut := c.Openable(losses)
	fmt.Println("opened:", hooks, "left shut:", shut)
	if err := s.Open(id, hooks, nil); err != nil {
		fmt.Println("not opened:", err)
	}

	// Then the rules are put back, and a read proves it.

	fmt.Println(s.Shut(id))
}
