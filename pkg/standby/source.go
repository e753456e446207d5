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

// String returns the hook's name as nft spells it, such as "prerouting". The gates' sets and
// canaryd's reports name hooks by it.
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

// A Source is the input of Translate.
type Source struct {
	// RawTable is the real table, as it ought to be. It was read while all protected rules were in
	// force.
	nft.RawTable
	// Protects reports whether a chain is protected. Only protected chains are copied. A chain that
	// jumps to an unprotected chain is left out.
	Protects func(chain string) bool
}
