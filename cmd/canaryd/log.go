package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/canaryd/canaryd/internal/severity"
)

// mostLine bounds a line of the log, in bytes. Runtimes of containers split lines from 16 KiB
// on, and journald from 48 KiB on. The rest would look like a line of another process, and
// might begin with a level.
const mostLine = 15 << 10

// A lineWriter writes one line at a time, with its level if the journal reads it.
type lineWriter struct {
	mu      sync.Mutex
	out     io.Writer
	journal bool // journald strips a level off each line
}

// openLines returns the writer for standard output or standard error.
func openLines(file *os.File) *lineWriter {
	return &lineWriter{out: file, journal: isJournal(file, os.Getenv("JOURNAL_STREAM"))}
}

// isJournal reports whether a file is the stream to the journal that systemd names in
// JOURNAL_STREAM (stream): its device and inode. Lines then begin with their level
// (lineWriter.write).
func isJournal(file *os.File, stream string) bool {
	info, err := file.Stat()
	if err != nil {
		return false
	}
	is, ok := info.Sys().(*syscall.Stat_t)
	return ok && stream == fmt.Sprintf("%d:%d", is.Dev, is.Ino)
}

// write writes a line, which has no newline. For the journal the line begins with its level,
// such as <4>. Goroutines may call write at the same time.
func (w *lineWriter) write(level severity.Level, line []byte) {
	var b []byte
	if w.journal {
		b = fmt.Appendf(nil, "<%d>", level)
	}
	b = append(append(b, line...), '\n')
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = w.out.Write(b) // a log that cannot be written must not stop canaryd
}

// A lineSink writes the log's lines. Each is one line of plain text or JSON, has a level, and
// is bounded in number unless -v requests it. klog itself writes a value with newlines over
// several lines, and also writes terminal controls. A chain's name or a rule may be such a
// value.
type lineSink struct {
	to     *lineWriter
	bound  *logBound
	level  severity.Level // of all lines; 0: by Info, Error and -v
	json   bool
	klog   klog.LogSink // nil, or klog's own if klog's flags choose the output
	depth  int
	name   string
	values []any
}

// newLogger returns the logger that writes to w, with lines of JSON or text.
func newLogger(w *lineWriter, inJSON bool) klog.Logger {
	return klog.New(lineSink{to: w, bound: &logBound{}, json: inJSON})
}

// klogLogger returns klog's logger, with plain values and within bounds.
func klogLogger() klog.Logger {
	sink := klog.NewKlogr().GetSink().(interface{ WithCallDepth(int) klog.LogSink }).WithCallDepth(2)
	return klog.New(lineSink{bound: &logBound{}, klog: sink})
}

// Init does nothing, because newLogger has prepared the sink.
func (s lineSink) Init(klog.RuntimeInfo) {}

// Enabled queries klog, which has -v and -vmodule.
func (s lineSink) Enabled(v int) bool { return klog.VDepth(s.depth+2, klog.Level(v)).Enabled() }

// Info writes a line as klog's sink: v above 0 makes it a line for debugging.
func (s lineSink) Info(v int, message string, values ...any) {
	level := severity.Info
	if v > 0 {
		level = severity.Debug
	}
	s.line(level, v, nil, message, values)
}

func (s lineSink) Error(err error, message string, values ...any) {
	s.line(severity.Error, 0, err, message, values)
}

// line writes one line for Info and Error, unless there are too many of the same message. A
// level of the logger (severity) takes precedence over level, except for debugging. err may be
// nil.
func (s lineSink) line(level severity.Level, v int, err error, message string, values []any) {
	if s.level != 0 && level != severity.Debug {
		level = s.level
	}
	values = append(s.values[:len(s.values):len(s.values)], values...)
	if v == 0 {
		more, ok := s.bound.admit(message)
		if !ok {
			return
		}
		values = append(values, more...)
	}
	values = plainValues(values)
	if err != nil {
		err = plainError{err}
	}
	if s.klog != nil {
		if level == severity.Error {
			s.klog.Error(err, message, values...)
		} else if err != nil {
			s.klog.Info(v, message, append([]any{"err", err}, values...)...)
		} else {
			s.klog.Info(v, message, values...)
		}
		return
	}
	_, file, number, ok := runtime.Caller(3 + s.depth) // above line, Info, and the logger's own
	caller := filepath.Base(file) + ":" + strconv.Itoa(number)
	if !ok {
		caller = "???:1"
	}
	if s.json {
		s.to.write(level, jsonLine(level, time.Now(), caller, s.name, message, err, values))
	} else {
		s.to.write(level, s.textLine(level, caller, message, err, values))
	}
}

// textLine returns the line in klog's format, with W for a warning. caller is "FILE:LINE". A
// line longer than mostLine is cut.
func (s lineSink) textLine(level severity.Level, caller, message string, err error, values []any) []byte {
	var b bytes.Buffer
	file, number, _ := strings.Cut(caller, ":")
	at, _ := strconv.Atoi(number)
	sink := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&b),
		textlogger.Backtrace(func(int) (string, int) { return file, at }))).GetSink()
	if s.name != "" {
		sink = sink.WithName(s.name)
	}
	if err != nil {
		values = append([]any{"err", err}, values...)
	}
	sink.Info(0, message, values...)
	line := []byte(plain(strings.TrimSuffix(b.String(), "\n")))
	switch level {
	case severity.Error:
		line[0] = 'E'
	case severity.Warning:
		line[0] = 'W'
	}
	if len(line) > mostLine {
		line = append(bytes.ToValidUTF8(line[:mostLine], nil), "..."...)
	}
	return line
}

// jsonLine returns a line of JSON: time, level, caller, msg and err, and then the values by
// their keys. If it is longer than mostLine, long values are cut, and "cut" says so.
func jsonLine(level severity.Level, at time.Time, caller, name, message string, err error, values []any) []byte {
	fields := []any{"time", at.UTC().Format(time.RFC3339Nano), "level", level.String(), "caller", caller, "msg", message}
	if name != "" {
		fields = append(fields, "logger", name)
	}
	if err != nil {
		fields = append(fields, "err", err)
	}
	fields = append(fields, values...)
	line := plainJSON(jsonObject(fields, 0))
	for most := 2048; len(line) > mostLine && most > 0; most /= 2 {
		line = plainJSON(jsonObject(append(fields[:len(fields):len(fields)], "cut", true), most))
	}
	return line
}

// jsonObject returns keys and values as an object. If a key appears twice, the first value
// counts. It cuts text longer than most; 0 is no limit.
func jsonObject(fields []any, most int) []byte {
	b, seen := []byte{'{'}, map[string]bool{}
	for i := 0; i+1 < len(fields); i += 2 {
		key := fmt.Sprint(fields[i])
		if seen[key] {
			continue
		}
		seen[key] = true
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(append(b, encoded(key)...), ':'), jsonValue(fields[i+1], most)...)
	}
	return append(b, '}')
}

// jsonValue returns a value as JSON; an error or a value with a text form becomes text. It cuts
// a text longer than most bytes, and turns other long values into text; 0 is no limit.
func jsonValue(v any, most int) []byte {
	switch x := v.(type) {
	case error:
		v = x.Error()
	case time.Time:
		v = x.UTC().Format(time.RFC3339Nano)
	case fmt.Stringer:
		v = x.String()
	}
	if text, ok := v.(string); ok && most > 0 && len(text) > most {
		v = strings.ToValidUTF8(text[:most], "") + "..."
	}
	value := encoded(v)
	if most > 0 && len(value) > 2*most {
		value = encoded(strings.ToValidUTF8(string(value[:most]), "") + "...")
	}
	return value
}

// encoded returns a value as JSON, or as text if it cannot be encoded.
func encoded(v any) []byte {
	var b bytes.Buffer
	to := json.NewEncoder(&b)
	to.SetEscapeHTML(false)
	if err := to.Encode(v); err != nil {
		b.Reset()
		_ = to.Encode(fmt.Sprint(v)) // text can always be encoded
	}
	return bytes.TrimSuffix(b.Bytes(), []byte{'\n'})
}

// At returns the sink for lines of a level.
func (s lineSink) At(level severity.Level) klog.LogSink {
	s.level = level
	return s
}

func (s lineSink) WithValues(values ...any) klog.LogSink {
	s.values = append(s.values[:len(s.values):len(s.values)], values...)
	return s
}

// WithName returns the sink with one more name, which its lines show; klog calls it.
func (s lineSink) WithName(name string) klog.LogSink {
	if s.name != "" {
		name = s.name + "." + name
	}
	s.name = name
	return s
}

// WithCallDepth returns the sink for a caller that is depth calls further away, whose file and
// line the lines name.
func (s lineSink) WithCallDepth(depth int) klog.LogSink {
	s.depth += depth
	if deeper, ok := s.klog.(interface{ WithCallDepth(int) klog.LogSink }); ok {
		s.klog = deeper.WithCallDepth(depth)
	}
	return s
}

type plainError struct{ error }

func (e plainError) Error() string { return oneLine(e.error.Error()) }
func (e plainError) Unwrap() error { return e.error }

// plainValues returns keys and values of one line each, without nil values and zero times,
// which carry no information. A time is in UTC, as in status and records.
func plainValues(values []any) []any {
	clean := make([]any, 0, len(values))
	for i := 0; i < len(values); i += 2 {
		if i+1 == len(values) {
			return append(clean, values[i], "(no value)")
		}
		v := values[i+1]
		switch is := reflect.ValueOf(v); {
		case !is.IsValid(), (is.Kind() == reflect.Pointer || is.Kind() == reflect.Slice || is.Kind() == reflect.Map) && is.IsNil():
			continue
		}
		switch text := v.(type) {
		case time.Time:
			if text.IsZero() {
				continue
			}
			v = text.UTC().Format(time.RFC3339)
		case string:
			v = oneLine(text)
		case []string:
			names := make([]string, len(text))
			for j, name := range text {
				names[j] = plain(name)
			}
			v = names
		case error:
			v = plainError{text}
		}
		clean = append(clean, values[i], v)
	}
	return clean
}
