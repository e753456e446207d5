package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Read returns what the family's tables hold. On nft it asks nf_tables for what
// changed since the last Read (see mirror), and executes iptables for the text of
// rules that it has not met before. Chains and tables that did not change are
// those of the last Snapshot, so that they can be compared by their addresses.
//
// On legacy it asks x_tables for everything, and executes iptables-save only if
// there are rules of which no Session has learned the text. Elsewhere it executes
// iptables-save, once and without -t: on legacy, naming a table would create it. A
// table that exists in the kernel but that iptables cannot print is Unreadable,
// never absent: one rule written by nft makes iptables-nft-save leave out its whole
// table and still exit 0. Every other failure (privileges, the deadline, another
// exit code, a text that cannot be parsed) is an error. It may be called
// concurrently.
func (k *Kernel) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if err := k.ready(ctx, family); err != nil {
		return Snapshot{}, err
	}
	if k.mirror != nil {
		return k.mirror.read(ctx, family)
	}
	seen, err := k.see(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	return k.spell(ctx, family, seen, false)
}

// A sight is what can be told of a family without executing anything.
type sight struct {
	digest uint64
	walked *xtFamily // nil if the kernel may not be asked for everything
}

func (k *Kernel) see(ctx context.Context, family rules.Family) (sight, error) {
	if words := k.words[family]; words != nil {
		walked, err := k.reader.(xtReader).read(ctx, family, words, k.budgets[family])
		return sight{walked.digest, &walked}, err
	}
	digest, err := k.reader.digest(ctx, family)
	return sight{digest: digest}, err
}

// spell returns what was seen as a Snapshot. What it executes for that is learned
// if the xtables lock is held: without it, rules could come and go between two
// looks that are the same.
func (k *Kernel) spell(ctx context.Context, family rules.Family, seen sight, locked bool) (Snapshot, error) {
	words := k.words[family]
	if seen.walked == nil {
		return k.readText(ctx, family, seen.digest)
	}
	if k.budgets[family].shed() { // in these is the text of rules that are left out by now
		k.save.shelf.drop(family)
		defer words.purge(words.second())
	}
	if set, known := words.ruleset(*seen.walked, k.save.shelf.known(family)); known {
		k.save.shelf.put(family, set, time.Now())
		return Snapshot{Family: family, Tables: set, Unreadable: map[rules.TableName]error{}, Digest: seen.digest}, nil
	}
	return k.spellOut(ctx, family, seen, locked)
}

// readText is Read where the digest was taken before.
func (k *Kernel) readText(ctx context.Context, family rules.Family, digest uint64) (Snapshot, error) {
	set, unreadable, err := k.save.read(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	// Asked after the read: a table that appeared meanwhile is unknown, one
	// that went away is absent.
	exist, err := k.reader.tables(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
	for _, table := range exist {
		if _, printed := set[table]; !printed && unreadable[table] == nil {
			unreadable[table] = errNotPrinted
		}
	}
	return Snapshot{Family: family, Tables: set, Unreadable: unreadable, Digest: digest}, nil
}

var errNotPrinted = errors.New("exists in the kernel, but iptables-save does not print it")

// A saver executes iptables-save.
type saver struct {
	tools   map[rules.Family]tools
	timeout time.Duration
	env     []string
	shelf   *shelf
	// byTable: the kernel cannot be asked what a text stands for that is printed over several
	// lines, so each table is printed alone then.
	byTable bool
	// budgets say which chains' rules are not kept.
	budgets map[rules.Family]*budget
}

// read returns what iptables-save prints, without the rules of chains that are left out. Where only
// the text says how many rules there are, it is printed again when the choice has changed.
func (s saver) read(ctx context.Context, family rules.Family) (rules.Ruleset, map[rules.TableName]error, error) {
	const tries = 3
	for try := 1; ; try++ {
		count := newLineCount(s.budgets[family], s.byTable)
		set, unreadable, err := s.readOnce(ctx, family, count.skip())
		if err != nil {
			return nil, nil, err
		}
		if count.settled() || try == tries {
			for table := range unreadable {
				delete(set, table)
			}
			s.shelf.put(family, set, time.Now())
			return set, unreadable, nil
		}
		s.shelf.drop(family)
	}
}

// readOnce parses the text while it is printed, so that it is nowhere kept as a
// whole.
func (s saver) readOnce(ctx context.Context, family rules.Family, left func(rules.TableName, string, int) bool) (rules.Ruleset, map[rules.TableName]error, error) {
	path := s.tools[family].save
	var set rules.Ruleset
	var unreadable map[rules.TableName]error
	named := tableNames{}
	text, printed := io.Pipe()
	parsed := make(chan error)
	go func() {
		var err error
		set, unreadable, err = rules.ParseSome(text, s.shelf.known(family), left)
		// The child is let print to its end: its exit code is the better
		// reason.
		_, drainErr := io.Copy(io.Discard, text)
		parsed <- errors.Join(err, drainErr)
	}()
	res, err := command{path: path, stdout: io.MultiWriter(printed, &named), timeout: s.timeout, env: s.env}.run(ctx)
	printed.Close()
	parseErr := <-parsed
	if err != nil {
		return nil, nil, err
	}
	if res.exit != 0 {
		return nil, nil, exitError(path, res)
	}
	if parseErr != nil && s.byTable {
		if set, unreadable, err = s.readTables(ctx, path, named.found); err != nil {
			return nil, nil, err
		}
	} else if parseErr != nil {
		return nil, nil, fmt.Errorf("%s printed what cannot be read: %w", filepath.Base(path), parseErr)
	}
	return set, unreadable, nil
}

// readTables has each table printed alone. One whose text cannot be read is unreadable.
func (s saver) readTables(ctx context.Context, path string, names []rules.TableName) (rules.Ruleset, map[rules.TableName]error, error) {
	set, unreadable := rules.Ruleset{}, map[rules.TableName]error{}
	for _, name := range names {
		res, err := command{path: path, args: []string{"-t", string(name)}, timeout: s.timeout, env: s.env}.run(ctx)
		if err != nil {
			return nil, nil, err
		}
		if res.exit != 0 {
			return nil, nil, exitError(path, res)
		}
		if set[name], err = rules.ParseTable(bytes.NewReader(res.stdout), name); err != nil {
			delete(set, name)
			unreadable[name] = fmt.Errorf("%s printed what cannot be read: %w", filepath.Base(path), err)
		}
	}
	return set, unreadable, nil
}

// A tableNames finds the tables that a text names, while it is written. A rule over several lines
// can name one more: that one is empty, or does not exist, and is printed as such.
type tableNames struct {
	found []rules.TableName
	line  []byte // the beginning of the last line
}

func (n *tableNames) Write(text []byte) (int, error) {
	const most = 16
	for _, c := range text {
		switch {
		case c != '\n':
			if len(n.line) < most {
				n.line = append(n.line, c)
			}
			continue
		case len(n.line) > 1 && n.line[0] == '*':
			name := rules.TableName(n.line[1:])
			if slices.Contains(rules.AllTables(), name) && !slices.Contains(n.found, name) {
				n.found = append(n.found, name)
			}
		}
		n.line = n.line[:0]
	}
	return len(text), nil
}
