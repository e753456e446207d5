package iptables

import (
	"context"
	"errors"

	"github.com/canaryd/canaryd/pkg/rules"
)

// A FakeWriter is another program that writes to a Fake's tables: a flusher, an
// owner of chains. On legacy each of its writes first waits, without limit, for
// the xtables lock, as the real programs do, unless it is Bypassing. A
// write that fails leaves the table as it was; Restore and RestoreNoflush fail
// with *RestoreError, the others with plain errors, all with ErrNoFamily for a
// family that is not there. It may be used from several goroutines.
type FakeWriter struct {
	fake   *Fake
	pid    uint32
	comm   string
	bypass bool
}

// errFakeNFTOnly is returned where a backend has no such operation.
var errFakeNFTOnly = errors.New("only nft can do this")

// As returns a writer whose commits carry this process ID and name.
func (w FakeWriter) As(pid uint32, comm string) FakeWriter {
	w.pid, w.comm = pid, fakeComm(comm)
	return w
}

// fakeComm cuts a program's name as the kernel does.
func fakeComm(name string) string { return name[:min(len(name), 15)] }

// Bypassing returns a writer that pays no heed to the xtables lock, like one
// with another XTABLES_LOCKFILE; OnUnlock does not hear of it.
func (w FakeWriter) Bypassing() FakeWriter {
	w.bypass = true
	return w
}

// Restore does what iptables-restore does: it replaces each table in text.
// Every table is one commit; tables before a refused one stay written.
func (w FakeWriter) Restore(family rules.Family, text string) error {
	return w.restore(family, text, false)
}

// RestoreNoflush does what "iptables-restore --noflush" does: it merges text
// into the tables. It knows declarations and -A, -I, -R, -D, -C, -F, -X, -N, -P.
func (w FakeWriter) RestoreNoflush(family rules.Family, text string) error {
	return w.restore(family, text, true)
}

func (w FakeWriter) restore(family rules.Family, text string, noflush bool) error {
	r := fakeRun{f: w.fake, family: family, noflush: noflush, by: w.author(), lock: w.takeLock}
	return r.run(text)
}

func (w FakeWriter) author() Commit { return Commit{PID: w.pid, Comm: w.comm} }

func (w FakeWriter) takeLock() (release func()) {
	if w.bypass || w.fake.backend() == NFT {
		return func() {}
	}
	// The background context never ends and the wait has no limit.
	_ = w.fake.takeLock(context.Background(), -1)
	return w.fake.releaseLock
}

// Flush does "iptables -t TABLE -F [CHAIN]": the rules go, the chains stay. An
// empty chain means all. A flush of nothing is no commit.
func (w FakeWriter) Flush(family rules.Family, table rules.TableName, chain string) error {
	return w.one(family, table, "-F", chain)
}

// DeleteChains does "iptables -t TABLE -X": it deletes all chains of users', or
// fails and deletes none if one of them has rules or is jumped to. On nft
// it also deletes built-in chains that are empty and accept.
func (w FakeWriter) DeleteChains(family rules.Family, table rules.TableName) error {
	return w.one(family, table, "-X")
}

// SetPolicy does "iptables -t TABLE -P CHAIN POLICY".
func (w FakeWriter) SetPolicy(family rules.Family, table rules.TableName, chain, policy string) error {
	return w.one(family, table, "-P", chain, policy)
}

// one runs a single command of the iptables program.
func (w FakeWriter) one(family rules.Family, table rules.TableName, words ...string) error {
	line := ""
	for _, word := range words {
		line += rules.Quote(word) + " "
	}
	if words[len(words)-1] == "" {
		line = words[0]
	}
	var refused *RestoreError
	err := w.restore(family, "*"+string(table)+"\n"+line+"\nCOMMIT\n", true)
	if errors.As(err, &refused) {
		return errors.New(fakeTool(family) + " refused: " + refused.Stderr)
	}
	return err
}

// FlushTable does "nft flush table": every rule of the table goes, the chains
// stay. It fails on legacy and if there is no such table.
func (w FakeWriter) FlushTable(family rules.Family, table rules.TableName) error {
	return w.native(family, table, func(t *rules.Table) *rules.Table {
		t = fakeSorted(t)
		for i := range t.Chains {
			t.Chains[i].Rules = nil
		}
		return t
	})
}

// DeleteTable does "nft delete table". It fails on legacy and if there is no such
// table.
func (w FakeWriter) DeleteTable(family rules.Family, table rules.TableName) error {
	return w.native(family, table, func(*rules.Table) *rules.Table { return nil })
}

func (w FakeWriter) native(family rules.Family, table rules.TableName, change func(*rules.Table) *rules.Table) error {
	f := w.fake
	f.mu.Lock()
	err := f.canNative(family)
	old := f.tables[family][table]
	if err == nil && old == nil {
		err = errors.New("no such table")
	}
	if err != nil {
		f.mu.Unlock()
		return err
	}
	announce := f.publish(family, map[rules.TableName]*rules.Table{table: change(old)}, w.author())
	f.mu.Unlock()
	announce()
	return nil
}

func (f *Fake) canNative(family rules.Family) error {
	if f.backend() != NFT {
		return errFakeNFTOnly
	}
	if !f.has(family) {
		return ErrNoFamily
	}
	return nil
}

// FlushRuleset does "nft flush ruleset": all tables of both families vanish in
// one commit, if there are any. It fails on legacy.
func (w FakeWriter) FlushRuleset() error {
	f := w.fake
	f.mu.Lock()
	if f.backend() != NFT {
		f.mu.Unlock()
		return errFakeNFTOnly
	}
	found := false
	for _, family := range f.families {
		if len(f.tables[family]) > 0 {
			found = true
			clear(f.tables[family])
		}
	}
	announce := func() {}
	if found {
		announce = f.publish(f.families[0], nil, w.author())
	}
	f.mu.Unlock()
	announce()
	return nil
}
