// Package nft speaks nf_tables' netlink protocol: it asks for tables, chains and rules, hears
// of commits, and sends transactions that the kernel takes as a whole or not at all.
//
// Rules are bytes here. The package knows the objects of linux/netfilter/nf_tables.h by their
// attributes, and nothing of what iptables or nft means by them. What the kernel sends is
// treated as hostile: no message may make a function panic.
//
// A [Conn] asks one question after the other, an [Asker] many small ones at once. [Events] hear
// of every object that changes, a [Subscription] only of the end of each commit. A [Batch] is a
// transaction; with [Batch.Guard] the kernel takes it only while its ruleset counter, the
// genid, is the one of the read that the batch rests on. So a guarded write is: ask
// [Conn.Genid], read, write the batch, [Batch.Finish], [Batch.Send]; with [ErrStale] begin
// again.
//
// A [Mirror] holds tables of any family, and reads only what changed. What it does not decide is
// behind small interfaces: how rules are numbered ([Rulebook]; a [RuleStore] keeps the bytes of
// many rules in little memory), how many are kept ([MirrorBudget]), and who follows them
// ([MirrorView]).
//
// A Conn and an Asker may be used concurrently. Events, a Batch and a Subscription's Receive are
// for one goroutine, a Mirror for the one that has its turn; Close of a Subscription ends a Receive
// that waits. Slices that callbacks get are valid until they return.
//
// Callers decide by: [ErrPermission], [ErrNone], [ErrStale], [ErrInterrupted] (ask again),
// [ErrOverflow] (subscribe again, and look at everything), [ErrTooBig], and a
// [*RefusedError], which wraps the kernel's errno. Any other error says that something is
// unknown, and never that it is not there.
package nft
