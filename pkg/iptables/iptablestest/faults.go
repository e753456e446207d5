package iptablestest

import (
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// faults is what a test asked to go wrong.
type faults struct {
	reads, probes error
	readsNeedLock bool
	lockWait      time.Duration
	restores      int // how many more fail; negative is all
	reason        iptables.Reason
	partial       int // the table, counted from 1, at which the next restore fails
	lies          int
	swallow       string
	misread, as   string
	takes         time.Duration
	before        func()
}

// counts is what the Fake was asked to do.
type counts struct {
	stamps, urgentProbes, probes, reads, begins, restores int
}

// HoldLock takes the xtables lock on behalf of another program, waiting until
// it is free. Until release is called (once), Begin returns ErrLocked and
// FakeWriters wait. On nft nothing looks at the lock.
func (f *Fake) HoldLock() (release func()) {
	f.lock <- struct{}{}
	return f.releaseLock
}

// LockWait makes Begin wait that long for a held lock, as the real one does. At
// first it does not wait at all.
func (f *Fake) LockWait(d time.Duration) { f.change(func(t *faults) { t.lockWait = d }) }

// ReadsNeedLock makes Read, Probe, ProbeOnly and Stamp return ErrLocked on legacy while
// another program holds the lock, as "iptables-legacy -S" fails then.
func (f *Fake) ReadsNeedLock(yes bool) { f.change(func(t *faults) { t.readsNeedLock = yes }) }

// FailReads makes Read, a session's too, return err until FailReads(nil).
func (f *Fake) FailReads(err error) { f.change(func(t *faults) { t.reads = err }) }

// FailProbes makes Probe, ProbeOnly and Stamp return err until FailProbes(nil).
func (f *Fake) FailProbes(err error) { f.change(func(t *faults) { t.probes = err }) }

// FailRestores makes the next n restores of sessions write nothing and return a
// *RestoreError with this reason; a negative n means all, 0 none any more.
func (f *Fake) FailRestores(n int, reason iptables.Reason) {
	f.change(func(t *faults) { t.restores, t.reason = n, reason })
}

// PartialCommit makes a session's next restore fail at the k-th table of its
// payload, counted from 1, with ReasonOther: the tables before it are written.
func (f *Fake) PartialCommit(k int) { f.change(func(t *faults) { t.partial = k }) }

// Lie makes the next n restores of sessions write nothing and report success.
func (f *Fake) Lie(n int) { f.change(func(t *faults) { t.lies = n }) }

// Swallow makes each restore of a session whose text contains this write nothing and report
// success, as iptables-restore does with a line that it reads as an option of its own; "" ends
// that.
func (f *Fake) Swallow(text string) { f.change(func(t *faults) { t.swallow = text }) }

// Misread makes each restore of a session read one text as another, as iptables-legacy does with
// what it prints of "! -i +"; "" ends that.
func (f *Fake) Misread(text, as string) { f.change(func(t *faults) { t.misread, t.as = text, as }) }

// RestoreTakes makes every restore of a session last that long before it writes.
// As with the real Kernel, the end of the context does not cut it short.
func (f *Fake) RestoreTakes(d time.Duration) { f.change(func(t *faults) { t.takes = d }) }

// BeforeRestore registers fn to run in every restore of a session between the
// check that no process wrote since the read and the write itself; nil removes it.
// On nft what fn writes makes the restore raced. On legacy the session holds the
// lock meanwhile, so only Bypassing writers can write in fn, and no process notices.
func (f *Fake) BeforeRestore(fn func()) { f.change(func(t *faults) { t.before = fn }) }

func (f *Fake) change(set func(*faults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	set(&f.faults)
}

// DropTableFromReads puts a table, if it exists, into every Snapshot's
// Unreadable with err, as a native nft rule does; a nil err gives it back.
func (f *Fake) DropTableFromReads(family rules.Family, table rules.TableName, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(family) {
		return
	}
	f.unreadable[family.Table(table)] = err
}

// OnCommit registers fn to be called after every commit to nf_tables, a
// session's own too. On legacy nothing announces a commit. Writers that run at
// the same time may call it in either order.
func (f *Fake) OnCommit(fn func(nft.Commit)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onCommit = append(f.onCommit, fn)
}

// OnUnlock registers fn to be called whenever another process lets go of the xtables
// lock: a Writer after each table, HoldLock's release, a session's Close. It
// says nothing about whether anything was written, and is silent on nft but for
// HoldLock.
func (f *Fake) OnUnlock(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onUnlock = append(f.onUnlock, fn)
}

// Stamps returns how often Stamp was called.
func (f *Fake) Stamps() int { return f.count().stamps }

// Probes returns how often Probe was called.
func (f *Fake) Probes() int { return f.count().probes }

// ProbesOnly returns how often ProbeOnly was called.
func (f *Fake) ProbesOnly() int { return f.count().urgentProbes }

// Reads returns how often a full read was asked for, by sessions too.
func (f *Fake) Reads() int { return f.count().reads }

// Begins returns how often Begin was called.
func (f *Fake) Begins() int { return f.count().begins }

// Restores returns how often a session handed a payload to iptables-restore,
// successfully or not; a restore given up as stale is not counted.
func (f *Fake) Restores() int { return f.count().restores }

func (f *Fake) count() counts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.counts
}

// Payloads returns the payloads that Restores counted, for one family, in order.
func (f *Fake) Payloads(family rules.Family) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.payloads[family]...)
}
