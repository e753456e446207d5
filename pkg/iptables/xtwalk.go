package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// This file walks over the result of GET_ENTRIES. It treats the bytes as hostile: none may make
// these functions panic or loop.

// An xtLayout has the offsets in struct ipt_entry or ip6t_entry, for C compilers that align a
// u64 at 8 bytes (all but i386).
type xtLayout struct {
	in, out      int // names of interfaces, each of xtInterfaceLen bytes
	inMask       int // and their masks
	outMask      int
	inverse      int // u8: the inverted conditions, behind the flags
	gotoFlag     byte
	targetOffset int // u16: the offset of the target in the entry
	nextOffset   int // u16: the offset of the next entry
	comefrom     int // u32: scratch space of the kernel's loop check
	counters     int // two u64
	size         int // of the struct; matches follow
}

// xtLayoutOf returns the offsets in the entries of a family's tables.
func xtLayoutOf(family rules.Family) xtLayout {
	if family == rules.IPv6 { // a byte for the traffic class is before the flags
		return xtLayout{in: 64, out: 80, inMask: 96, outMask: 112, inverse: 132, gotoFlag: 4,
			targetOffset: 140, nextOffset: 142, comefrom: 144, counters: 152, size: 168}
	}
	return xtLayout{in: 16, out: 32, inMask: 48, outMask: 64, inverse: 83, gotoFlag: 2,
		targetOffset: 88, nextOffset: 90, comefrom: 92, counters: 96, size: 112}
}

const (
	// struct xt_entry_match and xt_entry_target begin with a u16 size, a
	// name of 29 bytes and a u8 revision; their data follow.
	xtExtNameAt  = 2
	xtExtNameLen = 29
	xtExtDataAt  = 32
	// xtStandardLen is sizeof(struct xt_standard_target): a verdict of 4 bytes and 4 bytes of
	// padding.
	xtStandardLen = 40
	// xtError is the target that begins each user's chain, with the chain's name as data. It
	// also ends the table, with the name "ERROR".
	xtError = "ERROR"
)

// The built-in chains by the number of their hook (NF_INET_PRE_ROUTING...).
var xtHooks = [5]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

var errWalk = errors.New("the kernel's table entries are malformed")

// An xtRule holds the facts about one rule that a walk needs.
type xtRule struct {
	entry      xtEntry
	comment    []byte // points into the walked bytes
	hasComment bool
	target     bool // it does more than to fall through
}

// An xtVisitor gets each chain and the offset of its first entry, and then its rules. The last
// entry of a chain is its policy or its RETURN and no rule.
type xtVisitor struct {
	chain func(name string, first int)
	rule  func(xtRule)
	end   func(xtRule) // may be nil
}

// walkEntries walks all entries of one table and calls v with chains and rules. It masks
// counters and comefrom in place, so that the bytes are the same at the next read. Every read,
// probe and count of legacy tables uses it. Its error wraps errWalk.
func walkEntries(family rules.Family, info xtInfo, data []byte, v xtVisitor) error {
	layout := xtLayoutOf(family)
	var last xtRule
	pending := false // last becomes a rule when another entry of the chain follows
	end := func() {
		if pending && v.end != nil {
			v.end(last)
		}
		pending = false
	}
	for at := 0; at < len(data); {
		e, err := layout.entry(data, at)
		if err != nil {
			return err
		}
		layout.mask(data[at:])
		if family == rules.IPv4 {
			e.eachMatch(maskWide)
			if !e.isStandard {
				maskWide(e.target)
			}
		}
		if name, ok := chainHead(e, info, at); ok {
			end()
			if e.isHead {
				at += e.next
				if name != xtError || at < len(data) {
					v.chain(name, at)
				}
				continue
			}
			v.chain(name, at)
		}
		if pending {
			v.rule(last)
		}
		last, pending = e.rule(at), true
		at += e.next
	}
	end()
	return nil
}

// fits reports whether the entries have that shape, as far as they show it. A built-in chain
// must end with its policy (check_entry_size_and_hooks in ip_tables.c accepts no other table).
// One change remains unseen: a rule that equals a policy is moved to another built-in chain and
// back in the same moment.
func (info xtInfo) fits(family rules.Family, data []byte) bool {
	layout := xtLayoutOf(family)
	for hook, offset := range info.underflow {
		if info.validHooks&(1<<hook) == 0 {
			continue
		}
		if int64(offset) > int64(len(data)) {
			return false
		}
		if e, err := layout.entry(data, int(offset)); err != nil || !e.isPolicy(layout) {
			return false
		}
	}
	return true
}

// isPolicy reports whether the entry can be a chain's policy: a verdict without any condition.
// fits checks the ends of built-in chains by it.
func (e xtEntry) isPolicy(layout xtLayout) bool {
	const nfcache = 4 // bytes, between the addresses and targetOffset
	conditions := e.whole[:layout.targetOffset-nfcache]
	return e.isStandard && len(e.matches) == 0 && len(e.target) == xtStandardLen &&
		len(bytes.Trim(conditions, "\x00")) == 0 && (e.verdict() == -1 || e.verdict() == -2)
}

