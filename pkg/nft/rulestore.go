package nft

import (
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// A RuleID names a rule of a RuleStore, from 1. Equal ones are equal rules.
type RuleID uint32

// A RuleStore numbers rules, and gives their bytes back. NewRuleStore makes one; it is not for
// concurrent use. It is a Rulebook for mirrors that need no more than the bytes of rules.
//
// Memory: a rule is a list of atoms. 46,578 rules of 5,000 services are 20 MB of messages, but
// few atoms (a match by protocol, a jump) occur once only, and those without the zeros behind a
// comment are short.
type RuleStore struct {
	atoms Interner // NFTA_LIST_ELEMs as trimZeros leaves them
	keys  Interner // rules as makeKey names them; the number is the RuleID
	key   []byte   // room to work in
}

// NewRuleStore returns a store without rules.
func NewRuleStore() RuleStore { return RuleStore{atoms: NewInterner(), keys: NewInterner()} }

// Intern returns the rule's number: the next one if the store does not have the rule yet.
func (s *RuleStore) Intern(r Rule) (RuleID, error) {
	if err := s.makeKey(r); err != nil {
		return 0, err
	}
	number, err := s.keys.Number(s.key)
	return RuleID(number), err
}

// Rule builds the rule of that number again, in room as far as it suffices.
func (s *RuleStore) Rule(id RuleID, room []byte) Rule {
	key := s.keys.Text(uint32(id))
	r := Rule{Expressions: room[:0]}
	for len(key) > 0 {
		number, n := binary.Uvarint(key)
		key = key[n:]
		if number == 0 {
			r.Userdata = slices.Clone(key)
			break
		}
		atom := s.atoms.Text(uint32(number))
		size := int(binary.NativeEndian.Uint16(atom))
		padded := (size + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
		r.Expressions = append(r.Expressions, atom...)
		r.Expressions = append(r.Expressions, make([]byte, padded-len(atom))...)
	}
	return r
}

// Release implements Rulebook: rules stay until a Purge.
func (s *RuleStore) Release([]RuleID, bool) {}

// Purge implements Rulebook: only the rules of held stay.
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

// makeKey sets s.key to what names the rule: the numbers of its atoms, and behind a zero its user
// data if it has any.
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
		number, err := s.atoms.Number(trimZeros(rest[:unix.SizeofNlAttr+len(elem)]))
		if err != nil {
			return err
		}
		s.key = binary.AppendUvarint(s.key, uint64(number))
		rest = after
	}
	if r.Userdata != nil {
		s.key = append(append(s.key, 0), r.Userdata...)
	}
	return nil
}

// trimZeros returns an attribute without the zeros at its end (a comment's match has up to 255).
// Its header says how many there were.
func trimZeros(attribute []byte) []byte {
	end := len(attribute)
	for end > unix.SizeofNlAttr && attribute[end-1] == 0 {
		end--
	}
	return attribute[:end]
}
