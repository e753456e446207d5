package iptablestest

import (
	"context"
	"errors"
	"maps"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A Writer is another program that writes to a Fake's tables: a flusher, or an owner of chains.
// On legacy each of its writes first waits for the xtables lock without limit, as the real
// programs do, unless it is Bypassing. A failed write leaves the table unchanged. Restore and
// RestoreNoflush fail with *RestoreError, the others with plain errors, and all with ErrNoFamily
// for a missing family. A Writer may be used from several goroutines.
type Writer struct {
	fake   *Fake
	pid    uint32
	comm   string
	bypass bool
}

// errNFTOnly is the error on a backend without this operation.
var errNFTOnly = errors.New("only nft can do this")

// As returns a writer whose commits have this process ID and name.
func (w Writer) As(pid uint32, comm string) Writer {
	w.pid, w.comm = pid, cut(comm)
	return w
}

// cut shortens a program's name as the kernel does.
func cut(name string) string { return name[:min(len(name), 15)] }

// Bypassing returns a writer that ignores the xtables lock, like a program with another
// XTABLES_LOCKFILE. OnUnlock does not report it.
func (w Writer) Bypassing() Writer {
	w.bypass = true
	return w
}

// Restore replaces each table in text, as iptables-restore does. Every table is one commit;
// tables before a refused one stay written.
func (w Writer) Restore(family rules.Family, text string) error {
	return w.restore(family, text, false)
}

// RestoreNoflush merges text into the tables, as "iptables-restore --noflush" does. It knows
// declarations and -A, -I, -R, -D, -C, -F, -X, -N, -P.
func (w Writer) RestoreNoflush(family rules.Family, text string) error {
	return w.restore(family, text, true)
}

func (w Writer) restore(family rules.Family, text string, noflush bool) error {
	r := run{f: w.fake, family: family, noflush: noflush, by: w.author(), lock: w.takeLock}
	return r.run(text)
}

func (w Writer) author() nft.Commit { return nft.Commit{PID: w.pid, Comm: w.comm} }

func (w Writer) takeLock() (release func()) {
	if w.bypass || w.fake.backend() == iptables.NFT {
		return func() {}
	}
	// The background context never ends and the wait has no limit.
	_ = w.fake.takeLock(context.Background(), -1)
	return w.fake.releaseLock
}

// Flush is "iptables -t TABLE -F [CHAIN]": it deletes the rules and keeps the chains. An empty
// chain means all. A flush without rules is no commit.
func (w Writer) Flush(family rules.Family, table rules.TableName, chain string) error {
	return w.one(family, table, "-F", chain)
}

// DeleteChains is "iptables -t TABLE -X": it deletes all user's chains. It fails and deletes
// none if one has rules or a rule jumps to it. On nft it also deletes built-in chains that are
// empty and accept.
func (w Writer) DeleteChains(family rules.Family, table rules.TableName) error {
	return w.one(family, table, "-X")
}

// SetPolicy is "iptables -t TABLE -P CHAIN POLICY".
func (w Writer) SetPolicy(family rules.Family, table rules.TableName, chain, policy string) error {
	return w.one(family, table, "-P", chain, policy)
}

// one runs a single command of the iptables program.
func (w Writer) one(family rules.Family, table rules.TableName, words ...string) error {
	line := ""
	for _, word := range words {
		line += rules.Quote(word) + " "
	}
	if words[len(words)-1] == "" {
		line = words[0]
	}
	var refused *iptables.RestoreError
	err := w.restore(family, "*"+string(table)+"\n"+line+"\nCOMMIT\n", true)
	if errors.As(err, &refused) {
		return errors.New(tool(family) + " refused: " + refused.Stderr)
	}
	return err
}

// FlushTable is "nft flush table": it deletes every rule of the table and keeps the chains. It
// fails on legacy and for a missing table.
func (w Writer) FlushTable(family rules.Family, table rules.TableName) error {
	return w.native(family, table, func(t *rules.Table) *rules.Table {
		t = copyOf(t)
		for i := range t.Chains {
			t.Chains[i].Rules = nil
		}
		return t
	})
}

// DeleteTable is "nft delete table". It fails on legacy and for a missing table.
func (w Writer) DeleteTable(family rules.Family, table rules.TableName) error {
	return w.native(family, table, func(*rules.Table) *rules.Table { return nil })
}

func (w Writer) native(family rules.Family, table rules.TableName, change func(*rules.Table) *rules.Table) error {
	f := w.fake
	f.mu.Lock()
	err := f.canNative(family)
	old := f.tables[family.Table(table)]
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
	if f.backend() != iptables.NFT {
		return errNFTOnly
	}
	if !f.has(family) {
		return iptables.ErrNoFamily
	}
	return nil
}

// FlushRuleset is "nft flush ruleset": it deletes all tables of both families in one commit, if
// there are any. It fails on legacy.
func (w Writer) FlushRuleset() error {
	f := w.fake
	f.mu.Lock()
	if f.backend() != iptables.NFT {
		f.mu.Unlock()
		return errNFTOnly
	}
	found, by, before := false, w.author(), maps.Clone(f.tables)
	by.Genid = f.genid + 1
	for id, t := range f.tables {
		found = true
		f.take(by, id.Family, id.Name, t, nil)
	}
	clear(f.tables)
	announce := func() {}
	if found {
		f.keepBefore(by, before)
		announce = f.publish(f.families[0], nil, w.author())
	}
	f.mu.Unlock()
	announce()
	return nil
}
