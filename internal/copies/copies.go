// Package copies connects the loop with the standby. It defines their requests and answers
// about copies of tables, keeps the loop's state of each gate, and implements the standby on
// nft.
//
// [OpenNFT] opens a [Standby]. [Standby.Follow] makes the copies follow the tables that ought to be
// in force. After a flush [Standby.Gate] opens the gate of a copy, and shuts it once the rules are
// back. [Standby.Release] deletes a copy. A [Gate] records when its gate was open and for which
// flush, so that it never stays open for longer than [Most].
//
// Callers distinguish [ErrUnread], [ErrMoved] and [ErrOutdated], and the errors of pkg/standby.
// Only the loop's goroutine calls a Standby and a Gate. Another goroutine runs a [Write], because
// the kernel takes 40 ms and more for one at 5,000 services.
package copies

import (
	"context"
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Standby has a copy of each table that translates, iptables' nat or a native table, in a
// table of its own behind a gate. The copy translates packets that the table leaves
// untranslated, but only while the gate is open.
//
// Each call may commit to nf_tables, and the commit counts as canaryd's own. The loop calls it
// in a step, or in a heal before its read. A commit between a replay's read and its write would
// make the write stale.
type Standby interface {
	// Follow translates the content that ought to be in force. It returns the state of each copy,
	// and the Write of copies that need one; nil: none does. A copy of nat is written only if the
	// Want requests it. Until the Write is taken, the loop may call Gate only.
	Follow(ctx context.Context, wants ...Want) (map[tableid.TableID]Copy, Write)
	// Gate opens or shuts the gate of a copy. It opens the gate in the same transaction that
	// adds the copy's missing rules, if any are missing. If a Write is just adding them, it opens
	// at once. For nat it opens only the hooks whose path lost something. Shutting shuts all
	// hooks and needs the ID only. If shutting fails, the table is gone; the error wraps
	// standby.ErrNotBuilt if there was none before.
	Gate(want Want, order Order) (Answer, error)
	// Release deletes the copy, if there is one.
	Release(id tableid.TableID) error
}

// A Write brings translated copies into the kernel.
type Write interface {
	// Run writes. One goroutine calls it, once.
	Run()
	// Take takes up the result, and returns the state of each written copy. The loop's goroutine
	// calls it after Run.
	Take() map[tableid.TableID]Copy
}

// A Want is the content of a table that ought to be in force.
type Want struct {
	ID     tableid.TableID
	Nat    Nat    // of iptables' nat
	Native Native // of a native table; without a Table it is iptables' nat
}

// A Nat is the part of iptables' nat that ought to be in force, and the digest of the read that
// showed it in force.
type Nat struct {
	Section rules.Section
	Digest  uint64
	// Known means that it was translated already. Write means that Follow must write it now,
	// and not only translate it.
	Known, Write bool
}

// A Native is the content of a native table that ought to be in force, and its digest.
type Native struct {
	Table  *native.Table
	Digest native.Digest
}

// A Copy is the state of a copy after Follow.
type Copy struct {
	Chains   int // that it has
	Uncopied int // that only accept packets, because a rule cannot be copied
	// Unfinished means that the copy is still being built. Each call does a part of that, so
	// that the loop can look at the rules in between.
	Unfinished bool
	// Writing means that it is only translated: the Write of Follow brings it into the kernel.
	Writing bool
	// Err is why there may be no copy; with ErrMoved or ErrUnread the copy is unchanged.
	Err error
}

// An Order is an order for a gate.
type Order int

// The orders.
const (
	Shut Order = iota
	// Open opens the gate even if the kernel does not take the outstanding changes.
	Open
	// OpenCurrent opens the gate only together with the outstanding changes. If the kernel does
	// not take them, the error is ErrOutdated.
	OpenCurrent
)

// An Answer is the result of a call of Gate.
type Answer struct {
	Open bool
	// Outdated is why the gate was opened without the outstanding changes; nil if it was not.
	Outdated error
	Commits  int // the number of commits that this took
	// Shut is when the gate's own limit had already shut it; zero if it had not.
	Shut time.Time
	// KeptShut has the reasons why hooks stay shut although their path lost something.
	KeptShut map[string]string
}

// ErrMoved means that nat may have changed since it was examined.
var ErrMoved = errors.New("another process has written since nat was examined")

// ErrOutdated means that the copy cannot get its missing rules, and must not be opened without
// them.
var ErrOutdated = errors.New("the copy lacks the latest rules")

// ErrUnread means that nat could not be read.
var ErrUnread = errors.New("nat could not be read for the standby")

// Most is how long the gate may be open for one loss. After that, an owner may have removed
// rules that the copy still has.
const Most = 30 * time.Second

// Less is the remark of the log line about an opening that the standby's copy is out of date;
// "" if it is not.
func (g Answer) Less() string {
	if g.Outdated == nil {
		return ""
	}
	return ", but its copy is out of date"
}

// Fields returns fields of a log line about an opening, with the reason for the remark of Less.
func (g Answer) Fields(fields ...any) []any {
	if g.Outdated == nil {
		return fields
	}
	return append(fields, "reason", g.Outdated)
}
