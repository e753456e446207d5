package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file splits a legacy table into chains, changes them by a script, and joins them again.
// iptables-legacy does the same in its memory for each command.

// An xtContent is a table that was read. Its slices point into the read bytes.
type xtContent struct {
	layout xtLayout
	family rules.Family
	info   xtInfo // the shape that was read
	chains []*xtPieces
	named  map[string]*xtPieces // the chains by name
	end    xtPiece              // the entry behind all chains
}

// xtPieces are the entries of a chain.
type xtPieces struct {
	name  string
	hook  int      // of a built-in chain; else -1
	head  *xtPiece // of a user's chain; else nil
	rules []xtPiece
	tail  xtPiece // the policy, or RETURN
}

// An xtPiece is an entry. In place of the offset in a standard target it has the name goal, or
// falls.
type xtPiece struct {
	bytes []byte // nil for a rule of a script, until join makes them
	fresh *rules.Rule
	goal  string // the chain that it jumps to
	falls bool   // it has no target: the next entry follows
	was   int    // its number in the read table; -1 if it is new
}

// takeApart splits the entries of a table into chains, with the names of chains in place of
// the offsets in jumps. look and place call it, and join is its reverse. An error wraps
// errWalk: the bytes have another form than the kernel gives a table.
func takeApart(family rules.Family, info xtInfo, data []byte) (*xtContent, error) {
	c := &xtContent{layout: xtLayoutOf(family), family: family, info: info, named: map[string]*xtPieces{}}
	starts := map[int]string{} // offsets to which rules may jump
	var chain *xtPieces
	end := func() error {
		if chain == nil {
			return nil
		}
		last := len(chain.rules) - 1
		if last < 0 {
			return fmt.Errorf("%w: chain %s has no end", errWalk, chain.name)
		}
		chain.tail, chain.rules = chain.rules[last], chain.rules[:last]
		if e := c.entry(chain.tail); !e.isStandard || e.verdict() >= 0 {
			return fmt.Errorf("%w: chain %s does not end in a verdict", errWalk, chain.name)
		}
		return nil
	}
	for at, n := 0, 0; at < len(data); n++ {
		e, err := c.layout.entry(data, at)
		if err != nil {
			return nil, err
		}
		piece := xtPiece{bytes: e.whole, was: n}
		at += e.next
		name, begins := chainHead(e, info, at-e.next)
		if begins {
			if err := end(); err != nil {
				return nil, err
			}
			if e.isHead && name == xtError && at == len(data) {
				c.end = piece
				break
			}
			chain = &xtPieces{name: name, hook: -1}
			c.chains, c.named[name] = append(c.chains, chain), chain
			if e.isHead {
				chain.head, starts[at] = &piece, name
				continue
			}
			chain.hook = slices.Index(xtHooks[:], name)
		}
		if chain == nil {
			return nil, fmt.Errorf("%w: the table begins with rules of no chain", errWalk)
		}
		if e.isStandard && len(e.target) != xtStandardLen {
			return nil, fmt.Errorf("%w: a verdict of %d bytes in chain %s", errWalk, len(e.target), chain.name)
		}
		piece.falls = e.isStandard && e.verdict() == at
		chain.rules = append(chain.rules, piece)
	}
	if c.end.bytes == nil {
		return nil, fmt.Errorf("%w: the table has no end", errWalk)
	}
	return c, c.direct(starts)
}

// direct notes the chains that the rules jump to, in place of offsets; takeApart calls it.
// starts has the names of chains by the offset of their first rule.
func (c *xtContent) direct(starts map[int]string) error {
	for _, chain := range c.chains {
		for i := range chain.rules {
			piece := &chain.rules[i]
			e := c.entry(*piece)
			if !e.isStandard || e.verdict() < 0 || piece.falls {
				continue
			}
			goal, known := starts[e.verdict()]
			if !known {
				return fmt.Errorf("%w: a rule of chain %s jumps to no chain", errWalk, chain.name)
			}
			piece.goal = goal
		}
	}
	return nil
}

// entry splits a piece, which takeApart or newPiece has checked.
func (c *xtContent) entry(piece xtPiece) xtEntry {
	e, _ := c.layout.entry(piece.bytes, 0)
	return e
}

// remove removes and returns a user's chain, with all its rules; nil if there is none. Jumps to
// it must be removed, too. look and place take TextChain out by it, and apply drops chains.
func (c *xtContent) remove(name string) *xtPieces {
	at := slices.IndexFunc(c.chains, func(chain *xtPieces) bool { return chain.name == name && chain.head != nil })
	if at < 0 {
		return nil
	}
	delete(c.named, name)
	chain := c.chains[at]
	c.chains = slices.Delete(c.chains, at, at+1)
	return chain
}

