package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/terminal"
)

const redacted = "(redacted)"

// harmless are the keys of canaryd's log whose values stay: names, IDs and verdicts that
// canaryd also shows over HTTP. Counts, durations and times stay only if they look like one,
// because the key rules may also hold the rules themselves. The values of all other keys are
// removed: err, reason and by may quote rules and command lines, and so may a new key.
var harmless = map[string]*regexp.Regexp{}

// init fills harmless: the keys of a log line whose values may be shown, with the form that the
// values must have.
func init() {
	name, number := regexp.MustCompile(``), regexp.MustCompile(`^"?-?[0-9][0-9A-Za-zµ.:+-]*"?$`)
	for _, key := range []string{"backend", "chain", "chains", "families", "family", "flush", "generation", "kind", "mode", "outcome", "outcomes", "result", "table", "tables", "version"} {
		harmless[key] = name
	}
	for _, key := range []string{"absent", "after", "age", "atMost", "attempts", "behindSince", "elements", "every", "jumps", "leftOut", "noticedAfter", "open", "pid", "rules", "takes", "until"} {
		harmless[key] = number
	}
	for _, key := range []string{"time", "level", "caller", "msg", "cut", "logger"} { // of lines of JSON
		harmless[key] = name
	}
}

// shown returns a value if its key is harmless and the value has the key's form, and instead
// for any other. Unknown keys of a log are thus redacted.
func shown(key, value, instead string) string {
	if is := harmless[key]; is != nil && is.MatchString(value) {
		return value
	}
	return instead
}

// redactLog returns a log for the archive without rules, comments, addresses and command lines.
// Unknown lines are only counted, because another program may have written them. With
// unredacted all lines stay.
func redactLog(log []byte, unredacted bool) []byte {
	var b bytes.Buffer
	foreign := 0
	flush := func() {
		if foreign > 0 {
			fmt.Fprintf(&b, "(%s left out)\n", count(foreign, "other line"))
		}
		foreign = 0
	}
	for line := range bytes.Lines(log) {
		text := strings.TrimRight(string(line), "\r\n")
		if !unredacted {
			var ok bool
			if text, ok = redactLine(text); !ok {
				foreign++
				continue
			}
		}
		flush()
		b.WriteString(terminal.Plain(text) + "\n")
	}
	flush()
	return b.Bytes()
}

// header is the beginning of a line of text: level, date, time, process and source (klog).
var header = regexp.MustCompile(`^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ [\w.?-]{1,80}:\d+\] `)

// trace matches the lines of Go's stack traces that only have places in canaryd's source.
var trace = regexp.MustCompile(`^(goroutine \d+ [\w =*]*\[[a-zA-Z ]+(, \d+ minutes)?\]:|\t/[\w./@+-]+\.go:\d+( \+0x[0-9a-f]+)?|panic: runtime error: [a-z ]+)`)

// redactLine returns a line of a log without its secrets; false if it is no line of canaryd's.
// Of a trace of Go it keeps the known form.
func redactLine(line string) (string, bool) {
	if strings.HasPrefix(line, "{") {
		return redactJSON([]byte(line))
	}
	if at := header.FindString(line); at != "" {
		return at + redactValues(line[len(at):]), true
	}
	known := trace.FindString(line)
	return known, known != ""
}

// redactValues redacts a message in quotes, and the keys with values after it. If it cannot
// split the text, the rest is redacted.
func redactValues(text string) string {
	message, rest, ok := quoted(text)
	if !ok {
		return redacted
	}
	var b strings.Builder
	b.WriteString(message)
	for rest != "" {
		key, value, next, ok := pair(rest)
		if !ok { // keys and values cannot be found in the rest
			return b.String() + " " + redacted
		}
		b.WriteString(" " + key + "=" + shown(key, value, redacted))
		rest = next
	}
	return b.String()
}

var keys = regexp.MustCompile(`^ ([A-Za-z][A-Za-z0-9]{0,39})=`)

