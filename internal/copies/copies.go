// Package copies connects the loop with the standby: it defines their requests and answers about
// copies of tables, keeps the loop's state of each gate, and implements the standby on nft.
//
// [OpenNFT] opens a [Standby]. [Standby.Follow] makes the copies follow the tables that ought to be
// in force. After a flush [Standby.Gate] opens the gate of a copy, and shuts it once the rules are
// back. [Standby.Release] deletes a copy. A [Gate] records when its gate was open and for which
// flush, so that it never stays open for longer than [Most].
//
// Callers distinguish [ErrUnread], [ErrMoved] and [ErrOutdated], and the errors of pkg/standby.
// Only the loop's goroutine calls a Standby and a Gate.
package copies

import (
	"context"
	"errors"
	"time"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A Standby has a copy of each table that translates, iptables' nat or a native table, in a table
// of its own behind a gate. The copy translates what the table does not, but only while the gate is
// open.
//
// Each call may commit to nf_tables, as one of canaryd's own. The loop calls it in a step, or in a
// heal before it reads: a commit between a replay's read and its write would make that stale.
type Standby interface {
	// Follow brings copies to what ought to be in force, and says of each one its state. It writes
	// one of nat only where that is asked for, and else translates it.
	Follow(ctx context.Context, wants ...Want) map[tableid.TableID]Copy
	// Gate opens the gate, in one transaction with what the copy lacks, or without one if that is
	// nothing. Of nat it opens those hooks whose path lost something. Or it shuts it for all hooks,
	// for which it needs the ID only. With an error of shutting there is no table any more; the
	// error wraps standby.ErrNotBuilt if there was none.
	Gate(want Want, order Order) (Answer, error)
	// Release deletes the copy, if there is one.
	Release(id tableid.TableID) error
}

// A Want is the content of a table that ought to be in force.
type Want struct {
	ID     tableid.TableID
	Nat    Nat    // of iptables' nat
	Native Native // of a native table; without a Table it is iptables' nat
}

// A Nat is the part of iptables' nat that ought to be in force, and the digest of the read
// that showed that it is.
type Nat struct {
	Section rules.Section
	Digest  uint64
	// Known: this was translated already. Write: it is to be written now, and not only translated.
	Known, Write bool
}

// A Native is the content of a native table that ought to be in force, and its digest.
type Native struct {
	Table  *native.Table
	Digest native.Digest
}

// A Copy says what became of a copy.
type Copy struct {
	Chains   int // that it has
	Uncopied int // that accept what they get, because a rule of theirs cannot be copied
	// Unfinished: the copy is being built, and each call does a part of that, so that the loop may
	// look at the rules in between.
	Unfinished bool
	// Err is why there may be no copy; with ErrMoved or ErrUnread it is as it was.
	Err error
}

// An Order says what is to become of a gate.
type Order int

// The orders.
const (
	Shut Order = iota
	// Open opens the gate also if the kernel does not take what is outstanding.
	Open
	// OpenCurrent opens the gate only together with what is outstanding; if the kernel does not
	// take that, the error is ErrOutdated.
	OpenCurrent
)

// An Answer says what became of a gate.
type Answer struct {
	Open bool
	// Outdated says why the gate was opened without what is outstanding; nil: it was not.
	Outdated error
	Commits  int // that this took
	// Shut is when the gate was shut by its own limit, before it was asked for; zero: it was not.
	Shut time.Time
	// Barred says why hooks stay shut whose path lost something.
	Barred map[string]string
}

// ErrMoved: nat may hold by now what was not examined yet.
var ErrMoved = errors.New("another process has written since nat was examined")

// ErrOutdated: the copy cannot get what it lacks, and is not to be opened without that.
var ErrOutdated = errors.New("the copy lacks the latest rules")

// ErrUnread: nat could not be read.
var ErrUnread = errors.New("nat could not be read for the standby")

// Most is how long the gate is open for one loss: an owner may have removed by then what
// the copy still has.
const Most = 30 * time.Second

// Less is what the log says behind that the standby translates: nothing, unless its copy is out of
// date.
func (g Answer) Less() string {
	if g.Outdated == nil {
		return ""
	}
	return ", but its copy is out of date"
}

// Fields returns fields of a log line, with the reason of what less says.
func (g Answer) Fields(fields ...any) []any {
	if g.Outdated == nil {
		return fields
	}
	return append(fields, "reason", g.Outdated)
}
