package ruleset_test

import (
	"encoding/hex"
	"fmt"

	"github.com/canaryd/canaryd/pkg/ruleset"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// The bytes that iptables-nft 1.8.9 writes for "-A X -j RETURN": a counter and a verdict, as
// Linux lists them on a little-endian machine.
func ExampleWords() {
	expressions, _ := hex.DecodeString("" +
		"2c0001000c000100636f756e746572001c0002000c00010000000000000000000c0002000000000000000000" +
		"30000100" + "0e000100696d6d6564696174650000001c00020008000100000000001000020" +
		"00c00020008000100fffffffb")
	words, known := ruleset.Words(tableid.IPv4, expressions, nil, nil)
	fmt.Println(words, known)
	// Output: -j RETURN true
}
