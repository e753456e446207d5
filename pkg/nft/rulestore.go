package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// A RuleID names a rule of a RuleStore, from 1. Equal IDs are equal rules.
type RuleID uint32

// A RuleStore numbers rules, and returns their bytes. NewRuleStore makes one; it
// is not for concurrent use. It is a Rulebook for mirrors that need only the
// bytes of rules.
//
// A rule is stored as a list of atoms. 46,578 rules of 5,000 services are 20 MB
// of messages. But few atoms occur only once: comments, addresses, the names of
// chains. Without the zeros after a comment they are short.
type RuleStore struct {
	// atoms are the beginnings of NFTA_LIST_ELEMs, and their rests. They have no
	// zeros at an element's end: a comment's match has up to 255.
	atoms Interner
	keys  Interner // rules as lists of atoms (makeKey); the number is the RuleID
	key   []byte   // scratch space
}

// headSize is the length of an element's beginning, which is an atom of its own.
// The data of a comment, a target or an address begin here, and the beginning is
// the same for all of their kind. Whole elements take 2 MB more at 5,000
// services.
const headSize = 40

// NewRuleStore returns a store without rules.
func NewRuleStore() RuleStore { return RuleStore{atoms: NewInterner(), keys: NewInterner()} }

// Intern returns the rule's number: the next number if the store does not have the rule yet.
// The error means that the bytes are damaged or too long.
func (s *RuleStore) Intern(r Rule) (RuleID, error) {
	if err := s.makeKey(r); err != nil {
		return 0, err
	}
	number, err := s.keys.Number(s.key)
	return RuleID(number), err
}

// Rule builds the rule of that number again, in room if it fits.
func (s *RuleStore) Rule(id RuleID, room []byte) Rule {
	key := s.keys.Text(uint32(id))
	r := Rule{Expressions: room[:0]}
	missing := 0 // bytes of the element whose beginning was the last atom
	for len(key) > 0 {
		number, n := binary.Uvarint(key)
		key = key[n:]
		if number == 0 {
			r.Userdata = slices.Clone(key)
			break
		}
		atom := s.atoms.Text(uint32(number))
		last := missing > 0
		if !last {
			size := int(binary.NativeEndian.Uint16(atom))
			missing, last = (size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), size <= headSize
		}
		r.Expressions = append(r.Expressions, atom...)
		missing -= len(atom)
		if last {
			r.Expressions = append(r.Expressions, make([]byte, missing)...)
			missing = 0
		}
	}
	return r
}

// Release implements Rulebook: rules stay until a Purge.
func (s *RuleStore) Release([]RuleID, bool) {}

// Purge implements Rulebook: only the rules of held stay, and get other numbers there. The
// mirror calls it when many rules belong to no chain.
func (s *RuleStore) Purge(held []*[]RuleID) {
	kept, renamed := NewRuleStore(), map[RuleID]RuleID{}
	for _, ids := range held {
		for i, id := range *ids {
			if renamed[id] == 0 {
				renamed[id], _ = kept.Intern(s.Rule(id, nil)) // it was interned before: no error
			}
			(*ids)[i] = renamed[id]
		}
	}
	*s = kept
}

// makeKey sets s.key to the rule's key, for Intern: the numbers of its atoms, then a zero
// and its user data if it has any. The error means that the bytes are damaged.
func (s *RuleStore) makeKey(r Rule) error {
	s.key = s.key[:0]
	for rest := r.Expressions; len(rest) > 0; {
		kind, elem, after, err := NextAttr(rest)
		if err != nil {
			return err
		}
		if kind != unix.NFTA_LIST_ELEM {
			return fmt.Errorf("%w: attribute %d in a list of expressions", ErrAttribute, kind)
		}
		whole := rest[:unix.SizeofNlAttr+len(elem)]
		if err := s.addAtom(whole[:min(len(whole), headSize)], len(whole) > headSize); err != nil {
			return err
		}
		if len(whole) > headSize {
			if err := s.addAtom(whole[headSize:], false); err != nil {
				return err
			}
		}
		rest = after
	}
	if r.Userdata != nil {
		s.key = append(append(s.key, 0), r.Userdata...)
	}
	return nil
}

// addAtom appends the number of an atom to s.key, for makeKey. exact: the atom keeps its zeros,
// because a rest follows.
func (s *RuleStore) addAtom(atom []byte, exact bool) error {
	if !exact {
		atom = bytes.TrimRight(atom, "\x00")
	}
	number, err := s.atoms.Number(atom)
	s.key = binary.AppendUvarint(s.key, uint64(number))
	return err
}
