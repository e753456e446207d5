package iptablestest

import (
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// faults holds the faults that a test requested.
type faults struct {
	reads, probes error
	readsNeedLock bool
	lockWait      time.Duration
	restores      int // the remaining failures; negative is all
	reason        iptables.Reason
	partial       int // the table, counted from 1, at which the next restore fails
	lies          int
	swallow       string
	misread, as   string
	takes         time.Duration
	before        func()
}

// counts counts the calls of the Fake's methods.
type counts struct {
	stamps, urgentProbes, probes, reads, begins, restores int
}

// HoldLock takes the xtables lock for another program, and waits until it is free. Until the
// only call of release, Begin returns ErrLocked and Writers wait. On nft the lock has no effect.
func (f *Fake) HoldLock() (release func()) {
	f.lock <- struct{}{}
	return f.releaseLock
}

// LockWait makes Begin wait that long for a held lock, as the Kernel does. By default it does
// not wait.
func (f *Fake) LockWait(d time.Duration) { f.change(func(t *faults) { t.lockWait = d }) }

// ReadsNeedLock makes Read, Probe, ProbeOnly and Stamp return ErrLocked on legacy while another
// program holds the lock. "iptables-legacy -S" fails like this.
func (f *Fake) ReadsNeedLock(yes bool) { f.change(func(t *faults) { t.readsNeedLock = yes }) }

// FailReads makes Read, also a session's, return err until FailReads(nil).
func (f *Fake) FailReads(err error) { f.change(func(t *faults) { t.reads = err }) }

// FailProbes makes Probe, ProbeOnly and Stamp return err until FailProbes(nil).
func (f *Fake) FailProbes(err error) { f.change(func(t *faults) { t.probes = err }) }

// FailRestores makes the next n restores of sessions write nothing and return a *RestoreError
// with this reason. A negative n means all, 0 ends the fault.
func (f *Fake) FailRestores(n int, reason iptables.Reason) {
	f.change(func(t *faults) { t.restores, t.reason = n, reason })
}

// PartialCommit makes a session's next restore fail at the k-th table of its payload, counted
// from 1, with ReasonOther. The tables before it are written.
func (f *Fake) PartialCommit(k int) { f.change(func(t *faults) { t.partial = k }) }

// Lie makes the next n restores of sessions write nothing and report success.
func (f *Fake) Lie(n int) { f.change(func(t *faults) { t.lies = n }) }

// Swallow makes each restore of a session whose text contains this write nothing and report
// success. iptables-restore does that with a line that it reads as an option of its own. "" ends
// the fault.
func (f *Fake) Swallow(text string) { f.change(func(t *faults) { t.swallow = text }) }

// Misread makes each restore of a session read one text as another, as iptables-legacy does with
// its own output for "! -i +". "" ends the fault.
func (f *Fake) Misread(text, as string) { f.change(func(t *faults) { t.misread, t.as = text, as }) }

// RestoreTakes makes every restore of a session last that long before it writes. As with the
// Kernel, the end of the context does not stop it.
func (f *Fake) RestoreTakes(d time.Duration) { f.change(func(t *faults) { t.takes = d }) }

// BeforeRestore registers fn, which runs in every restore of a session, between the check for
// other writes and its own write; nil removes it. On nft, a write in fn makes the restore raced.
// On legacy the session holds the lock meanwhile, so only Bypassing writers can write in fn,
// unseen.
func (f *Fake) BeforeRestore(fn func()) { f.change(func(t *faults) { t.before = fn }) }

func (f *Fake) change(set func(*faults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	set(&f.faults)
}

// DropTableFromReads puts a table, if it exists, into every Snapshot's Unreadable with err, as a
// native nft rule does. A nil err makes it readable again.
func (f *Fake) DropTableFromReads(family rules.Family, table rules.TableName, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(family) {
		return
	}
	f.unreadable[family.Table(table)] = err
}

// OnCommit registers fn, which is called after every commit to nf_tables, also a session's own.
// On legacy no commit is announced. Writers that run at the same time may call it in either
// order.
func (f *Fake) OnCommit(fn func(nft.Commit)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onCommit = append(f.onCommit, fn)
}

// OnUnlock registers fn, which is called at every release of the xtables lock: by a Writer after
// each table, HoldLock's release, or a session's Close. A call does not prove a write. On nft
// only HoldLock causes it.
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

// Reads returns the number of full reads, including those by sessions.
func (f *Fake) Reads() int { return f.count().reads }

// Begins returns how often Begin was called.
func (f *Fake) Begins() int { return f.count().begins }

// Restores returns how often a session executed iptables-restore with a payload, successfully or
// not. It does not count stale restores.
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
