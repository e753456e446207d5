package rules

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// opaqueStart begins the Spec of an opaque rule; no text of iptables begins with it.
//
// An opaque rule is in the kernel, but has no text that may be written back. On nft canaryd has
// no words for it. On legacy iptables may print it over several lines, or in words that
// iptables-restore reads as another rule. Or iptables prints another rule in the same words, or
// does not understand this one. Its Spec names it by a digest, so that it can be compared and
// counted like any other rule. If its bytes in the kernel are enough to make the rule again,
// the Spec has them too, and a replay writes them. Without them a replay leaves the rule out
// and says why.
const opaqueStart = "# rule "

// bytesStart begins the bytes of an opaque rule, behind the digest. setsStart begins the names
// of its ipsets, behind the bytes.
const (
	bytesStart = "="
	setsStart  = "@"
)

// MaxSpec is the longest text of a rule that iptables-restore reads. iptables-restore cuts
// lines at 10,239 characters (buffer in iptables-restore.c, 1.8.9). "-A CHAIN " and the end of
// the line need up to 64 of them.
const MaxSpec = 10239 - 64

// OpaqueRule returns the opaque rule for these bytes. target is the rule's target, if it is
// known. reason says why the rule has no text.
func OpaqueRule(identity []byte, target, reason string) Rule {
	return IdentityOf(identity).OpaqueRule(target, reason)
}

// An Identity is the digest that names an opaque rule.
type Identity [8]byte

// IdentityOf returns the Identity of the rule whose bytes are parts, one after the other:
// expressions, user data and, for sets, their names.
func IdentityOf(parts ...[]byte) (id Identity) {
	sum := sha256.New()
	for _, part := range parts {
		_, _ = sum.Write(part)
	}
	copy(id[:], sum.Sum(nil))
	return id
}

// OpaqueRule returns the opaque rule with this Identity; see the function OpaqueRule.
func (id Identity) OpaqueRule(target, reason string) Rule { return id.opaqueRule("", target, reason) }

// OpaqueBytes returns the opaque rule that holds these bytes: nf_tables' expressions, and the
// user data, nil if the rule has none. See the function OpaqueRule.
func OpaqueBytes(expressions, userdata []byte, target, reason string) Rule {
	return IdentityOf(expressions, userdata).opaqueRule(bytesStart+packBytes(expressions, userdata), target, reason)
}

// OpaqueSets is OpaqueBytes for a rule that names ipsets. The kernel may later give an ipset's
// number to another set, so the bytes have no numbers. sets has the names in the order of the
// numbers' places, and "" for a place without a set.
func OpaqueSets(expressions, userdata []byte, sets []string, target, reason string) Rule {
	bytes := bytesStart + packBytes(expressions, userdata) + setsStart + base64.RawStdEncoding.EncodeToString(joinSets(sets))
	return IdentityOfSets(expressions, userdata, sets).opaqueRule(bytes, target, reason)
}

// IdentityOfSets is IdentityOf for a rule that names ipsets.
func IdentityOfSets(expressions, userdata []byte, sets []string) Identity {
	return IdentityOf(expressions, userdata, []byte(setsStart), joinSets(sets))
}

// joinSets returns names with a NUL behind each, for an Identity and a Spec. No name has a
// NUL, because the kernel ends it there.
func joinSets(sets []string) []byte {
	var all []byte
	for _, name := range sets {
		all = append(append(all, name...), 0)
	}
	return all
}

// opaqueRule returns the opaque rule with the packed bytes, "" for none. It leaves out a
// target that could be misread, and replaces control characters in the reason.
func (id Identity) opaqueRule(bytes, target, reason string) Rule {
	to := ""
	if target != "" && !strings.ContainsFunc(target, func(c rune) bool { return c <= ' ' || c >= 0x7f || c == ':' }) {
		to = " to " + target
	}
	reason = strings.Map(func(c rune) rune {
		if c < ' ' || c == 0x7f || c == utf8.RuneError {
			return '?'
		}
		return c
	}, reason)
	return parseOpaque(fmt.Sprintf("%s%x%s%s: %s", opaqueStart, id[:], bytes, to, reason))
}

