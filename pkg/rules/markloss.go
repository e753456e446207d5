package rules

import (
	"math"
	"math/bits"
	"slices"
	"strings"
)

// A MarkLoss describes how the marks of packets and connections may differ from the complete
// rules' marks, because lost rules would set or clear bits. It does not distinguish a packet's
// mark from its connection's, because CONNMARK copies one to the other.
type MarkLoss struct {
	Unset     uint32 // bits that ought to be one, and may be zero
	Uncleared uint32 // bits that ought to be zero, and may be one
}

// AnyMark says that every bit of the marks may differ.
var AnyMark = MarkLoss{math.MaxUint32, math.MaxUint32}

// And returns how marks may differ with both losses.
func (l MarkLoss) And(o MarkLoss) MarkLoss {
	return MarkLoss{l.Unset | o.Unset, l.Uncleared | o.Uncleared}
}

// Gained returns how marks may differ where packets meet surplus rules. l describes the
// difference where those rules are lost.
func (l MarkLoss) Gained() MarkLoss { return MarkLoss{l.Uncleared, l.Unset} }

// markTargets are the targets that change a mark and let the packet continue.
var markTargets = []string{"MARK", "CONNMARK", "HMARK"}

// markOptions are the options by which other matches and targets change the mark of a packet.
var markOptions = []string{"--restore-skmark", "--map-mark", "--tproxy-mark"}

// markExtensions are the extensions that read marks or change them.
var markExtensions = []string{"mark", "connmark", "bpf", "socket", "rpfilter", "SET", "TPROXY", "MARK", "CONNMARK", "HMARK"}

// MarkLoss returns how marks may differ where the rule is lost. A replay decides by it which
// rules must wait. It ignores the rules of a chain that the rule leads to.
func (r Rule) MarkLoss() MarkLoss {
	if _, opaque := r.Opaque(); opaque {
		text, known := r.decoded(markExtensions...)
		if _, readable := r.Readable(); readable && !known {
			return AnyMark
		} else if readable {
			r = text
		}
	}
	if slices.ContainsFunc(markOptions, r.Mentions) {
		return AnyMark
	}
	if !slices.Contains(markTargets, r.Target) {
		return MarkLoss{}
	}
	f, ok := r.form()
	if !ok || f.target < 0 || f.exts[f.target].known == nil {
		return AnyMark
	}
	var loss MarkLoss
	copies, masks := false, uint32(0)
	for i := range f.opts {
		switch o := &f.opts[i]; {
		case o.owner != f.target:
		case o.name == "--save-mark", o.name == "--restore-mark":
			copies = true
		case o.name == "--nfmask", o.name == "--ctmask", o.name == "--mask":
			mask, ok := number(o.words[0], 32)
			if !ok {
				return AnyMark
			}
			masks |= uint32(mask)
		default:
			m := readMarking(f.exts[o.owner].known, o)
			if m.unread {
				return AnyMark
			}
			loss = loss.And(MarkLoss{Unset: m.value, Uncleared: m.value ^ m.mask})
		}
	}
	switch {
	case copies && masks == 0:
		return AnyMark
	case copies:
		return MarkLoss{masks, masks}
	}
	return loss
}

// Without returns the loss without these bits.
func (l MarkLoss) Without(bits uint32) MarkLoss {
	return MarkLoss{l.Unset &^ bits, l.Uncleared &^ bits}
}

// Misleads reports whether the rule may match too few packets (less), or too many (more), if
// marks differ by this loss. A replay then lets it wait. Both are true if the rule's tests
// are unknown.
func (l MarkLoss) Misleads(r Rule) (less, more bool) {
	if l == (MarkLoss{}) {
		return false, false
	}
	tests, known := r.markTests()
	for _, t := range tests {
		if t.value&^t.mask != 0 {
			continue // no mark equals it; see marking.matches
		}
		misses := (t.value&l.Unset|^t.value&l.Uncleared)&t.mask != 0
		gains := (^t.value&l.Unset|t.value&l.Uncleared)&t.mask != 0
		if t.not {
			misses, gains = gains, misses
		}
		less, more = less || misses, more || gains
	}
	return less || !known, more || !known
}

// MarkBit returns the bit of a packet's mark that the rule tests, if it tests a single bit;
// else 0. A replay leaves that bit out of a MarkLoss (marksBy).
func (r Rule) MarkBit() uint32 {
	tests, known := r.markTests()
	if !known || len(tests) != 1 || tests[0].ofConnection || bits.OnesCount32(tests[0].mask) != 1 {
		return 0
	}
	return tests[0].mask
}

// A markTest compares a mark.
type markTest struct {
	value, mask  uint32
	not          bool
	ofConnection bool
}

// markTests returns how the rule tests marks, for Misleads and MarkBit; known is false if that
// is not known, as of an extension that canaryd does not know and that has an option on marks.
// No tests and true: the rule does not look at marks.
func (r Rule) markTests() (tests []markTest, known bool) {
	if _, opaque := r.Opaque(); opaque {
		if r, known = r.decoded(markExtensions...); !known {
			return nil, false
		}
	}
	if !r.Mentions("mark") && !r.Mentions("-m bpf") {
		return nil, true
	}
	f, ok := r.form()
	if !ok {
		return nil, false
	}
	for i := range f.exts {
		if i != f.target && f.exts[i].name == "bpf" { // its program may load the mark
			return nil, false
		}
	}
	for i := range f.opts {
		o := &f.opts[i]
		switch match := f.exts[o.owner]; {
		case o.owner == f.target:
		case match.known != nil && (match.name == "mark" || match.name == "connmark"):
			t := markTest{not: o.not, ofConnection: match.name == "connmark"}
			if t.value, t.mask, ok = markMask(o.words[0]); !ok {
				return nil, false
			}
			tests = append(tests, t)
		case o.name == "--validmark", match.known == nil && strings.Contains(o.name, "mark"):
			return nil, false
		}
	}
	return tests, true
}

// form returns the rule split into its options, for MarkLoss and markTests; false if its
// text could not be read. Any mark may then differ.
func (r Rule) form() (f form, ok bool) {
	words, err := r.Words()
	ok = err == nil && f.read(words)
	return f, ok
}
