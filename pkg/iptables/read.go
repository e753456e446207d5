package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// Read reads the family in full, once, by executing iptables-save without -t:
// on legacy, naming a table would create it. A table that exists in the
// kernel but that iptables did not print is Unreadable, never absent: one rule
// written by nft makes iptables-nft-save leave out its whole table and still
// exit 0. Every other failure (privileges, the deadline, another exit code, a
// text that cannot be parsed) is an error. It may be called concurrently.
func (k *Kernel) Read(ctx context.Context, family rules.Family) (Snapshot, error) {
	if err := k.ready(ctx, family); err != nil {
		return Snapshot{}, err
	}
	digest, err := k.reader.digest(ctx, family)
	if err != nil {
		return Snapshot{}, err
	}
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
}

func (s saver) read(ctx context.Context, family rules.Family) (rules.Ruleset, map[rules.TableName]error, error) {
	path := s.tools[family].save
	res, err := command{path: path, timeout: s.timeout, env: s.env}.run(ctx)
	if err != nil {
		return nil, nil, err
	}
	if res.exit != 0 {
		return nil, nil, exitError(path, res)
	}
	set, unreadable, err := rules.Parse(bytes.NewReader(res.stdout))
	if err != nil {
		return nil, nil, fmt.Errorf("%s printed what cannot be read: %w", filepath.Base(path), err)
	}
	for table := range unreadable {
		delete(set, table)
	}
	return set, unreadable, nil
}
