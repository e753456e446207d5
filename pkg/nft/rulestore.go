package nft

import (
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
// of messages. But few atoms, such as a match by protocol or a jump, occur only
// once. Without the zeros after a comment they are short.
type RuleStore struct {
	atoms Interner // NFTA_LIST_ELEMs without the zeros that trimZeros removes
	keys  Interner // rules as lists of atoms (makeKey); the number is the RuleID
	key   []byte   // scratch space
}

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

// trimZeros returns an attribute without the zeros at its end (a comment's match
// has up to 255). The attribute's header has its full length.
func trimZeros(attribute []byte) []byte {
	end := len(attribute)
	for end > unix.SizeofNlAttr && attribute[end-1] == 0 {
		end--
	}
	return attribute[:end]
}
