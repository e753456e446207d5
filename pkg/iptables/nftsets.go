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

// This file replaces the kernel's own numbers in rules by names, and puts the numbers back. The
// match "set" and the target "SET" name an ipset by its number. A set that is destroyed and made
// again has another number, and the old number may become another set's. So canaryd identifies a
// rule by its bytes without numbers and the names of its sets. The names are in an expression of
// canaryd's own, at the end. The kernel does not know that expression, and refuses a rule that
// still has it.
//
// While a rule is in the table, its sets can be neither destroyed nor renamed, so each number
// has one name. "ipset swap" exchanges the contents of two sets. Each number keeps its name
// (ip_set_swap in net/netfilter/ipset/ip_set_core.c), and so the rule still names the same set.

// setNames is the name of the expression with the names of a rule's ipsets.
const setNames = "canaryd-sets"

// setPlaces are the offsets of the numbers in the data of ipset's extensions, by revision
// (struct xt_set_info_match_v* and xt_set_info_target_v* in linux/netfilter/xt_set.h).
var setPlaces = map[string][][]int{
	"match set":  {{0}, {0}, {0}, {0}, {0}},
	"target SET": {{0, 32}, {0, 4}, {0, 4}, {0, 4, 8}},
}

// bpfPinned is XT_BPF_MODE_PATH_PINNED. bpfFileAt is the offset of the writer's file descriptor
// in the match bpf. The kernel opens the path itself (Linux 4.14).
const (
	bpfBytecode = 0
	bpfPinned   = 1
	bpfFileAt   = 4
)

// mayHoldNumbers reports whether a rule may contain a number of the kernel that can be taken
// out. Most rules contain none, and nameSets returns them at once.
func mayHoldNumbers(r nft.Rule) bool {
	for _, name := range [...]string{"set\x00", "SET\x00", "bpf\x00"} {
		if bytes.Contains(r.Expressions, []byte(name)) {
			return true
		}
	}
	return false
}

// namesSet reports whether an expression is an extension of ipset.
func namesSet(e nft.Expression) bool {
	return setPlaces[e.Name+" "+extensionName(e)] != nil
}

// eachSetNumber calls f with each place of an ipset's number in a rule, in order. nameSets and
// numberSets overwrite the number there. It is an error (errNotPortable) if the places of a
// revision are not known.
func eachSetNumber(r nft.Rule, f func(number []byte) error) error {
	return r.Each(func(e nft.Expression) error {
		revisions := setPlaces[e.Name+" "+extensionName(e)]
		if revisions == nil {
			return nil
		}
		revision, info := xtRevision(e), nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO)
		if revision >= len(revisions) {
			return fmt.Errorf("a rule with revision %d of %s %w", revision, extensionName(e), errNotPortable)
		}
		for _, at := range revisions[revision] {
			if len(info) < at+2 {
				return nft.ErrAttribute
			}
			if err := f(info[at : at+2]); err != nil {
				return err
			}
		}
		return nil
	})
}

// xtRevision returns the revision of an xt extension, which decides where its data have
// numbers; 0 if it has none. The attributes NFTA_TARGET_REV and NFTA_TARGET_INFO have the same
// numbers as a match's.
func xtRevision(e nft.Expression) int {
	if revision := nft.AttrPath(e.Data, unix.NFTA_MATCH_REV); len(revision) == 4 {
		return int(revision[3]) | int(revision[2])<<8
	}
	return 0
}

// nameSets returns the rule without the kernel's numbers, and with the names of its sets, as
// the lexicon stores and compares rules. name queries the kernel. A rule without numbers, or
// with the names already, is returned unchanged. So is any rule after an error.
func nameSets(r nft.Rule, name func(uint16) (string, error)) (nft.Rule, error) {
	if _, _, done := withoutNames(r); done || !mayHoldNumbers(r) {
		return r, nil
	}
	bare, names := r.Clone(), []string(nil)
	if err := forgetFiles(bare); err != nil {
		return r, err
	}
	err := eachSetNumber(bare, func(place []byte) error {
		text, number := "", binary.NativeEndian.Uint16(place)
		if number != noSetNumber {
			var err error
			if text, err = name(number); err != nil {
				return err
			}
		}
		names = append(names, text)
		binary.NativeEndian.PutUint16(place, noSetNumber)
		return nil
	})
	if err == nil && len(names) > 0 {
		return withNames(bare, names)
	}
	if err != nil {
		return r, err
	}
	return bare, nil
}

// forgetFiles clears the file descriptors in matches bpf that name a path, in the rule's
// memory. nameSets calls it, because the writer's descriptor identifies nothing.
func forgetFiles(r nft.Rule) error {
	return r.Each(func(e nft.Expression) error {
		if info := nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO); bpfMode(e) == bpfPinned && len(info) >= bpfFileAt+4 {
			clear(info[bpfFileAt : bpfFileAt+4])
		}
		return nil
	})
}

// bpfMode returns the mode of a match bpf: bytecode, which is revision 0's only mode, or a
// path. It is -1 for everything else, such as a program that its writer had open: portable
// refuses such a match.
func bpfMode(e nft.Expression) int {
	info := nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO)
	switch revision := xtRevision(e); {
	case e.Name != "match" || extensionName(e) != "bpf" || len(info) < bpfFileAt:
		return -1
	case revision == 0:
		return bpfBytecode
	case revision == 1 && binary.NativeEndian.Uint16(info) <= bpfPinned:
		return int(binary.NativeEndian.Uint16(info))
	}
	return -1
}

