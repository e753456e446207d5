package nft

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A RawTable has the chains of one table with their rules as bytes, at one genid.
type RawTable struct {
	ID     tableid.TableID
	Genid  uint32
	Chains RawChains
}

// RawChains are the chains of a RawTable.
type RawChains interface {
	// Chain returns the chain of that name; false if there is none.
	Chain(name string) (RawChain, bool)
	// Version returns the Version of a chain; 0 also if there is none, or its rules are left out.
	Version(name string) uint64
	// Bases returns the names of the chains with a hook, in order.
	Bases() []string
}

// A ChainMap is RawChains in memory, by name.
type ChainMap map[string]RawChain

// Chain implements RawChains.
func (m ChainMap) Chain(name string) (RawChain, bool) {
	c, ok := m[name]
	return c, ok
}

// Version implements RawChains.
func (m ChainMap) Version(name string) uint64 {
	if c := m[name]; !c.LeftOut {
		return c.Version
	}
	return 0
}

// Bases implements RawChains.
func (m ChainMap) Bases() []string {
	return basesOf(m, func(c RawChain) bool { return c.Base != nil })
}

// basesOf returns the names of the chains with a hook.
func basesOf[C any](chains map[string]C, is func(C) bool) (names []string) {
	for name, c := range chains {
		if is(c) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// A RawChain is one chain of a RawTable.
type RawChain struct {
	Name string // the table's own text: keep no other one
	Base *Chain // nil for a chain without a hook
	// Version changes whenever the chain's rules may have changed; 0: unknown.
	Version uint64
	// LeftOut: the rules are too many to be kept, so Rules is empty.
	LeftOut bool
	// Rules are the rules in order. A rule's bytes are valid until the next rule of
	// the table.
	Rules iter.Seq[Rule]
}

// RawTable returns the mirror's content of a table, as of the last Read, which
// returned genid; false if there is no such table. rule returns a rule's bytes by
// its number, in room if they fit. The result is valid until the turn ends.
func (f *FamilyMirror) RawTable(table string, genid uint32, rule func(id RuleID, room []byte) Rule) (RawTable, bool) {
	t := f.tables[table]
	if t == nil {
		return RawTable{}, false
	}
	return RawTable{ID: f.cfg.Family.Table(table), Genid: genid, Chains: &mirrored{table: t, rule: rule}}, true
}

// mirrored are the RawChains of a mirror. A table of 16,000 chains is not listed for a few changes.
type mirrored struct {
	table *mirrorTable
	rule  func(id RuleID, room []byte) Rule
	room  []byte // of all chains
}

func (m *mirrored) Chain(name string) (RawChain, bool) {
	c := m.table.chains[name]
	if c == nil {
		return RawChain{}, false
	}
	return RawChain{Name: c.name, Base: c.Base, Version: m.Version(name), LeftOut: c.out != nil, Rules: func(yield func(Rule) bool) {
		for _, id := range c.IDs {
			r := m.rule(id, m.room)
			if m.room = r.Expressions; !yield(r) {
				return
			}
		}
	}}, true
}

// Version implements RawChains. The rules of a chain that is left out may have changed since.
func (m *mirrored) Version(name string) uint64 {
	if c := m.table.chains[name]; c != nil && c.out == nil {
		return c.version
	}
	return 0
}

func (m *mirrored) Bases() []string {
	return basesOf(m.table.chains, func(c *MirrorChain) bool { return c.Base != nil })
}

// rawReads limits how often RawTable begins again because another process commits
// meanwhile.
const rawReads = 5

// RawTable reads a table at one genid; false if there is no such table. The error
// is ErrInterrupted if other processes keep committing. All rules are in memory
// at once: a Mirror needs less.
func (c *Conn) RawTable(id tableid.TableID) (raw RawTable, found bool, err error) {
	for range rawReads {
		raw, found, err = c.rawTable(id)
		if !errors.Is(err, ErrInterrupted) {
			break
		}
	}
	return raw, found, Wrap(fmt.Sprintf("reading table %s", id), err)
}

// rawTable is one try of RawTable. It returns ErrInterrupted if a commit happened meanwhile,
// or if rules are missing.
func (c *Conn) rawTable(id tableid.TableID) (RawTable, bool, error) {
	chains := ChainMap{}
	raw := RawTable{ID: id, Chains: chains}
	var err error
	if raw.Genid, err = c.Genid(); err != nil {
		return raw, false, err
	}
	used := map[string]uint32{}
	err = c.EachChain(id.Family, func(chain Chain) error {
		if chain.Table != id.Name {
			return nil
		}
		used[chain.Name] += chain.Use
		of := RawChain{Name: chain.Name}
		if chain.Base {
			of.Base = &chain
		}
		chains[chain.Name] = of
		return nil
	})
	held := map[string][]Rule{}
	if err == nil {
		err = c.EachRuleIn(id.Family, id.Name, func(m RuleMessage) error {
			held[string(m.Chain)] = append(held[string(m.Chain)], m.Rule.Clone())
			return nil
		})
	}
	for name, of := range chains {
		of.Rules = slices.Values(held[name])
		chains[name] = of
	}
	after, again := c.Genid()
	switch {
	case err != nil:
		return raw, false, err
	case again != nil:
		return raw, false, again
	case after != raw.Genid || !complete(held, used):
		return raw, false, ErrInterrupted
	}
	found, err := c.HasTable(id.Family, id.Name)
	return raw, found, err
}

// complete reports whether the rules and jumps of the dump (held) account for the kernel's
// use count of every chain (used). If not, rawTable must read again. A transaction that was
// given up meanwhile may have hidden rules, and no genid says so (nf_tables_dump_rules,
// Linux 6.18).
func complete(held map[string][]Rule, used map[string]uint32) bool {
	seen := make(map[string]uint32, len(used))
	for name, rules := range held {
		seen[name] += uint32(len(rules))
		for _, r := range rules {
			_ = r.Each(func(e Expression) error {
				if to := e.Jump(); to != nil {
					seen[string(to)]++
				}
				return nil
			})
		}
	}
	for name, use := range used {
		if seen[name] != use {
			return false
		}
	}
	return true
}
