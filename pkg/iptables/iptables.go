// Package iptables is the only package that executes iptables or reads iptables' tables from the
// kernel. It finds the backend, reads tables, and restores them under guard.
//
// [Open] finds the backend, iptables-nft or iptables-legacy, and its programs ([Choose] decides by
// the content of both). The [Kernel] that it returns has three ways to look, each more expensive
// than the one before:
//
//   - [Kernel.Stamp] returns a number that moves with each change. It reads no rule.
//   - [Kernel.Probe] reads a few chains.
//   - [Kernel.Read] reads everything, as a [Snapshot]. On nft it reads only the changes since the
//     last Snapshot.
//
// To write, take a [Session] from [Kernel.Begin], read, compose a [Payload] of [Script], and call
// Restore. Legacy holds the xtables lock from the read to the write, and nft compares the genid.
// [Written] says if another process wrote in between all the same. [Sets] make objects that rules
// need and no table holds: ipsets and nfacct objects. A [Keeper] keeps NAT registered while rules
// are missing.
//
// Looking creates nothing. A Kernel's methods may be called concurrently; a Session is for one
// goroutine.
//
// A table that cannot be read is an error or in Snapshot.Unreadable, and is unknown; a table in
// neither Tables nor Unreadable does not exist. Callers distinguish [ErrLocked], [ErrNoFamily], the
// errors of pkg/nft (ErrStale, ErrPermission), and a refused restore, a [*RestoreError] with its
// [Reason].
//
// The package iptablestest has the same in memory, for tests; users declare the two or three
// methods that they need.
package iptables

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Backend is one of the kernel's two implementations of iptables.
type Backend string

// The backends.
const (
	NFT    Backend = "nft"
	Legacy Backend = "legacy"
)

// Info says what a Kernel works with; it does not change while it is open.
type Info struct {
	Backend     Backend
	Version     string // of the iptables program, such as "1.8.9"; "" without one
	Missing     string // why programs cannot be executed, and what to install; only nft goes without them
	Reason      string // why this backend was chosen, for people
	Mixed       bool   // both backends hold rules of others
	RandomFully bool   // MASQUERADE --random-fully is known (1.6.2)
}

// A Place is a chain in a table.
type Place = nft.Place

// Presence says how much of a Place exists.
type Presence uint8

// The answers to "is it there".
const (
	NoTable Presence = iota
	NoChain
	Present
)

// A Holding is what a probe sees of one Place.
type Holding struct {
	Presence Presence
	Rules    int      // how many rules the chain holds
	Comments []string // comments of the rules that have a comment and no target, in order
}

// A Stamp is a cheap fingerprint of everything that one family's tables hold.
// Different stamps mean that something was written. Equal ones mean that
// nothing was, if Exact; else only that no count of chains or rules moved (the
// legacy backend's GET_INFO does not see a rule that replaces another).
type Stamp struct {
	Value uint64
	Exact bool
	// Shapes tell, where they can be had for next to nothing (on legacy, from the
	// kernel itself), which table moved: one for each of protect.Tables, zero for
	// a table that does not exist.
	Shapes [protect.TableCount]Shape
}

// A Shape is the part of a Stamp that is one table's.
type Shape struct {
	Value uint64
	Size  uint32 // in bytes, of which reading the table is a matter
}

// smallTable is as much of a table, in bytes, as is read in 0.1 ms: some 150
// rules (legacy, Linux 6.18).
const smallTable = 64 << 10

// Urgent returns the tables that moved since an earlier Stamp and are worth a
// ProbeOnly at once, because they are small or lost half of what they held: what
// most flushes leave behind is both.
func (s Stamp) Urgent(since Stamp) []rules.TableName {
	var urgent []rules.TableName
	for i, table := range protect.Tables() {
		now, before := s.Shapes[i], since.Shapes[i]
		if now != before && (now.Size <= smallTable || now.Size < before.Size/2) {
			urgent = append(urgent, table)
		}
	}
	return urgent
}

// A Probed is the result of one probe: a Holding for every Place asked for,
// and a digest of the whole family's content, counters left out, that is equal
// only if nothing was written in between. On nft the digest is the genid.
type Probed struct {
	Holdings map[Place]Holding
	Digest   uint64
}

// A Snapshot is one full read of a family's tables, each table consistent in
// itself. A table in neither Tables nor Unreadable does not exist.
type Snapshot struct {
	Family     rules.Family
	Tables     rules.Ruleset
	Unreadable map[rules.TableName]error
	// Misfits are built-in chains into which no rule of iptables' belongs, and why: on nft a chain
	// of that name has another hook or none, or its table is dormant. Tables shows them empty.
	Misfits map[Place]error
	// Digest is the Probed's digest from before the read: if a later
	// probe still shows it, the snapshot is current.
	Digest uint64
	// Moved is set by a Session's Read only: another process wrote since the
	// session's last Read or Restore, or while this Read went on. Always
	// false on legacy, where the session holds the lock.
	Moved bool
}

// A Session is one guarded read-and-write: what Restore writes is based on
// what Read returned, or the Session says that it was not.
//
// On the legacy backend it holds the xtables lock from Begin to Close, for
// both families; on nft it compares the genid. It is not for concurrent use.
type Session interface {
	// Read reads one family in full.
	Read(ctx context.Context, family rules.Family) (Snapshot, error)
	// Writes reports whether Restore can write a rule: one that has a text, or that is opaque and
	// has its bytes, where bytes can be written.
	Writes(rule rules.Rule) bool
	// Text returns a rule of the family with its text, if it is opaque and the Session knows by now
	// of which text it is. It returns the very rule else.
	Text(family rules.Family, rule rules.Rule) rules.Rule
	// Prepare does ahead what can be done of the next Restore, if it is of the same
	// payloads. It writes nothing.
	Prepare(ctx context.Context, payloads ...Payload)
	// Carry has the next Restore take a rider along, in the transaction of its last payload. It
	// stays behind where there is no such transaction: on legacy, as text, and where the genid of
	// its read is not that of the families'. RestoreAnyway takes none.
	Carry(r *Rider)
	// Restore writes payloads, one after the other, and says for each of their
	// families what became of it. A family is written only if no other process wrote
	// since its last Read, as far as the backend shows it. What the payloads say of
	// other families is written all the same. A family for which one payload fails
	// is left out of those that follow.
	Restore(ctx context.Context, payloads ...Payload) map[rules.Family]Written
	// RestoreAnyway is Restore without the check: for what is safe whatever
	// was written since, or better than to wait for ever next to a busy
	// writer. Every family counts as raced.
	RestoreAnyway(ctx context.Context, payloads ...Payload) map[rules.Family]Written
	// Close lets go of the lock.
	Close() error
}

// Written says what a Restore did to one family.
type Written struct {
	// Raced: another process wrote between the check and the end of the
	// restore, so that what was written rests on a read of the past.
	Raced bool
	// Err is nil if everything was written. It is ErrStale, and nothing was
	// written, if another process wrote since the family's last Read. A refusal
	// is a *RestoreError: the tables before the refused one may have been
	// written.
	Err error
	// Stages is how many of the payloads, from the first on, were written whole.
	Stages int
	// At is when the last of them was, and Kernel what the kernel took for the
	// transactions of our own, with other families' share of them.
	At     time.Time
	Kernel time.Duration
	// Direct are the tables that were written by transactions of our own, one for
	// each payload, with those of other families; all others went through
	// iptables-restore.
	Direct []rules.TableName
	// Detour is why others did; nil if the direct path was not asked for.
	Detour error
}