// parseOpaque returns the rule whose Spec opaqueRule made; its Target is the word behind "
// to ". ParseRule calls it for such a Spec.
func parseOpaque(spec string) Rule {
	head, _, _ := strings.Cut(spec[len(opaqueStart):], ": ")
	_, target, _ := strings.Cut(head, " to ")
	return Rule{Spec: spec, Target: target}
}

// Opaque reports whether the rule has no text that may be written, and why. Fragments refuse
// such rules, and status lists them: a replay writes them only from their bytes.
func (r Rule) Opaque() (reason string, opaque bool) {
	if !strings.HasPrefix(r.Spec, opaqueStart) {
		return "", false
	}
	_, reason, _ = strings.Cut(r.Spec, ": ")
	return reason, true
}

// IdentityText returns the digest that names an opaque rule; Equal and Meaning compare it.
// Opaque rules with the same digest are the same rule, even if their reasons differ. It is
// false for any other rule.
func (r Rule) IdentityText() (digest string, opaque bool) {
	if !strings.HasPrefix(r.Spec, opaqueStart) {
		return "", false
	}
	rest := r.Spec[len(opaqueStart):]
	return rest[:min(len(rest), 2*len(Identity{}))], true
}

// decodedStart begins the reason of an opaque rule that canaryd decoded in part; the label
// follows. matchingStart does so if the rule only matches and counts.
const (
	decodedStart  = "canaryd knows only its bytes, which say "
	matchingStart = "canaryd knows only its bytes, which do nothing but match: "
)

// Decoded returns the reason of an opaque rule that has only this label, for Readable to
// find. acts says that the rule does more than match and count. pkg/iptables calls it.
func Decoded(label string, acts bool) (reason string) {
	if !acts {
		return matchingStart + label
	}
	return decodedStart + label
}

// Matches reports whether the rule certainly does nothing but match and count.
func (r Rule) Matches() bool {
	reason, opaque := r.Opaque()
	return r.Target == "" && (!opaque || strings.HasPrefix(reason, matchingStart))
}

// Readable returns the rule's text, or the label of an opaque rule: the words that canaryd
// knows for it. Words "rule:" of --protect match it. It is false for an opaque rule without
// a label.
func (r Rule) Readable() (text string, ok bool) {
	reason, opaque := r.Opaque()
	if !opaque {
		return r.Spec, true
	}
	if label, ok := strings.CutPrefix(reason, matchingStart); ok {
		return label, true
	}
	return strings.CutPrefix(reason, decodedStart)
}

// Label returns the rule as people read it, in status and logs: its text or label. For an
// opaque rule without a label that is its Spec without its bytes.
func (r Rule) Label() string {
	if text, ok := r.Readable(); ok {
		return text
	}
	at := len(opaqueStart) + 2*len(Identity{})
	if !strings.HasPrefix(r.Spec, opaqueStart) || !strings.HasPrefix(r.Spec[min(at, len(r.Spec)):], bytesStart) {
		return r.Spec
	}
	if end := strings.IndexAny(r.Spec[at:], " :"); end >= 0 {
		return r.Spec[:at] + r.Spec[at+end:]
	}
	return r.Spec[:at]
}

// Bytes returns the bytes of an opaque rule in the form of the arguments of OpaqueBytes and
// OpaqueSets; a replay writes them. ok is false if the rule has no bytes, or if its digest
// does not match them. sets is nil without ipsets.
func (r Rule) Bytes() (expressions, userdata []byte, sets []string, ok bool) {
	packed, names, digest := r.packed()
	if packed == nil {
		return nil, nil, nil, false
	}
	expressions, userdata, ok = unpackBytes(*packed)
	id := IdentityOf(expressions, userdata)
	if ok && names != nil {
		sets, ok = splitSets(*names)
		id = IdentityOfSets(expressions, userdata, sets)
	}
	if !ok || fmt.Sprintf("%x", id[:]) != digest {
		return nil, nil, nil, false
	}
	return expressions, userdata, sets, true
}

// HasBytes reports whether the rule is opaque and holds its bytes. Where the kernel accepts
// bytes, such a rule can be written without a text.
func (r Rule) HasBytes() bool {
	packed, _, _ := r.packed()
	return packed != nil
}

// setNames returns the names of the ipsets that an opaque rule has next to its bytes, for
// Needs; nil if none are known.
func (r Rule) setNames() []string {
	_, names, _ := r.packed()
	if names == nil {
		return nil
	}
	sets, _ := splitSets(*names)
	return slices.DeleteFunc(sets, func(name string) bool { return name == "" })
}

