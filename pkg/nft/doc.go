// Package nft speaks nf_tables' netlink protocol. It reads tables, chains and
// rules, receives notifications of commits, and sends transactions, which the
// kernel accepts as a whole or not at all.
//
// Rules are bytes here. The package knows the objects of linux/netfilter/nf_tables.h by their
// attributes, and not their meaning for iptables or nft. Data from the kernel is treated as
// hostile: no message may make a function panic.
//
// A [Conn] sends one request after the other, an [Asker] many small ones at once. [Events] receive
// every object that changes, a [Subscription] only the end of each commit. A [Batch] is a
// transaction. With [Batch.Guard] the kernel accepts it only if no commit followed the read: it
// compares its ruleset counter, the genid. So a guarded write is: call [Conn.Genid], read, write
// the batch, call [Batch.Finish] and [Batch.Send]; on [ErrStale] begin again.
//
// A [Mirror] holds tables of any family, and reads only their changes. Its user
// supplies small interfaces. [Rulebook] numbers the rules; a [RuleStore] keeps
// the bytes of many rules in little memory. A [Budget] chooses the chains
// whose rules are kept. [MirrorView] is notified of each change.
//
// A Conn and an Asker may be used concurrently. Events, a Batch and a Subscription's Receive are
// for one goroutine, a Mirror for the goroutine that has its turn. Closing a Subscription ends a
// Receive that waits. Slices that callbacks get are valid until they return.
//
// Callers distinguish [ErrPermission], [ErrNone], [ErrStale], [ErrInterrupted] (read again),
// [ErrOverflow] (subscribe again, and read everything), [ErrTooBig], and a [*RefusedError], which
// wraps the kernel's errno. Any other error means that something is unknown, never that it does not
// exist.
package nft
