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

// Read returns the content of the family's tables. On nft it reads only the changes since the
// last Read (see mirror). It executes iptables for the texts of new rules that it cannot spell.
// Without iptables these rules are opaque. Unchanged chains and tables are those of the last
// Snapshot, so that callers can compare them by address.
//
// On legacy it reads everything from x_tables, and executes iptables-save only for rules whose
// text no Session has learned.
//
// A table that exists in the kernel but that iptables cannot print is Unreadable, never absent.
// Every other failure (privileges, the deadline, another exit code, a text that cannot be
// parsed) is an error. Read may be called concurrently.
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

// spell returns the walked family as a Snapshot, for Read and a Session's Read. It learns
// printed texts only if the xtables lock is held (locked). Without the lock, the rules could
// change and change back between two walks.
func (k *Kernel) spell(ctx context.Context, family rules.Family, seen xtFamily, locked bool) (Snapshot, error) {
	words := k.words[family]
	if k.budgets[family].Shed() { // the cache and words have texts of rules that are left out by now
		k.cache.drop(family)
		defer words.purge(words.second())
	}
	if set, known := words.ruleset(seen, k.cache.known(family)); known {
		k.cache.put(family, set, time.Now())
		return Snapshot{Family: family, Tables: set, Unreadable: map[rules.TableName]error{}, Digest: seen.digest}, nil
	}
	return k.spellOut(ctx, family, seen, locked)
}

// save executes iptables-save and returns the parsed output, without the rules of chains that
// are left out. printWalked calls it on legacy for unknown texts. It parses during the output,
// so that the text is nowhere kept as a whole.
func (k *Kernel) save(ctx context.Context, family rules.Family) (rules.Ruleset, map[rules.TableName]error, error) {
	out := k.budgets[family].Left()
	left := func(t rules.TableName, chain string, _ int) bool {
		_, is := out[Place{Table: t, Chain: chain}]
		return is
	}
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
		set, unreadable, err = rules.ParseSome(text, k.cache.known(family), left)
		// The child may print to its end, because its exit code is the better reason.
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
	k.cache.put(family, set, time.Now())
	return set, unreadable, nil
}
