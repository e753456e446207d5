// Package standby keeps a copy of the translating part of a nat table in a table of canaryd's own,
// which translates while the rules of the real one are being put back.
//
// A [Copy] is made by [Translate] from the raw objects of the protected table; it is a value, and
// making it asks nothing. A [Standby] writes it into the kernel: one table for each table that is
// copied, owned by one lasting socket (NFT_TABLE_F_OWNER, Linux 5.12). `nft flush ruleset` passes
// such a table over, no other process can change it, and it vanishes with the socket, also when
// the process is killed.
//
// The copy's base chains stand one behind the real ones, at priority +1. Of nat chains at one hook
// the first that translates ends the walk. So while the real table translates, the copy is not
// asked. A copy is shut: no packet gets behind the gate in front of a base chain. [Standby.Open]
// opens hooks, without a transaction where it can, and [Standby.Shut] shuts them all. Opened is
// what has lost something, not more and not always: an open copy translates what an exemption of
// another owner's lets pass, and keeps a service alive that its owner removed. [Copy.Openable] says
// what may be opened. A [Misses] hears of packets that the real table did not translate and the
// copy would.
//
// What the copy does not know as well as the real table it does not translate: packets that come to
// such a rule are accepted as they are. A flow is translated as the whole real table would have,
// or not at all.
//
// Of a native table [TranslateNative] makes a copy with the same objects.
//
// Callers decide by [ErrUnavailable], [ErrKernel], [ErrTaken], [ErrMemory], [ErrOutdated] and
// [ErrNotBuilt], and by the errors of package nft. A standby that fails is never a reason to put
// off a replay.
//
// A Copy may be shared between goroutines. A Standby may be used concurrently; its calls wait for
// each other.
package standby
