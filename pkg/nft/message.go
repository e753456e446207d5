package nft

import (
	"errors"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// A Commit is one transaction that a process, perhaps this one, committed to
// nf_tables in this network namespace.
type Commit struct {
	Genid uint32
	PID   uint32 // of the thread, in the initial pid namespace; 0 if the kernel did not say
	Comm  string // at most 15 bytes
	Own   bool   // by the user, or by a program that it executed
}

// nfgenmsgLen is the size of struct nfgenmsg, which begins every message.
const nfgenmsgLen = 4

var errShort = errors.New("a netlink message is too short")

func nftType(message uint16) netlink.HeaderType {
	return netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | message)
}

// parseCommit reads NFT_MSG_NEWGEN, as an event or as GETGEN's answer. Own is for the caller
// to set.
func parseCommit(data []byte) (c Commit, err error) {
	found := false
	err = eachAttrOf(data, func(kind uint16, value []byte) (err error) {
		switch kind {
		case unix.NFTA_GEN_ID:
			c.Genid, err = AttrUint32(value)
			found = true
		case unix.NFTA_GEN_PROC_PID:
			c.PID, err = AttrUint32(value)
		case unix.NFTA_GEN_PROC_NAME:
			c.Comm = String(value)
		}
		return err
	})
	if err == nil && !found {
		err = errors.New("a NEWGEN message has no NFTA_GEN_ID")
	}
	return c, err
}

// Newer reports whether genid a is newer than b. The counter wraps around, so the two may be at
// most 2^31 commits apart.
func Newer(a, b uint32) bool { return int32(a-b) > 0 }

// Following returns the genid after one commit: the counter leaves out NoGuard. If the genid
// is Following(before) after canaryd's own commit, no other process committed meanwhile.
func Following(genid uint32) uint32 {
	if genid++; genid == NoGuard {
		genid++
	}
	return genid
}