// says returns the meaning of a piece: its bytes without counts and offsets, and its goal.
// Equal meanings are one rule for a Delete (apply) and for sum. It may use room.
func (c *xtContent) says(piece xtPiece, room []byte) []byte {
	plain := append(room[:0], piece.bytes...)
	c.layout.mask(plain)
	e, _ := c.layout.entry(plain, 0)
	if c.family == rules.IPv4 {
		e.eachMatch(maskWide)
		if !e.isStandard {
			maskWide(e.target)
		}
	}
	if piece.falls || piece.goal != "" {
		clear(e.target[xtExtDataAt : xtExtDataAt+4])
	}
	return append(plain, piece.goal...)
}

// raw returns a piece as the lexicon stores rules, for place.
func (c *xtContent) raw(piece xtPiece) nft.Rule {
	plain := c.says(xtPiece{bytes: piece.bytes}, nil)
	e, _ := c.layout.entry(plain, 0)
	return (&rawEntries{layout: c.layout}).rule(xtRule{entry: e, target: !piece.falls}, piece.goal)
}

// sum returns a checksum of the table's whole content, without counts. look notes it, and place
// compares it, to find a write of a process that ignores the lock.
func (c *xtContent) sum() uint64 {
	sum, room := newChecksum(), []byte(nil)
	add := func(piece xtPiece) {
		room = c.says(piece, room)
		sum.add(room)
	}
	for _, chain := range c.chains {
		sum.add([]byte(chain.name))
		for _, piece := range chain.rules {
			add(piece)
		}
		add(chain.tail)
	}
	return sum.value()
}

// errScript: a step of a script cannot be done.
var errScript = errors.New("the script does not fit the table")

// declare empties the user's chains of these names, or makes them as iptables does; place calls
// it. iptables keeps the user's chains sorted, and its search relies on that.
func (c *xtContent) declare(names []string) error {
	var fresh []*xtPieces
	for _, name := range slices.Sorted(slices.Values(names)) {
		if len(name) >= xtExtNameLen {
			return fmt.Errorf("%w: the name of chain %s is too long", errScript, name)
		}
		if chain := c.named[name]; chain != nil {
			chain.rules = nil
			continue
		}
		chain := c.layout.newChain(name)
		fresh, c.named[name] = append(fresh, chain), chain
	}
	all := make([]*xtPieces, 0, len(c.chains)+len(fresh))
	for _, chain := range c.chains {
		for chain.head != nil && len(fresh) > 0 && fresh[0].name < chain.name {
			all, fresh = append(all, fresh[0]), fresh[1:]
		}
		all = append(all, chain)
	}
	c.chains = append(all, fresh...)
	return nil
}

// newChain returns an empty user's chain.
func (l xtLayout) newChain(name string) *xtPieces {
	const titled = xtExtDataAt + 32 // sizeof(struct xt_error_target), aligned
	head := xtPiece{bytes: l.withTarget(titled), was: -1}
	copy(head.bytes[l.size+xtExtNameAt:], xtError)
	copy(head.bytes[l.size+xtExtDataAt:], name)
	tail := xtPiece{bytes: l.withTarget(xtStandardLen), was: -1}
	returns := int32(unix.NFT_RETURN)
	binary.NativeEndian.PutUint32(tail.bytes[l.size+xtExtDataAt:], uint32(returns))
	return &xtPieces{name: name, hook: -1, head: &head, tail: tail}
}

// apply does one step; place calls it. rule is its rule's piece, zero if it has no rule. After
// an error (errScript) the table is not replaced, and the script is refused.
func (c *xtContent) apply(step *Step, rule xtPiece) error {
	chain := c.named[step.Chain]
	if chain == nil {
		return fmt.Errorf("%w: there is no chain %s", errScript, step.Chain)
	}
	at := max(0, step.Index-1)
	switch step.Verb {
	case Append:
		chain.rules = append(chain.rules, rule)
		return nil
	case Insert:
		if at <= len(chain.rules) {
			chain.rules = slices.Insert(chain.rules, at, rule)
			return nil
		}
	case Delete:
		if step.Index == 0 {
			want, room := c.says(rule, nil), []byte(nil)
			at = slices.IndexFunc(chain.rules, func(p xtPiece) bool {
				if p.fresh != nil { // of an earlier step; it has no bytes yet
					return p.fresh.Equal(step.Rule)
				}
				room = c.says(p, room)
				return p.falls == rule.falls && bytes.Equal(room, want)
			})
		}
		if at >= 0 && at < len(chain.rules) {
			chain.rules = slices.Delete(chain.rules, at, at+1)
			return nil
		}
	case Flush:
		chain.rules = nil
		return nil
	case Drop:
		if len(chain.rules) == 0 && !c.leads(step.Chain) && c.remove(step.Chain) != nil {
			return nil
		}
	}
	return fmt.Errorf("%w: -%c %s %d cannot be done", errScript, step.Verb, step.Chain, step.Index)
}