// chainHead returns the name of the chain that the entry at this offset begins; false if it
// begins none. It recognizes a built-in chain by its offset, any other by its target.
func chainHead(e xtEntry, info xtInfo, at int) (string, bool) {
	if e.isHead {
		return nft.String(e.target[xtExtDataAt:]), true
	}
	for hook, offset := range info.hookEntry {
		if info.validHooks&(1<<hook) != 0 && int(offset) == at {
			return xtHooks[hook], true
		}
	}
	return "", false
}

// An xtEntry is one entry in parts. Its slices point into the walked bytes.
type xtEntry struct {
	whole      []byte
	matches    []byte
	target     []byte // at least xtExtDataAt bytes; 4 more if isStandard
	isStandard bool   // the target is a verdict or a jump: it has no name
	isHead     bool   // the target is xtError
	next       int    // the entry's size
}

// entry splits the entry that begins at at, and checks every offset. Its error wraps errWalk:
// then the content of the table counts as unknown.
func (l xtLayout) entry(data []byte, at int) (xtEntry, error) {
	rest := data[at:]
	if len(rest) < l.size {
		return xtEntry{}, fmt.Errorf("%w: an entry at %d is cut off", errWalk, at)
	}
	target := int(binary.NativeEndian.Uint16(rest[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(rest[l.nextOffset:]))
	if target >= l.size && next >= target+xtExtDataAt && next <= len(rest) { // TRACE has no data
		e := xtEntry{whole: rest[:next], matches: rest[l.size:target], target: rest[target:next], next: next}
		name := extName(e.target)
		if e.isStandard, e.isHead = len(name) == 0, string(name) == xtError; !e.isStandard || len(e.target) >= xtExtDataAt+4 {
			return e, nil
		}
	}
	return xtEntry{}, fmt.Errorf("%w: the entry at %d has its target at %d and its end at %d", errWalk, at, target, next)
}

// mask clears the bytes that change without a write of rules.
func (l xtLayout) mask(entry []byte) {
	clear(entry[l.comefrom : l.comefrom+4])
	clear(entry[l.counters : l.counters+16])
}

// wideAddresses are the offsets of addresses and masks of 16 bytes in extensions (union
// nf_inet_addr), from the revision in the row on. IPv4 uses 4 of these bytes, and the kernel
// ignores the others. iptables fills them with ones in a rule without a mask, and with zeros in
// the same rule as it is saved.
var wideAddresses = map[string]struct {
	revision byte
	at       []int
}{
	"recent":    {1, []int{212}},
	"connlimit": {0, []int{0}},
	"conntrack": {1, []int{0, 16, 32, 48, 64, 80, 96, 112}},
	// Four elements of 76 bytes, which begin with four addresses each.
	"policy": {0, []int{0, 16, 32, 48, 76, 92, 108, 124, 152, 168, 184, 200, 228, 244, 260, 276}},
	"HMARK":  {0, []int{0, 16}},
}

// maskWide clears the meaningless bytes in an extension of IPv4: the ends of wide addresses.
func maskWide(ext []byte) { maskWideIn(string(extName(ext)), ext[xtExtDataAt-1], ext[xtExtDataAt:]) }

// maskWideIn is maskWide for the data of an extension, of that name and revision. It changes
// data in place.
func maskWideIn(name string, revision byte, data []byte) {
	wide, ok := wideAddresses[name]
	if !ok || revision < wide.revision {
		return
	}
	for _, at := range wide.at {
		if end := at + 16; end <= len(data) {
			clear(data[end-12 : end])
		}
	}
}

// rule reads the comment of the entry at that offset, and whether its target does something.
// iptables writes "no target" as a standard verdict that jumps to the next entry. A jump to a
// chain never ends there, because a chain begins behind its head.
func (e xtEntry) rule(at int) xtRule {
	r := xtRule{entry: e, target: !e.isStandard || e.verdict() != at+e.next}
	e.eachMatch(func(m []byte) {
		if string(extName(m)) == "comment" {
			r.comment, r.hasComment = nft.UntilNUL(m[xtExtDataAt:]), true
		}
	})
	return r
}

// verdict returns the content of a standard target: a verdict below zero, or the offset of the
// next entry to visit.
func (e xtEntry) verdict() int {
	return int(int32(binary.NativeEndian.Uint32(e.target[xtExtDataAt:])))
}

// eachMatch calls f for each match, with its head and data. It ends at a truncated match. f may
// change the bytes.
func (e xtEntry) eachMatch(f func(m []byte)) {
	for rest := e.matches; len(rest) >= xtExtDataAt; {
		size := int(binary.NativeEndian.Uint16(rest))
		if size < xtExtDataAt || size > len(rest) {
			return
		}
		f(rest[:size])
		rest = rest[size:]
	}
}

func extName(ext []byte) []byte {
	return nft.UntilNUL(ext[xtExtNameAt : xtExtNameAt+xtExtNameLen])
}

// verdictName returns iptables' name for a verdict (NF_DROP, NF_ACCEPT and XT_RETURN as a
// standard target has them); "" for others.
func verdictName(verdict int) string {
	switch verdict {
	case -1:
		return "DROP"
	case -2:
		return "ACCEPT"
	case -5:
		return "RETURN"
	}
	return ""
}
