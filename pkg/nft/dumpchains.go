package nft

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// This file makes one list of chains from the kernel's answers, which may be
// inconsistent.
//
// A dump has several parts. Each begins at the place in the kernel's list where
// the last part ended. The kernel counts that place in chains that it has shown.
// When it searches the place again, it also counts chains of a transaction under
// way (nf_tables_dump_chains, Linux 6.18). So while an owner adds chains to an
// earlier table, a dump shows chains of later tables again. If the transaction is
// then given up, the repeated chains still count, and the kernel skips as many
// others. No flag of the messages says so, and the genid does not change.

// chainPasses limits how often the chains are read. The chains of 5,000 services
// take 10 ms each time.
const chainPasses = 10

// chainsAgree is how many dumps in a row must show no new chain, if they repeat
// chains. A chain could only be missing if a transaction was given up in the
// middle of each of these dumps.
const chainsAgree = 2

// dumpChains is dump for the chains of a family: it calls f once for each chain.
// A dump without repeated chains is complete; otherwise dumpChains reads again.
// The error is ErrInterrupted if chainPasses dumps do not suffice.
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

// chainIdentity returns the table and the handle of a chain, which identify it within the
// family. dumpChains recognizes repeated chains by them.
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

// seenChains has the last pass that showed each chain, by its table and its
// handle.
type seenChains map[string]map[uint64]int

// note notes that a pass of dumpChains showed a chain. It returns the pass that showed it
// last before; 0 if none did.
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
