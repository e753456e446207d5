// Package standby keeps a copy of the translating part of a nat table in a table of canaryd's own.
// The copy translates while the rules of the real table are being restored.
//
// [Translate] makes a [Copy] from the raw objects of a protected iptables table, and
// [TranslateNative] from a native table. A Copy is a value; making it sends no request to the
// kernel. [Dial] opens a [Standby], and [Standby.Put] writes a Copy into a table of its own in the
// kernel. One lasting socket owns all these tables (NFT_TABLE_F_OWNER, Linux 5.12). `nft flush
// ruleset` spares such a table, no other process can change it, and it vanishes with the socket,
// even if the process is killed.
//
// The copy's base chains are one step behind the real ones, at priority +1. The first nat chain of
// a hook that translates a packet ends the walk, so the copy sees no packet that the real table
// translates. A gate in front of each base chain is shut: no packet passes it.
//
// After a flush [Copy.Probe] finds the hooks that lost rules, and [Copy.Openable] the hooks that
// may be opened. [Standby.Open] opens them, without a transaction where it can, and [Standby.Shut]
// shuts all. Open a hook only if it lost something, and not for ever. An open copy translates
// packets that another owner's rule exempts, and keeps a service alive that its owner removed. A
// [Misses] reports packets that the copy would translate, and the real table did not.
//
// The copy accepts a packet unchanged if it does not know all rules for it. A flow is translated as
// the whole real table would translate it, or not at all.
//
// Callers distinguish [ErrUnavailable], [ErrKernel], [ErrTaken], [ErrMemory], [ErrOutdated] and
// [ErrNotBuilt], and the errors of package nft. A standby that fails is never a reason to delay a
// replay.
//
// A Copy may be shared between goroutines. A Standby may be used concurrently. Its writes wait for
// each other, but an opening without a transaction waits for none.
package standby
