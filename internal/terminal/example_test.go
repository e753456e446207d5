package terminal_test

import (
	"fmt"
	"os"

	"github.com/canaryd/canaryd/internal/terminal"
)

// A table has its columns aligned. A name that another process chose is escaped before.
func ExampleTable() {
	chain := terminal.Plain("EVIL\x1b[2J")
	terminal.Table(os.Stdout, [][]string{{"TABLE", "CHAIN"}, {"nat", chain}},
		func(_, _ string) terminal.Colour { return terminal.Normal })
	fmt.Println(terminal.Paint(os.Stdout, terminal.Red, "no screen, no colour"))
	// Output:
	// TABLE  CHAIN
	// nat    EVIL\x1b[2J
	// no screen, no colour
}
