package standby

import (
	"fmt"

	"github.com/canaryd/canaryd/pkg/nft"
)

// A Hook is a point of the packets' path to which nat chains are attached, by the kernel's number
// (NF_INET_PRE_ROUTING and so on).
type Hook uint32

// The hooks of nat chains.
const (
	Prerouting  Hook = 0
	Input       Hook = 1
	Output      Hook = 3
	Postrouting Hook = 4
)

// Hooks are all hooks of nat chains.
func Hooks() []Hook { return []Hook{Prerouting, Input, Output, Postrouting} }

// String returns the hook's name as nft spells it, such as "prerouting".
func (h Hook) String() string {
	switch h {
	case Prerouting:
		return "prerouting"
	case Input:
		return "input"
	case Output:
		return "output"
	case Postrouting:
		return "postrouting"
	}
	return fmt.Sprintf("hook %d", uint32(h))
}

// A Source is what a copy is made from.
type Source struct {
	// Table is the real table, as it ought to be: read while all that is protected stood in it.
	nft.RawTable
	// Protects reports whether a chain is protected. Only such chains are copied; a chain that
	// jumps to another one is left out.
	Protects func(chain string) bool
}
