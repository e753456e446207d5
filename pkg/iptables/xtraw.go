package iptables

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
)

// This file translates between entries of x_tables and the expressions by which canaryd
// identifies, compares and stores any rule. The extensions of an entry become expressions "match"
// and "target", as nf_tables has them for iptables-nft. A verdict or a jump becomes an
// "immediate", with the chain's name in place of the offset. All other conditions are in the
// first expression, ruleset.EntryHead.
//
// The bytes of an entry may be written again as the kernel returns them. Each command of
// iptables-legacy reads all rules of its table and writes them back.

const (
	// entryStrange is the attribute of EntryHead that has the digest of an entry of another form.
	// Such a rule is known by this digest, and is not written again.
	entryStrange = ruleset.EntryConditions + 1
	// mostEntry is the longest entry that has expressions: an attribute's length has 16 bits.
	mostEntry = 48 << 10
)

// A rawEntries translates the entries of one family. It reuses its memory: a rule is valid until
// the next one.
type rawEntries struct {
	layout           xtLayout
	list, elem, data []byte
}

// rule returns an entry as expressions. goal is the chain that it jumps to, or "".
func (b *rawEntries) rule(r xtRule, goal string) nft.Rule {
	e := r.entry
	if len(e.whole) > mostEntry {
		return b.strange(e)
	}
	b.list = b.list[:0]
	b.data = nft.AppendAttr(b.data[:0], ruleset.EntryConditions, e.whole[:b.layout.targetOffset], 0)
	b.add(ruleset.EntryHead)
	size := 0
	e.eachMatch(func(m []byte) {
		size += len(m)
		b.extension("match", m)
	})
	switch {
	case size != len(e.matches) || e.isStandard && (len(e.target) != xtStandardLen || r.target && goal == "" && e.verdict() >= 0):
		return b.strange(e)
	case !e.isStandard:
		b.extension("target", e.target)
	case goal != "":
		code := int32(unix.NFT_JUMP)
		if gotoOf(b.layout, e.whole) {
			code = unix.NFT_GOTO
		}
		b.verdict(code, goal)
	case e.verdict() == unix.NFT_RETURN: // XT_RETURN is the same number
		b.verdict(unix.NFT_RETURN, "")
	case r.target: // -1-NF_DROP, -1-NF_ACCEPT or -1-NF_QUEUE
		b.verdict(int32(-1-e.verdict()), "")
	}
	return nft.Rule{Expressions: b.list}
}

// strange returns an entry that cannot be parted, for rule. It omits an offset, which moves with
// the rules before it.
func (b *rawEntries) strange(e xtEntry) nft.Rule {
	whole := e.whole
	if e.isStandard {
		whole = whole[:len(whole)-len(e.target)+xtExtDataAt]
	}
	sum := sha256.Sum256(whole)
	b.list, b.data = b.list[:0], nft.AppendAttr(b.data[:0], entryStrange, sum[:], 0)
	b.add(ruleset.EntryHead)
	return nft.Rule{Expressions: b.list}
}

// add adds an expression of that name with the attributes in b.data.
func (b *rawEntries) add(name string) {
	b.elem = nft.AppendAttr(b.elem[:0], unix.NFTA_EXPR_NAME, name, 1)
	b.elem = nft.AppendAttr(b.elem, unix.NFTA_EXPR_DATA, b.data, 0)
	b.list = nft.AppendAttr(b.list, unix.NFTA_LIST_ELEM, b.elem, 0)
}

// extension adds a match or a target, which begins with its head.
func (b *rawEntries) extension(kind string, ext []byte) {
	b.data = nft.AppendAttr(b.data[:0], unix.NFTA_MATCH_NAME, extName(ext), 1)
	b.data = nft.AppendAttr(b.data, unix.NFTA_MATCH_REV, []byte{0, 0, 0, ext[xtExtDataAt-1]}, 0)
	b.data = nft.AppendAttr(b.data, unix.NFTA_MATCH_INFO, ext[xtExtDataAt:], 0)
	b.add(kind)
}

// verdict adds a verdict of nf_tables, for a jump with its chain.
func (b *rawEntries) verdict(code int32, chain string) {
	inner := nft.AppendAttr(nil, unix.NFTA_VERDICT_CODE, binary.BigEndian.AppendUint32(nil, uint32(code)), 0)
	if chain != "" {
		inner = nft.AppendAttr(inner, unix.NFTA_VERDICT_CHAIN, chain, 1)
	}
	outer := nft.AppendAttr(nil, unix.NFTA_DATA_VERDICT, inner, 0)
	b.data = nft.AppendAttr(b.data[:0], unix.NFTA_IMMEDIATE_DREG, make([]byte, 4), 0)
	b.data = nft.AppendAttr(b.data, unix.NFTA_IMMEDIATE_DATA, outer, 0)
	b.add("immediate")
}

// gotoOf reports whether an entry's jump is a goto (IPT_F_GOTO, IP6T_F_GOTO).
func gotoOf(at xtLayout, entry []byte) bool { return entry[at.inverse-1]&at.gotoFlag != 0 }

// isEntry reports whether a rule is of x_tables.
func isEntry(raw nft.Rule) bool {
	const nameAt = 2 * unix.SizeofNlAttr
	return len(raw.Expressions) > nameAt && strings.HasPrefix(string(raw.Expressions[nameAt:min(len(raw.Expressions), nameAt+len(ruleset.EntryHead)+1)]), ruleset.EntryHead+"\x00")
}

