// Package iptables is the only package that executes iptables or reads iptables' tables from the
// kernel. It finds the backend, reads tables, and guards each restore against other writers.
//
// [Open] finds the backend, iptables-nft or iptables-legacy, and its programs ([Choose] decides
// by the content of both). The [Kernel] that it returns has three ways to look, in the order of
// their costs:
//
//   - [Kernel.Stamp] returns a number that moves with each change. It reads no rule.
//   - [Kernel.Probe] reads a few chains.
//   - [Kernel.Read] reads everything, as a [Snapshot]. On nft it reads only the changes since the
//     last Snapshot.
//
// To write, take a [Session] from [Kernel.Begin], read, compose a [Payload] of [Script], and
// call Restore. Legacy holds the xtables lock from the read to the write, and nft compares the
// genid. [Written] says if another process wrote in between anyway. [Sets] make ipsets and
// nfacct objects, which rules need and no table contains. A [Keeper] keeps NAT registered while
// rules are missing.
//
// Looking creates nothing. A Kernel's methods may be called concurrently; a Session is for one
// goroutine.
//
// A table that cannot be read is an error or in Snapshot.Unreadable, and its content is unknown.
// A table in neither Tables nor Unreadable does not exist. Callers distinguish [ErrLocked],
// [ErrNoFamily], the errors of pkg/nft (ErrStale, ErrPermission), and a refused restore, a
// [*RestoreError] with its [Reason].
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

// Info describes a Kernel; it does not change while the Kernel is open.
type Info struct {
	Backend     Backend
	Version     string // of the iptables program, such as "1.8.9"; "" without one
	Missing     string // why programs cannot be executed, and a remedy; nft only
	Reason      string // why this backend was chosen, for people
	Mixed       bool   // both backends hold rules of others
	RandomFully bool   // MASQUERADE --random-fully is known (1.6.2)
}

// A Place is a chain in a table.
type Place = nft.Place

// Presence says whether a Place exists, or at least its table.
type Presence uint8

// The values of Presence.
const (
	NoTable Presence = iota
	NoChain
	Present
)

// A Holding is the result of a probe for one Place.
type Holding struct {
	Presence Presence
	Rules    int      // the number of rules in the chain
	Comments []string // comments of the rules that have a comment and no target, in order
}

// A Stamp is a cheap fingerprint of one family's tables. Different stamps mean that some process
// wrote. If Exact, equal stamps mean that no process wrote. Otherwise they mean only that no
// count of chains or rules changed: the legacy backend's GET_INFO does not see a rule that
// replaces another.
type Stamp struct {
	Value uint64
	Exact bool
	// Shapes show which table changed, if the backend has them at almost no cost: on legacy the
	// kernel returns them. There is one for each of protect.Tables, zero for a table that does
	// not exist.
	Shapes [protect.TableCount]Shape
}

// A Shape is one table's part of a Stamp.
type Shape struct {
	Value uint64
	Size  uint32 // in bytes, which decide the cost of a read
}

// smallTable is the size of a table, in bytes, that is read in 0.1 ms: some 150 rules (legacy,
// Linux 6.18).
const smallTable = 64 << 10

// Urgent returns the tables that changed since an earlier Stamp and are worth a ProbeOnly at
// once. Such tables are small or lost half of their content. After most flushes a table is both.
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

// A Probed is the result of one probe: a Holding for every requested Place, and a digest of the
// whole family without counters. The digest is equal only if no process wrote in between. On nft
// the digest is the genid.
type Probed struct {
	Holdings map[Place]Holding
	Digest   uint64
}

// A Snapshot is one full read of a family's tables. Each table is consistent in itself. A table
// in neither Tables nor Unreadable does not exist.
type Snapshot struct {
	Family     rules.Family
	Tables     rules.Ruleset
	Unreadable map[rules.TableName]error
	// Misfits has the built-in chains that must not get iptables' rules, each with the reason.
	// On nft, a chain of that name has another hook or none, or its table is dormant. Tables
	// shows them empty.
	Misfits map[Place]error
	// Digest is the Probed's digest from before the read. If a later probe still shows it, the
	// Snapshot is current.
	Digest uint64
	// Moved is set only by a Session's Read. It reports that another process wrote since the
	// Session's last Read or Restore, or during this Read. It is always false on legacy, where
	// the Session holds the lock.
	Moved bool
}

// A Session is one guarded read and write. Restore writes on the basis of the last Read, or the
// Session reports that it did not.
//
// On the legacy backend it holds the xtables lock from Begin to Close, for both families; on nft
// it compares the genid. It is not for concurrent use.
type Session interface {
	// Read reads one family in full.
	Read(ctx context.Context, family rules.Family) (Snapshot, error)
	// Writes reports whether Restore can write a rule. The rule needs a text, or bytes if it is
	// opaque and the backend can write bytes.
	Writes(rule rules.Rule) bool
	// Text returns a rule of the family with its text, if the rule is opaque and the Session
	// knows its text by now. Otherwise it returns the same rule.
	Text(family rules.Family, rule rules.Rule) rules.Rule
	// Prepare does a part of the next Restore's work in advance, if that has the same payloads.
	// It writes nothing.
	Prepare(ctx context.Context, payloads ...Payload)
	// Carry adds a rider to the next Restore, in the transaction of its last payload. The rider
	// is left out if there is no such transaction (on legacy, or as text). It is also left out
	// if its read had another genid than the families' reads. RestoreAnyway takes no rider.
	Carry(r *Rider)
	// Restore writes payloads, one after the other, and returns the result for each of their
	// families. It writes a family only if no other process wrote since the family's last Read,
	// as far as the backend shows that. Other families of the payloads are written anyway. A
	// family whose payload fails is left out of the later payloads.
	Restore(ctx context.Context, payloads ...Payload) map[rules.Family]Written
	// RestoreAnyway is Restore without the check. It is for writes that are safe after any write
	// of another process, or better than to wait for ever for a busy writer. Every family counts
	// as raced.
	RestoreAnyway(ctx context.Context, payloads ...Payload) map[rules.Family]Written
	// Close releases the lock.
	Close() error
}

// Written is the result of a Restore for one family.
type Written struct {
	// Raced reports that another process wrote between the check and the end of the restore, so
	// that the write rests on an outdated read.
	Raced bool
	// Err is nil if everything was written. It is ErrStale if another process wrote since the
	// family's last Read, and then nothing was written. A refusal is a *RestoreError: the tables
	// before the refused one may have been written.
	Err error
	// Stages is the number of payloads, from the first on, that were written completely.
	Stages int
	// At is the time of the last write. Kernel is the kernel's time for canaryd's own
	// transactions, including other families' share of them.
	At     time.Time
	Kernel time.Duration
	// Direct are the tables that were written by canaryd's own transactions. Each payload has
	// one transaction for all families. On nft, iptables-restore wrote all other tables. On
	// legacy the list is empty.
	Direct []rules.TableName
	// Detour is the reason for the other tables; nil if the direct path was not requested. On
	// legacy it is the reason for the scripts that x_tables refused.
	Detour error
}