// pair takes a key and its value off the text: a string in quotes, JSON, or a word. ok is false
// if the text does not begin with a pair.
func pair(text string) (key, value, rest string, ok bool) {
	m := keys.FindStringSubmatch(text)
	if m == nil {
		return "", "", "", false
	}
	key, text = m[1], text[len(m[0]):]
	switch {
	case strings.HasPrefix(text, `"`):
		value, rest, ok = quoted(text)
	case strings.HasPrefix(text, "[") || strings.HasPrefix(text, "{"):
		read := json.NewDecoder(strings.NewReader(text))
		var raw json.RawMessage
		if read.Decode(&raw) != nil {
			return "", "", "", false
		}
		end := read.InputOffset()
		value, rest, ok = text[:end], text[end:], true
	default:
		end := strings.IndexByte(text, ' ')
		if end < 0 {
			end = len(text)
		}
		value, rest, ok = text[:end], text[end:], end > 0 && !strings.ContainsAny(text[:end], `"<`)
	}
	return key, value, rest, ok && (rest == "" || rest[0] == ' ')
}

// quoted takes a string of Go off the text, with its quotes. ok is false if the text does not
// begin with one.
func quoted(text string) (value, rest string, ok bool) {
	value, err := strconv.QuotedPrefix(text)
	if err != nil || !strings.HasPrefix(value, `"`) {
		return "", "", false
	}
	return value, text[len(value):], true
}

// redactJSON redacts a line of JSON: of a flush, or of the log; false if it is neither, and is
// left out.
func redactJSON(line []byte) (string, bool) {
	if !utf8.Valid(line) || tooLarge(line) {
		return "", false
	}
	var values map[string]json.RawMessage
	if json.Unmarshal(line, &values) != nil {
		return "", false
	}
	if string(values["event"]) == `"`+api.EventFlush+`"` {
		var f api.FlushLine
		if json.Unmarshal(line, &f) != nil {
			return "", false
		}
		f.Event, f.Flush = api.EventFlush, api.Status{Flushes: []api.Flush{f.Flush}}.Public().Flushes[0]
		text, err := json.Marshal(f)
		return string(terminal.PlainJSON(text)), err == nil
	}
	if values["msg"] == nil || values["level"] == nil {
		return "", false
	}
	// The order of the line changes: these first, then by name.
	first := []string{"time", "level", "caller", "msg"}
	var names []string
	for name := range values {
		if !slices.Contains(first, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var b strings.Builder
	for _, name := range append(first, names...) {
		value := string(values[name])
		if value == "" {
			continue
		}
		value = shown(name, value, `"`+redacted+`"`)
		if !keys.MatchString(" " + name + "=") {
			name = redacted
		}
		fmt.Fprintf(&b, `,%q:%s`, name, value)
	}
	return "{" + b.String()[1:] + "}", true
}

// maybeAddress matches words that may be IP addresses, and URLs.
var maybeAddress = regexp.MustCompile(`https?://[^\s"\\]+|[0-9a-fA-F:.]{3,}`)

// quad matches IPv4 addresses in longer words: "de:10.0.0.1" is the end of "node:10.0.0.1".
var quad = regexp.MustCompile(`[0-9]{1,3}(\.[0-9]{1,3}){3}`)

const address = "(address)"

// withoutAddresses returns text without IP addresses and URLs: the last step before a file
// enters the archive, for words that no other step knew.
func withoutAddresses(text []byte) []byte {
	return maybeAddress.ReplaceAllFunc(text, func(found []byte) []byte {
		word := string(found)
		if strings.HasPrefix(word, "http") || isAddress(word) {
			return []byte(address)
		}
		for at := range len(word) { // the letters before a colon may belong to the previous word
			if word[at] == ':' && isAddress(word[at+1:]) {
				return []byte(word[:at+1] + address)
			}
		}
		return quad.ReplaceAll(found, []byte(address))
	})
}

// isAddress reports whether a word is an IP address, with or without a port, also at the end of
// a sentence.
func isAddress(word string) bool {
	for _, w := range []string{word, strings.Trim(word, "."), strings.TrimRight(word, ":.")} {
		_, notOne := netip.ParseAddr(w)
		_, notWithPort := netip.ParseAddrPort(w)
		if notOne == nil || notWithPort == nil {
			return true
		}
	}
	return false
}