// pieceOf returns a rule as an entry of a table of that family, to write it. The rule must have
// its sets' numbers. The error is that the bytes are no entry that can be written. It may use room.
func pieceOf(family rules.Family, raw nft.Rule, room []byte) (xtPiece, error) {
	at := xtLayoutOf(family)
	piece, standard, verdict := xtPiece{was: -1, falls: true}, true, int32(0)
	var entry []byte
	err := raw.Each(func(e nft.Expression) error {
		switch {
		case entry == nil:
			head := nft.AttrPath(e.Data, ruleset.EntryConditions)
			if e.Name != ruleset.EntryHead || len(head) != at.targetOffset || raw.Userdata != nil {
				return errNoEntry
			}
			entry = append(append(room[:0], head...), make([]byte, at.size-len(head))...)
			return nil
		case !piece.falls:
			return errNoEntry // a target is the last expression
		case e.Name == "match" || e.Name == "target":
			if e.Name == "target" {
				binary.NativeEndian.PutUint16(entry[at.targetOffset:], uint16(len(entry)))
				piece.falls, standard = false, false
			}
			var err error
			entry, err = appendExtension(entry, e)
			return err
		case e.Name == "immediate":
			piece.falls = false
			piece.goal = string(e.Jump())
			verdict = int32(nft.AttrNumber(nft.AttrPath(e.Data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT), unix.NFTA_VERDICT_CODE))
			return nil
		}
		return errNoEntry
	})
	if err != nil || entry == nil {
		return xtPiece{}, fmt.Errorf("a rule of x_tables: %w", errNoEntry)
	}
	if standard {
		binary.NativeEndian.PutUint16(entry[at.targetOffset:], uint16(len(entry)))
		target := make([]byte, xtStandardLen)
		binary.NativeEndian.PutUint16(target, xtStandardLen)
		switch {
		case piece.falls || piece.goal != "":
		case verdict == unix.NFT_RETURN:
			binary.NativeEndian.PutUint32(target[xtExtDataAt:], uint32(verdict))
		case verdict < 0:
			return xtPiece{}, errNoEntry
		default:
			binary.NativeEndian.PutUint32(target[xtExtDataAt:], uint32(-1-verdict))
		}
		entry = append(entry, target...)
	}
	if len(entry) > mostEntry {
		return xtPiece{}, errNoEntry
	}
	binary.NativeEndian.PutUint16(entry[at.nextOffset:], uint16(len(entry)))
	piece.bytes = entry
	return piece, nil
}

var errNoEntry = fmt.Errorf("it %w", errNotPortable)

// appendExtension appends a match or target with its head, for pieceOf.
func appendExtension(entry []byte, e nft.Expression) ([]byte, error) {
	const align = 8 // XT_ALIGN
	name, info := extensionName(e), nft.AttrPath(e.Data, unix.NFTA_MATCH_INFO)
	revision := xtRevision(e)
	if name == "" || len(name) >= xtExtNameLen || len(info)%align != 0 || revision > 0xff || len(entry)+xtExtDataAt+len(info) > mostEntry {
		return nil, errNoEntry
	}
	var head [xtExtDataAt]byte
	binary.NativeEndian.PutUint16(head[:], uint16(xtExtDataAt+len(info)))
	copy(head[xtExtNameAt:], name)
	head[xtExtDataAt-1] = byte(revision)
	return append(append(entry, head[:]...), info...), nil
}

// markEntry returns a mark as iptables-legacy writes it: match "comment" revision 0, no other
// condition and no target.
func markEntry(family rules.Family, comment string) nft.Rule {
	at := xtLayoutOf(family)
	match := make([]byte, xtExtDataAt+commentSize)
	binary.NativeEndian.PutUint16(match, uint16(len(match)))
	copy(match[xtExtNameAt:], "comment")
	copy(match[xtExtDataAt:], comment)
	b := rawEntries{layout: at, data: nft.AppendAttr(nil, ruleset.EntryConditions, make([]byte, at.targetOffset), 0)}
	b.add(ruleset.EntryHead)
	b.extension("match", match)
	return nft.Rule{Expressions: b.list}
}

// olderEntry returns a rule from the form in which an older canaryd stored it: the bytes of an
// entry without its verdict, and the goal of a jump or the name of a verdict. It is false for any
// other bytes.
func olderEntry(family rules.Family, entry []byte, goal string) (nft.Rule, bool) {
	layout := xtLayoutOf(family)
	if len(entry) < layout.size+xtExtDataAt {
		return nft.Rule{}, false
	}
	whole := append([]byte(nil), entry...)
	if int(binary.NativeEndian.Uint16(entry[layout.nextOffset:])) == len(entry)+xtStandardLen-xtExtDataAt {
		whole = append(whole, make([]byte, xtStandardLen-xtExtDataAt)...)
	}
	e, err := layout.entry(whole, 0)
	if err != nil || e.next != len(whole) || e.isHead || e.isStandard && len(e.target) != xtStandardLen {
		return nft.Rule{}, false
	}
	r := xtRule{entry: e, target: !e.isStandard || goal != ""}
	for _, verdict := range []int32{-1, -2, -5} {
		if e.isStandard && verdictName(int(verdict)) == goal {
			binary.NativeEndian.PutUint32(e.target[xtExtDataAt:], uint32(verdict))
			goal = ""
		}
	}
	if !e.isStandard {
		goal = ""
	}
	return (&rawEntries{layout: layout}).rule(r, goal), true
}
