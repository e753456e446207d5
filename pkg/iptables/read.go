package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Read returns what the family's tables hold. On nft it asks nf_tables for what
// changed since the last Read (see mirror), and executes iptables for the text of
// rules that it has not met before and cannot spell. Without iptables these are opaque.
// Chains and tables that did not change are those of the last Snapshot, so that they
// can be compared by their addresses.
//
// On legacy it asks x_tables for everything, and executes iptables-save only if
// there are rules of which no Session has learned the text.
//
// A table that exists in the kernel but that iptables cannot print is Unreadable,
// never absent. Every other failure (privileges, the deadline, another exit code, a
// text that cannot be parsed) is an error. It may be called concurrently.
func (k *Kernel) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if err := k.ready(ctx, family); err != nil {
		return Snapshot{}, err
	}
	if k.mirror != nil {
		return k.mirror.read(ctx, family)
	}
	seen, err := k.walk(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	return k.spell(ctx, family, seen, false)
}

// walk reads a family from x_tables.
func (k *Kernel) walk(ctx context.Context, family rules.Family) (xtFamily, error) {
	return k.reader.(xtReader).read(ctx, family, k.words[family], k.budgets[family])
}

// spell returns what was walked as a Snapshot. What it executes for that is learned
// if the xtables lock is held: without it, rules could come and go between two
// walks that are the same.
func (k *Kernel) spell(ctx context.Context, family rules.Family, seen xtFamily, locked bool) (Snapshot, error) {
	words := k.words[family]
	if k.budgets[family].shed() { // in these is the text of rules that are left out by now
		k.shelf.drop(family)
		defer words.purge(words.second())
	}
	if set, known := words.ruleset(seen, k.shelf.known(family)); known {
		k.shelf.put(family, set, time.Now())
		return Snapshot{Family: family, Tables: set, Unreadable: map[rules.TableName]error{}, Digest: seen.digest}, nil
	}
	return k.spellOut(ctx, family, seen, locked)
}

// save executes iptables-save and returns what it prints, without the rules of chains that are left
// out. It parses the text while it is printed, so that it is nowhere kept as a whole.
func (k *Kernel) save(ctx context.Context, family rules.Family) (rules.Ruleset, map[rules.TableName]error, error) {
	out := k.budgets[family].places()
	left := func(t rules.TableName, chain string, _ int) bool { return out[Place{Table: t, Chain: chain}] }
	if len(out) == 0 {
		left = nil
	}
	path := k.tools[family].save
	var set rules.Ruleset
	var unreadable map[rules.TableName]error
	text, printed := io.Pipe()
	parsed := make(chan error)
	go func() {
		var err error
		set, unreadable, err = rules.ParseSome(text, k.shelf.known(family), left)
		// The child is let print to its end: its exit code is the better
		// reason.
		_, drainErr := io.Copy(io.Discard, text)
		parsed <- errors.Join(err, drainErr)
	}()
	res, err := command{path: path, stdout: printed, timeout: k.cfg.ReadTimeout, env: k.childEnv()}.run(ctx)
	printed.Close()
	parseErr := <-parsed
	if err != nil {
		return nil, nil, err
	}
	if res.exit != 0 {
		return nil, nil, exitError(path, res)
	}
	if parseErr != nil {
		return nil, nil, fmt.Errorf("the output of %s cannot be read: %w", filepath.Base(path), parseErr)
	}
	for table := range unreadable {
		delete(set, table)
	}
	k.shelf.put(family, set, time.Now())
	return set, unreadable, nil
}
