package nft

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file makes one list of chains of what the kernel answers, which can be none.
//
// A dump comes in parts, and each begins at the place in the kernel's list where the last one
// ended. That place is counted in chains that were shown; when it is looked for, those count too
// that a transaction under way has made so far (nf_tables_dump_chains, Linux 6.18). While
// an owner writes a table with new chains, a dump therefore shows chains of later tables again. If
// the transaction is then given up, the place counts the repeated ones, and as many others are
// never shown. No flag of the messages says so, and the genid stays as it is.

// chainPasses is how often the chains are asked for at most. Those of 5,000 services take 10 ms
// each time.
const chainPasses = 10

// chainsAgree is how many dumps in a row that repeat chains must show none that was not shown
// before. Each of them would have to lack the same chains, which takes as many transactions given
// up in its middle.
const chainsAgree = 2

// dumpChains is dump for the chains of a family: it calls f once for each. A dump that repeats no
// chain lacks none; after one that does it asks again. The error is ErrInterrupted if that does
// not end.
func (c *Conn) dumpChains(family tableid.Family, attrs []byte, f func(data []byte) error) error {
	seen := seenChains{}
	agree := 0
	for pass := 1; pass <= chainPasses; pass++ {
		fresh, repeated := 0, false
		err := c.dump(unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, family, attrs, func(data []byte) error {
			table, handle, err := chainIdentity(data)
			if err != nil {
				return err
			}
			switch seen.note(table, handle, pass) {
			case 0:
				fresh++
				return f(data)
			case pass:
				repeated = true
			}
			return nil
		})
		if agree++; fresh > 0 {
			agree = 0
		}
		if err != nil || !repeated || agree == chainsAgree {
			return err
		}
	}
	return ErrInterrupted
}

// chainIdentity returns what no other chain of the family has: its table and its handle.
func chainIdentity(data []byte) (table []byte, handle uint64, err error) {
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_CHAIN_TABLE:
			table = UntilNUL(value)
		case unix.NFTA_CHAIN_HANDLE:
			handle, err = AttrUint64(value)
		}
		return err
	})
	return table, handle, err
}

// seenChains says in which pass a chain was last seen, by its table and its handle.
type seenChains map[string]map[uint64]int

// note notes a chain, and returns the pass in which it was seen before; 0 if it was not.
func (s seenChains) note(table []byte, handle uint64, pass int) (before int) {
	of := s[string(table)]
	if of == nil {
		of = map[uint64]int{}
		s[string(table)] = of
	}
	before = of[handle]
	of[handle] = pass
	return before
}
