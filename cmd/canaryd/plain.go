package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"k8s.io/klog/v2"
)

// plain returns text as one line without anything that moves a terminal's cursor, sets its title or
// changes colours. Other processes choose the names of chains, and iptables takes any byte but
// blanks in them. What does not print is escaped as Go does it.
func plain(text string) string {
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

// plainJSON escapes what encoding/json leaves alone and a terminal may obey: DEL, the C1 controls,
// and marks that turn the direction of writing. All of them stand inside strings.
func plainJSON(text []byte) []byte {
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

// plainLogger returns klog's logger with one line for each log entry. klog itself writes a value
// with newlines over several lines, and then also what controls a terminal; a chain's name or a
// rule may be such a value.
func plainLogger() klog.Logger {
	return klog.New(plainSink{klog.NewKlogr().GetSink(), &logBound{}}.WithCallDepth(1))
}

// A plainSink logs plain values, and keeps what -v did not ask for within bounds. klog quotes
// values of one line.
type plainSink struct {
	klog.LogSink
	bound *logBound
}

// Init does nothing, because the wrapped sink is already initialised.
func (s plainSink) Init(klog.RuntimeInfo) {}

func (s plainSink) Info(level int, message string, values ...any) {
	if level == 0 {
		more, ok := s.bound.admit(message)
		if !ok {
			return
		}
		values = append(values[:len(values):len(values)], more...)
	}
	s.LogSink.Info(level, message, plainValues(values)...)
}

func (s plainSink) Error(err error, message string, values ...any) {
	more, ok := s.bound.admit(message)
	if !ok {
		return
	}
	if err != nil {
		err = plainError{err}
	}
	s.LogSink.Error(err, message, plainValues(append(values[:len(values):len(values)], more...))...)
}

func (s plainSink) WithValues(values ...any) klog.LogSink {
	return plainSink{s.LogSink.WithValues(plainValues(values)...), s.bound}
}

func (s plainSink) WithName(name string) klog.LogSink {
	return plainSink{s.LogSink.WithName(name), s.bound}
}

func (s plainSink) WithCallDepth(depth int) klog.LogSink {
	if deeper, ok := s.LogSink.(interface{ WithCallDepth(int) klog.LogSink }); ok {
		return plainSink{deeper.WithCallDepth(depth), s.bound}
	}
	return s
}

type plainError struct{ error }

func (e plainError) Error() string { return oneLine(e.error.Error()) }
func (e plainError) Unwrap() error { return e.error }

func plainValues(values []any) []any {
	clean := make([]any, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case string:
			clean[i] = oneLine(v)
		case []string:
			names := make([]string, len(v))
			for j, name := range v {
				names[j] = plain(name)
			}
			clean[i] = names
		case error:
			clean[i] = plainError{v}
		default:
			clean[i] = v
		}
	}
	return clean
}

// oneLine joins the lines of text. klog quotes the rest.
func oneLine(text string) string { return strings.ReplaceAll(text, "\n", "; ") }