// pinnedPaths returns the paths of pinned bpf programs that the matches bpf of a rule name.
// pinnedStand looks for them before a write, because the kernel refuses a transaction with a
// missing one.
func pinnedPaths(r nft.Rule) []string {
	var paths []string
	_ = r.Each(func(e nft.Expression) error {
		if info := nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO); bpfMode(e) == bpfPinned && len(info) > bpfFileAt+4 {
			paths = append(paths, nft.String(info[bpfFileAt+4:min(len(info), bpfFileAt+4+bpfPathSize)]))
		}
		return nil
	})
	return paths
}

// pinnedStand returns an error if the kernel would not open a path that the rule names;
// writeRule calls it. The kernel opens the path as this process does (bpf_prog_get_type_path),
// and would refuse the whole transaction.
func pinnedStand(r nft.Rule) error {
	if !bytes.Contains(r.Expressions, []byte("bpf\x00")) {
		return nil
	}
	for _, path := range pinnedPaths(r) {
		if err := unix.Access(path, unix.R_OK); err != nil {
			return fmt.Errorf("the program %q of a match bpf: %w", path, err)
		}
	}
	return nil
}

// bpfPathSize is XT_BPF_PATH_MAX.
const bpfPathSize = 512

// mostNames bounds the names of one rule in bytes: an attribute has a length of 16 bits.
const mostNames = 32 << 10

// withNames returns the rule with the names of its sets, in the order of their places; "" for a
// place without a set. It is an error (errNotPortable) if they are too many or too long.
func withNames(r nft.Rule, names []string) (nft.Rule, error) {
	var list []byte
	for _, name := range names {
		if list = nft.AppendAttr(list, unix.NFTA_LIST_ELEM, name, 1); len(list) > mostNames || len(name) > maxSetName {
			return r, fmt.Errorf("a rule with so many or such long names of ipsets %w", errNotPortable)
		}
	}
	elem := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, setNames, 1)
	elem = nft.AppendAttr(elem, unix.NFTA_EXPR_DATA, list, 0)
	r.Expressions = nft.AppendAttr(slices.Clip(r.Expressions), unix.NFTA_LIST_ELEM, elem, 0)
	return r, nil
}

// withoutNames returns a rule without the names of its sets, and the names; false if it has
// none. Texts and the kernel need the bare rule. bare shares the memory of r.
func withoutNames(r nft.Rule) (bare nft.Rule, names []string, has bool) {
	if !bytes.Contains(r.Expressions, []byte(setNames)) {
		return r, nil, false
	}
	at := 0
	err := r.Each(func(e nft.Expression) error {
		if e.Name == setNames {
			has = true
			names = namesOf(e)
			return errEnough
		}
		return nil
	})
	if !has || err != nil && !errors.Is(err, errEnough) {
		return r, nil, false
	}
	for rest := r.Expressions; len(rest) > 0; {
		_, elem, after, _ := nft.NextAttr(rest)
		if nft.String(nft.AttrPath(elem, unix.NFTA_EXPR_NAME)) == setNames {
			break
		}
		at += len(rest) - len(after)
		rest = after
	}
	return nft.Rule{Expressions: r.Expressions[:at:at], Userdata: r.Userdata}, names, true
}

var errEnough = errors.New("enough is known")

// namesOf returns the names in canaryd's own expression, for withoutNames; "" is a place
// without a set.
func namesOf(e nft.Expression) []string {
	var names []string
	_ = nft.EachAttr(e.Data, func(_ uint16, value []byte) error {
		names = append(names, nft.String(value))
		return nil
	})
	return names
}

// numberSets returns a rule as the kernel accepts it, with its sets' numbers and without their
// names. writeRule calls it for each new rule. After its error (such as ErrNoSet from number),
// iptables-restore gets the script. Other bytes stay unchanged.
func numberSets(r nft.Rule, number func(string) (uint16, error)) (nft.Rule, error) {
	bare, names, has := withoutNames(r)
	if !has {
		return r, nil
	}
	bare = bare.Clone()
	err := eachSetNumber(bare, func(place []byte) error {
		if len(names) == 0 {
			return fmt.Errorf("a rule with more places for ipsets than names %w", errNotPortable)
		}
		n := uint16(noSetNumber)
		if names[0] != "" {
			var err error
			if n, err = number(names[0]); err != nil {
				return err
			}
		}
		names = names[1:]
		binary.NativeEndian.PutUint16(place, n)
		return nil
	})
	if err == nil && len(names) > 0 {
		err = fmt.Errorf("a rule with more names of ipsets than places %w", errNotPortable)
	}
	return bare, err
}

// identityOf returns the digest that identifies a rule whose bytes cannot be written again. It
// is the same for both ways to store the names of sets.
func identityOf(r nft.Rule) rules.Identity {
	if bare, names, has := withoutNames(r); has {
		return rules.IdentityOfSets(bare.Expressions, bare.Userdata, names)
	}
	return rules.IdentityOf(r.Expressions, r.Userdata)
}

// heldBytes returns the bytes of an opaque rule, with the names of its sets, as the lexicon
// stores them. It is false if the rule has no bytes that nf_tables could have.
func heldBytes(rule rules.Rule) (nft.Rule, bool) {
	expressions, userdata, sets, ok := rule.Bytes()
	raw := nft.Rule{Expressions: expressions, Userdata: userdata}
	if _, _, has := withoutNames(raw); !ok || has {
		return nft.Rule{}, false
	}
	if sets != nil {
		var err error
		raw, err = withNames(raw, sets)
		ok = err == nil
	}
	return raw, ok
}