// packed returns the packed bytes of an opaque rule, the names of its ipsets, each nil if it
// has none, and its digest. Bytes, HasBytes and setNames call it. For any other rule the
// digest is "".
func (r Rule) packed() (packed, names *string, digest string) {
	digest, opaque := r.IdentityText()
	if !opaque {
		return nil, nil, ""
	}
	head, _, _ := strings.Cut(r.Spec[len(opaqueStart)+len(digest):], ": ")
	head, _, _ = strings.Cut(head, " ")
	text, has := strings.CutPrefix(head, bytesStart)
	if !has {
		return nil, nil, digest
	}
	text, list, named := strings.Cut(text, setsStart)
	if named {
		names = &list
	}
	return &text, names, digest
}

// splitSets reads the output of joinSets, as base64. False: the text is damaged, and the
// rule then counts as one without bytes.
func splitSets(text string) (sets []string, ok bool) {
	joined, err := base64.RawStdEncoding.DecodeString(text)
	if err != nil || len(joined) == 0 || len(joined) > maxBytes || joined[len(joined)-1] != 0 {
		return nil, false
	}
	return strings.Split(string(joined[:len(joined)-1]), "\x00"), true
}

// maxBytes bounds the bytes of a rule. An attribute of netlink, which holds the expressions,
// has a length of 16 bits, as an entry of x_tables has. User data have up to 256 bytes.
const maxBytes = 64<<10 + 512

// packBytes returns the bytes of a rule as text for its Spec. Most bytes are zero: a run of
// zeros takes two bytes. Nil userdata and empty userdata differ.
func packBytes(expressions, userdata []byte) string {
	plain := append(binary.AppendUvarint(nil, uint64(len(expressions))), expressions...)
	if userdata != nil {
		plain = append(append(plain, 1), userdata...)
	}
	packed := make([]byte, 0, len(plain)/2)
	for i := 0; i < len(plain); {
		n := 1
		for plain[i] == 0 && n < 255 && i+n < len(plain) && plain[i+n] == 0 {
			n++
		}
		if packed = append(packed, plain[i]); plain[i] == 0 {
			packed = append(packed, byte(n))
		}
		i += n
	}
	return base64.RawStdEncoding.EncodeToString(packed)
}

// unpackBytes reads the output of packBytes for Bytes. False: the text is damaged or too
// long.
func unpackBytes(text string) (expressions, userdata []byte, ok bool) {
	packed, err := base64.RawStdEncoding.DecodeString(text)
	if err != nil {
		return nil, nil, false
	}
	var plain []byte
	for i := 0; i < len(packed) && len(plain) <= maxBytes; i++ {
		if packed[i] != 0 {
			plain = append(plain, packed[i])
		} else if i++; i < len(packed) {
			plain = append(plain, make([]byte, packed[i])...)
		}
	}
	size, n := binary.Uvarint(plain)
	if n <= 0 || len(plain) > maxBytes || size > uint64(len(plain)-n) {
		return nil, nil, false
	}
	expressions, rest := plain[n:n+int(size)], plain[n+int(size):]
	if len(rest) > 0 && rest[0] != 1 {
		return nil, nil, false
	}
	if len(rest) > 0 {
		userdata = bytes.Clone(rest[1:])
	}
	return expressions, userdata, true
}

// whyNotWritable returns why a rule's text may not be written back, or "". ParseRule makes
// such a rule opaque. understood is target's result.
func whyNotWritable(spec string, words []string, understood bool) string {
	switch {
	case len(spec) > MaxSpec:
		return fmt.Sprintf("its text has %d characters, and iptables-restore reads no line of more than %d", len(spec), MaxSpec)
	case !utf8.ValidString(spec):
		return "its text is not UTF-8"
	case strings.IndexFunc(spec, isControl) >= 0:
		return "its text holds a line break or another control character"
	case understood:
		return ""
	}
	// iptables prints these words without quotes. In a comment they would be a single word.
	for i := 0; i+1 < len(words); i++ {
		if words[i] == "[unsupported" && words[i+1] == "revision]" {
			return "it has a match that this iptables cannot print"
		}
	}
	return readOptions(words, nil)
}

func isControl(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }
