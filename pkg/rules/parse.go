package rules

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
)

// A ParseError names the wrong text, and says why it is wrong.
type ParseError struct {
	Line   int    // 1 for the first line; 0 where there are no lines
	Text   string // empty where it must not be shown
	Reason string
}

// Error names the line, if there is one, the first 120 bytes of its text, if it may be
// shown, and the reason.
func (e *ParseError) Error() string {
	text := e.Text
	if len(text) > 120 {
		text = text[:120] + "..."
	}
	what := e.Reason
	if text != "" {
		what = fmt.Sprintf("%q %s", text, e.Reason)
	}
	if e.Line == 0 {
		return what
	}
	return fmt.Sprintf("line %d: %s", e.Line, what)
}

// maxLine is the longest line of a save file that is kept whole. A rule on a longer line is
// opaque; so are much shorter rules: see MaxSpec.
const maxLine = 64 << 10

// Parse reads the output of iptables-save, for one family.
//
// A table that iptables could not print ("is incompatible, use 'nft' tool") is not in set. It
// is in unreadable with the reason, because it is unknown, not empty. A line that does not
// follow the format is a *ParseError, and Parse returns nothing else. A rule may have been
// printed over several lines, and then no later line is certain. A rule on one line whose text
// may not be written back is opaque.
func Parse(r io.Reader) (set Ruleset, unreadable map[TableName]error, err error) {
	p := parser{set: Ruleset{}, unreadable: map[TableName]error{}}
	lines := lineReader{in: bufio.NewReaderSize(r, maxLine)}
	for {
		line, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, fmt.Errorf("reading line %d: %w", lines.number+1, err)
		}
		text := strings.TrimRight(string(line), "\r")
		if reason := p.line(text); reason != "" {
			return nil, nil, &ParseError{Line: lines.number, Text: text, Reason: reason}
		}
	}
	if p.table != nil {
		return nil, nil, &ParseError{Line: lines.number, Text: "*" + string(p.table.Name), Reason: "is not closed by COMMIT"}
	}
	return p.set, p.unreadable, nil
}

// A lineReader cuts a text into lines. If a line is longer than maxLine, it returns the
// beginning, which is still too long for a rule that may be written back.
type lineReader struct {
	in     *bufio.Reader
	number int // of the last line
	err    error
}

// next returns the next line for Parse, cut off at maxLine bytes. It is valid until the
// next call. The error is io.EOF at the end, or the reader's.
func (l *lineReader) next() ([]byte, error) {
	if l.err != nil {
		return nil, l.err
	}
	line, err := l.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		line = bytes.Clone(line)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = l.in.ReadSlice('\n')
		}
	}
	if err != nil && (len(line) == 0 || !errors.Is(err, io.EOF)) {
		return nil, err
	}
	l.number++
	l.err = err
	return bytes.TrimSuffix(line, []byte("\n")), nil
}

type parser struct {
	set        Ruleset
	unreadable map[TableName]error
	table      *Table
}

// line reads a line of iptables-save for Parse, or returns why it does not follow the
// format; "" if it does.
func (p *parser) line(text string) (reason string) {
	switch {
	case p.table == nil && strings.TrimSpace(text) == "":
	case text == "":
		return "is an empty line inside a table"
	case p.table == nil && text[0] == '#':
		p.comment(text)
	case text[0] == '*':
		name := TableName(strings.TrimSpace(text[1:]))
		if p.table != nil {
			return "opens a table inside another one"
		}
		if p.set[name] != nil {
			return "opens a table that was closed before"
		}
		p.table = NewTable(name)
	case p.table == nil:
		return "is outside a table"
	case text == "COMMIT":
		p.set[p.table.Name] = p.table
		p.table = nil
	case text[0] == ':':
		return p.declaration(text)
	case text[0] == '[' || strings.HasPrefix(text, "-A "):
		return p.rule(text)
	default:
		return "is neither a chain, a rule nor COMMIT"
	}
	return ""
}

// comment records a table that iptables-nft-save cannot print:
//
//	# Table `nat' is incompatible, use 'nft' tool.
func (p *parser) comment(text string) {
	rest, found := strings.CutPrefix(text, "# Table `")
	if !found || !strings.Contains(text, "is incompatible") {
		return
	}
	name, _, _ := strings.Cut(rest, "'")
	p.unreadable[TableName(name)] = &ParseError{Text: text, Reason: "holds rules that iptables cannot print"}
}

// declaration reads ":NAME POLICY [packets:bytes]" for line, and adds the chain. It returns
// why it cannot, or "".
func (p *parser) declaration(text string) (reason string) {
	fields := strings.Fields(text[1:])
	if len(fields) < 2 {
		return "lacks a chain's name or policy"
	}
	c := Chain{Name: fields[0]}
	if Builtin(p.table.Name, c.Name) && fields[1] != "-" {
		c.Policy = fields[1]
	}
	p.table.Add(c)
	return ""
}

// withoutCounters returns a rule's line without the counters that iptables-save -c prints
// first. reason says why it cannot remove them; "" if it can.
func withoutCounters(line string) (rule, reason string) {
	if !strings.HasPrefix(line, "[") {
		return line, ""
	}
	_, rule, found := strings.Cut(line, "] ")
	if !found {
		return "", "has counters without a closing bracket"
	}
	return rule, ""
}

// rule reads "-A CHAIN RULE" for line, and adds the rule to its chain. It returns why it
// cannot, or "".
func (p *parser) rule(text string) (reason string) {
	line, reason := withoutCounters(text)
	if reason != "" {
		return reason
	}
	rest, found := strings.CutPrefix(line, "-A ")
	if !found {
		return "is not a rule"
	}
	name, spec, _ := strings.Cut(rest, " ")
	chain := p.table.Chain(name)
	if chain == nil {
		return "adds to a chain that is not declared"
	}
	chain.Rules = append(chain.Rules, PrintedRule(spec))
	return ""
}

// ParseRule reads a rule's text: the part behind "-A CHAIN ". Fragments, stored generations
// and scripts are read so. A rule whose text may not be written back is opaque. The error is
// a *ParseError: the text cannot be split, or its bytes do not fit its digest.
func ParseRule(spec string) (Rule, error) {
	if strings.HasPrefix(spec, opaqueStart) {
		rule := parseOpaque(spec)
		if rule.HasBytes() {
			if _, _, _, ok := rule.Bytes(); !ok {
				return Rule{}, &ParseError{Text: rule.Label(), Reason: "names bytes that are not those of its digest"}
			}
		}
		return rule, nil
	}
	words, err := Split(spec)
	if err != nil {
		return Rule{}, err
	}
	goes, understood := target(words)
	if reason := whyNotWritable(spec, words, understood); reason != "" {
		return OpaqueRule([]byte(spec), goes, reason), nil
	}
	return Rule{Spec: spec, Target: goes}, nil
}

// PrintedRule reads the text of a rule that iptables printed. If ParseRule refuses the text,
// PrintedRule returns an opaque rule. Up to iptables 1.8.7 iptables prints a space behind some
// matches, even at the end of a rule.
func PrintedRule(spec string) Rule {
	spec = strings.TrimRight(spec, " ")
	rule, err := ParseRule(spec)
	if err != nil {
		return OpaqueRule([]byte(spec), "", "it "+reasonOf(err))
	}
	return rule
}

// reasonOf returns the reason of a *ParseError, without the text; of any other error its
// message.
func reasonOf(err error) string {
	if wrong, ok := errors.AsType[*ParseError](err); ok {
		return wrong.Reason
	}
	return err.Error()
}

// target returns the target of a rule for ParseRule; "" if it has none. understood says that
// each word is a known option of a rule or its value. Otherwise ParseRule checks whether the
// text may be written.
func target(words []string) (name string, understood bool) {
	var exts roomForExtensions
	var opts roomForOptions
	f := form{exts: exts[:0], opts: opts[:0]}
	if f.read(words) {
		if f.target >= 0 {
			name = f.exts[f.target].name
		}
		return name, f.understood()
	}
	for i := 0; i+1 < len(words); i++ {
		switch words[i] {
		case "--comment", "--log-prefix", "--nflog-prefix", "--string":
			i++ // the next word is free text, not an option
		case "-j", "-g", "--jump", "--goto":
			name = words[i+1]
		}
	}
	return name, false
}
