// Package native keeps native nftables tables, such as kube-proxy's or Docker's, as raw objects:
// it captures whole tables, says what became of one, and puts back what was lost.
//
// A [Table] has everything that the kernel says of a table, as bytes with which the kernel would
// make it again. Expressions and objects that the package does not know stay as they are. Four
// kinds of expression are repaired when they are read: the kernel refuses its own dump of them.
//
// [Capture] reads tables at one genid. [Table.Digest] and [Diff] compare content: handles, what
// counters counted, what is left of timeouts, and elements that come and go with packets are
// none. A set or chain that belongs to one rule is part of that rule, whatever its name.
//
// A [Kernel] follows what it has read: its Follow gives at each commit what a Capture would, from
// the kernel's notifications. What these do not carry is read again.
//
// [Judge] says what became of a table: it takes what was and what is, and what each commit did, as
// a [Recorder] has it from the kernel's notifications. A witness ([PlantWitness]) is an empty table
// of canaryd's own in each family: a flush of the ruleset takes it along, an owner that deletes its
// table does not. [owners.Habits] are what owners do that else looks like a flush of a part.
//
// A [Finding] names the remedy: [Table.Create], [Table.Replace] or [Table.Refill]. Each writes
// into an [nft.Batch], which may hold several tables: the kernel takes all of it or nothing. Guard
// the batch with the genid of what was read. [Capture] and [Diff] prove it; [Table.Rehearse] asks
// the kernel beforehand whether it would take a table. A [Kernel] does all of this for a guard.
//
// Callers tell apart, with the errors of package nft: [ErrImmune] and [*UnreplayableError]. All
// values may be shared between goroutines and must not be changed; a Recorder is for one.
package native
