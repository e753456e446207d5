package standby

import (
	"errors"
	"fmt"
	"iter"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A building is a first build in progress. Each step sends one more transaction.
type building struct {
	copy *Copy
	next func() (struct{}, bool)
	stop func()
	err  error // valid once next reports false
}

// errGivenUp ends a build that is no longer wanted.
var errGivenUp = errors.New("the build was given up")

// step continues the table's first build by one transaction, or begins it, and reports whether
// more is to be done. PutPiece calls it until the table is built. A newer copy is written as a
// difference, once the build is done. The caller has locked s.
func (s *Standby) step(c *Copy) (more bool, err error) {
	b := s.building[c.ID]
	if b == nil {
		if t := s.left[c.ID]; t != nil {
			if err := s.remove(t); err != nil {
				return false, err
			}
		}
		b = &building{copy: c}
		b.next, b.stop = iter.Pull(func(yield func(struct{}) bool) {
			b.err = s.build(c, func() error {
				if !yield(struct{}{}) {
					return errGivenUp
				}
				return nil
			})
		})
		s.building[c.ID] = b
	}
	if _, more = b.next(); more {
		return true, nil
	}
	delete(s.building, c.ID)
	return b.err == nil && b.copy != c, b.err
}

// giveUp removes the part of a table that was built so far, if a build is in progress. Remove
// and close call it. The error is that of the removal. The caller has locked s.
func (s *Standby) giveUp(id tableid.TableID) error {
	b := s.building[id]
	if b == nil {
		return nil
	}
	b.stop()
	delete(s.building, id)
	return b.err
}

// build makes the empty table first, so that its refusal says why, and then its content. step
// runs it in pieces: pause waits between two transactions until the next step. An error of
// pause ends the build and removes the table. s.tables has it only when it is whole.
func (s *Standby) build(c *Copy, pause func() error) error {
	if err := s.fits(c); err != nil {
		return err
	}
	t := &table{id: c.ID, name: NameOf(c.ID), held: &Copy{ID: c.ID}, gated: true, open: map[Hook]bool{}, handles: map[string][]uint64{}}
	if err := s.make(t); err != nil {
		return err
	}
	fill := s.fill
	if c.native != nil {
		fill = s.fillNative
	}
	if err := fill(t, c, pause); errors.Is(err, errGivenUp) {
		return s.remove(t)
	} else if err != nil {
		return errors.Join(err, s.remove(t))
	}
	s.tables[c.ID] = t
	return nil
}

// These are the main costs of a copy in the kernel's memory: 41,434 rules in 15,997 chains took 26
// MiB (Linux 6.18). A set of a native table counts with the elements that it has room for.
const (
	ruleBytes = 700
	setBytes  = 8 << 10
	// roomFor is the free memory that a build requires, as a multiple of its own. The kernel has a
	// changed part twice until it has freed the old one, and canaryd itself needs some.
	roomFor = 2
	// roomLeast is for messages in transit.
	roomLeast = 4 << 20
)

// fits returns ErrMemory if there is too little memory for a copy. build calls it before it
// writes anything: the kernel would kill canaryd instead of refusing the table.
func (s *Standby) fits(c *Copy) error {
	if s.cfg.Room == nil {
		return nil
	}
	_, rules := c.Counts()
	need := int64(rules) * ruleBytes
	if c.native != nil {
		need += int64(len(c.native.Sets)) * setBytes
	}
	if need = roomFor*need + roomLeast; s.cfg.Room() < need {
		return fmt.Errorf("%w: the limit of the control group leaves %d MiB, and it takes %d", ErrMemory, max(s.cfg.Room(), 0)>>20, need>>20)
	}
	return nil
}

// fill writes the content of nat's copy into its empty table: the chains, then their rules,
// then the base chains. build calls it. It also decides by the number of rules whether the
// table gets gates. pause runs between transactions; its error ends the fill.
func (s *Standby) fill(t *table, c *Copy, pause func() error) error {
	_, rules := c.Counts()
	t.gated = rules <= s.cfg.GateMost
	w := &writer{s: s, t: t, next: c, first: true, pause: pause}
	if err := w.write(); err != nil {
		return err
	}
	t.took, t.bytes = w.took, w.bytes
	t.hold(c)
	s.readHandles(t)
	return nil
}
