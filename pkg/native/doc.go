// Package native reads native nftables tables, such as kube-proxy's or Docker's, as raw objects. It
// reports how a table changed, and restores lost parts.
//
// A [Table] holds everything that the kernel reports about a table, as bytes from which the kernel
// can make it again. Expressions and objects that the package does not know stay as they are. Four
// kinds of expression are repaired when they are read: the kernel refuses its own dump of them.
//
// [Capture] reads tables at one genid. [Table.Digest] and [Diff] compare content. They ignore
// handles, the values of counters, the remaining time of timeouts, and elements that packets add. A
// set or chain that belongs to one rule is part of that rule, whatever its name. A [Listing] has
// the digests and words of single rules and declarations, for a comparison with a baseline.
//
// A guard of tables opens a [Kernel] with [LateKernel.Wake]. Its Follow returns the same tables as
// a Capture, but from the kernel's notifications. It reads a table again only where these do not
// suffice. Its Hear returns each [Commit] with its deeds: the objects that the commit added and
// removed. Above a limit of their size together, it leaves out the largest tables
// ([Ruleset].LeftOut).
//
// [Judge] compares a table before and after, weighs the deeds, and returns a [Finding]. A witness
// ([PlantWitness]) is an empty table of canaryd's own in each family. A flush of the ruleset
// deletes it; an owner that deletes its own table does not. The habits of owners ([owners.Habits])
// keep an owner's own cleaning from counting as a flush.
//
// A Finding names the remedy: [Table.Create], [Table.Replace] or [Table.Refill]. Each writes into
// an [nft.Batch], which may hold several tables: the kernel accepts all of it or nothing. Guard the
// batch with the genid of the read. A second Capture and Diff prove the result. [Table.Rehearse]
// tries beforehand whether the kernel would accept a table.
//
// A drill takes a table of its own ([NewDrillTable]) as a flusher does, and so tries all of this.
//
// Callers distinguish [ErrImmune], [*UnreplayableError] and the errors of package nft. Values may
// be shared between goroutines and must not be changed. A Kernel, a LateKernel and a [Recorder] are
// for one goroutine.
package native
