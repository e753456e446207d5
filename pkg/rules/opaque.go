package rules

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"unicode/utf8"
)

// opaqueStart begins the Spec of an opaque rule; no text of iptables' begins with it.
//
// An opaque rule stands in the kernel, but has no text that may be written back: iptables prints
// it over several lines, prints what iptables-restore would read as something else, or does not
// understand it at all. Its Spec names it by a digest, so that it can be compared and counted
// like any other rule. A replay leaves it out and says why.
const opaqueStart = "# rule "

// MaxSpec is the longest text of a rule that iptables-restore reads. It cuts lines at 10,239
// characters (buffer in iptables-restore.c, 1.8.9), of which "-A CHAIN " and the end of the line
// need up to 64.
const MaxSpec = 10239 - 64

// OpaqueRule returns the opaque rule for these bytes. target is where the rule goes, as far as
// that is known; reason says why it has no text.
func OpaqueRule(identity []byte, target, reason string) Rule {
	return IdentityOf(identity).OpaqueRule(target, reason)
}

// An Identity is the digest that names an opaque rule.
type Identity [8]byte

// IdentityOf returns the Identity of the rule whose bytes are parts, one after the other.
func IdentityOf(parts ...[]byte) (id Identity) {
	sum := sha256.New()
	for _, part := range parts {
		_, _ = sum.Write(part)
	}
	copy(id[:], sum.Sum(nil))
	return id
}

// OpaqueRule returns the opaque rule with this Identity; see the function OpaqueRule.
func (id Identity) OpaqueRule(target, reason string) Rule {
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
	return parseOpaque(fmt.Sprintf("%s%x%s: %s", opaqueStart, id[:], to, reason))
}

func parseOpaque(spec string) Rule {
	head, _, _ := strings.Cut(spec[len(opaqueStart):], ": ")
	_, target, _ := strings.Cut(head, " to ")
	return Rule{Spec: spec, Target: target}
}

// Opaque reports whether the rule has no text that may be written, and why.
func (r Rule) Opaque() (reason string, opaque bool) {
	if !strings.HasPrefix(r.Spec, opaqueStart) {
		return "", false
	}
	_, reason, _ = strings.Cut(r.Spec, ": ")
	return reason, true
}

// whyNotWritable returns why a rule's text may not be written back, or "".
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
	// iptables prints this without quotes. In a comment the same words would be one word.
	for i := 0; i+1 < len(words); i++ {
		if words[i] == "[unsupported" && words[i+1] == "revision]" {
			return "it has a match that this iptables cannot print"
		}
	}
	return readOptions(words, nil)
}

func isControl(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }
