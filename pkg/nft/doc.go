// Package nft speaks nf_tables' netlink protocol: it asks for tables, chains and rules, hears
// of commits, and sends transactions that the kernel takes as a whole or not at all.
//
// Rules are bytes here. The package knows the objects of linux/netfilter/nf_tables.h by
// their attributes, and nothing of what iptables or nft means by them. What the kernel sends
// is treated as hostile: no message may make a function panic.
//
// A [Conn] asks one question after the other, an [Asker] many small ones at once. [Events]
// hear of every object that changes, a [Subscription] only of the end of each commit. A
// [Batch] is a transaction; with [Batch.Guard] the kernel takes it only while its ruleset
// counter, the genid, is the one of the read that the batch rests on.
package nft