// leads reports whether a rule jumps to the chain: then apply does not drop it.
func (c *xtContent) leads(to string) bool {
	return slices.ContainsFunc(c.chains, func(chain *xtPieces) bool {
		return slices.ContainsFunc(chain.rules, func(p xtPiece) bool { return p.goal == to || p.fresh != nil && p.fresh.Target == to })
	})
}

// join adds the changed table's entries to out, for replace, and returns its shape. For each
// entry, was has its number in the read table, or -1: replace gives it the counts of that entry.
// piece makes the bytes of a rule of the script. It is an error if a rule jumps to a missing chain.
func (c *xtContent) join(out *xtPages, piece func(*rules.Rule) (xtPiece, error)) (info xtInfo, was []int, err error) {
	type jump struct {
		at   int // of the verdict
		goal string
	}
	info = c.info
	first, starts, jumps := out.used, map[string]int{}, []jump(nil)
	add := func(p xtPiece) {
		if p.fresh != nil && err == nil {
			p, err = piece(p.fresh)
		}
		if err != nil {
			return
		}
		if err = out.add(p.bytes); err != nil {
			return
		}
		was = append(was, p.was)
		verdict := out.used - xtStandardLen + xtExtDataAt
		if p.falls {
			binary.NativeEndian.PutUint32(out.mem[verdict:], uint32(out.used-first))
		} else if p.goal != "" {
			jumps = append(jumps, jump{verdict, p.goal})
		}
	}
	for _, chain := range c.chains {
		if chain.head != nil {
			add(*chain.head)
			starts[chain.name] = out.used - first
		} else {
			info.hookEntry[chain.hook] = uint32(out.used - first)
		}
		for _, p := range chain.rules {
			add(p)
		}
		if chain.head == nil {
			info.underflow[chain.hook] = uint32(out.used - first)
		}
		add(chain.tail)
	}
	add(c.end)
	if err != nil {
		return info, nil, err
	}
	for _, j := range jumps {
		start, there := starts[j.goal]
		if !there {
			return info, nil, fmt.Errorf("%w: a rule jumps to chain %s, which does not exist", errScript, j.goal)
		}
		binary.NativeEndian.PutUint32(out.mem[j.at:], uint32(start))
	}
	info.entries, info.size = uint32(len(was)), uint32(out.used-first)
	return info, was, nil
}

// xtPages are bytes in memory of their own, which free gives back at once: a table of 5,000
// services takes 20 MB. The zero value is empty.
type xtPages struct {
	mem  []byte
	used int
}

// add appends bytes. Growing moves no byte. An error leaves the pages as they were.
func (p *xtPages) add(bytes []byte) (err error) {
	const few = 1 << 20
	mem := p.mem
	switch need := p.used + len(bytes); {
	case mem == nil:
		mem, err = unix.Mmap(-1, 0, max(few, need), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	case need > len(mem):
		mem, err = unix.Mremap(mem, max(2*len(mem), need), unix.MREMAP_MAYMOVE)
	}
	if err != nil {
		return fmt.Errorf("memory for a table: %w", err)
	}
	p.mem = mem
	p.used += copy(mem[p.used:], bytes)
	return nil
}

// free gives the memory back.
func (p *xtPages) free() {
	if p.mem != nil {
		_ = unix.Munmap(p.mem) // fails only for unmapped memory
	}
}

// withTarget returns an entry without conditions and with a target of that size, for declare.
func (l xtLayout) withTarget(size int) []byte {
	entry := make([]byte, l.size+size)
	binary.NativeEndian.PutUint16(entry[l.targetOffset:], uint16(l.size))
	binary.NativeEndian.PutUint16(entry[l.nextOffset:], uint16(len(entry)))
	binary.NativeEndian.PutUint16(entry[l.size:], uint16(size))
	return entry
}
