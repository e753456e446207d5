// Package terminal shows text of other processes without harm: escaped, in tables, and in
// colours if the writer is a terminal.
//
// [OnScreen] wraps a file, and marks it as a [Screen] if it shows colours. [Plain] escapes one
// text, [Table] writes rows, and [JSON] writes a value. [Agreed] asks a question, and takes a
// missing terminal for a no. The functions keep no state.
package terminal

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Plain returns text as one line without characters that move a terminal's cursor, set its
// title or change colours. Other processes choose the names of chains, and iptables takes any
// byte in them except blanks. Unprintable characters are escaped as in Go.
func Plain(text string) string {
	if strings.IndexFunc(text, unprintable) < 0 {
		return text
	}
	var b strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case unprintable(r):
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			b.WriteString(text[:size])
		}
		text = text[size:]
	}
	return b.String()
}

func unprintable(r rune) bool { return r == utf8.RuneError || !strconv.IsPrint(r) }

// PlainJSON escapes characters that encoding/json does not and that a terminal may obey: DEL,
// the C1 controls, and marks that reverse the direction of writing. All of them are inside
// strings.
func PlainJSON(text []byte) []byte {
	var b bytes.Buffer
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r < 0x7f || strconv.IsPrint(r):
			b.Write(text[:size])
		case r <= 0xffff:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		}
		text = text[size:]
	}
	return b.Bytes()
}

// OneLine joins the lines of text.
func OneLine(text string) string { return strings.ReplaceAll(text, "\n", "; ") }
