// Package severity gives log lines the levels that klog lacks. klog has information and errors;
// syslog, journald and people also distinguish notices and warnings.
//
// [Errors], [Warnings], [Notices] and [Infos] return a logger of that [Level]. A sink that
// implements [Leveler] writes the level; any other sink writes the lines like klog's. Any
// goroutine may use the loggers.
package severity

import "github.com/go-logr/logr"

// A Level is a level of syslog(3), as sd-daemon(3) writes it in front of a line.
type Level int

// The levels. A line without a level is Info; an error is Error, and -v's lines are Debug.
const (
	// Error means that rules are missing, unknown or not guarded, or that canaryd cannot do its
	// work.
	Error Level = 3
	// Warning means that rules were removed, or that a protection is weaker than requested.
	Warning Level = 4
	// Notice means that trouble is over, that rules are back, or that an operator requested
	// something.
	Notice Level = 5
	Info   Level = 6
	Debug  Level = 7
)

// String returns the level's name for journalctl --priority.
func (l Level) String() string {
	return map[Level]string{Error: "err", Warning: "warning", Notice: "notice", Info: "info", Debug: "debug"}[l]
}

// A Leveler is a sink that knows the levels. Other sinks get the lines like klog's.
type Leveler interface {
	// At returns a sink that writes all lines at the level.
	At(Level) logr.LogSink
}

// Errors returns a logger that writes all lines as errors, even lines without an error.
func Errors(log logr.Logger) logr.Logger { return at(log, Error) }

// Warnings returns a logger that writes all lines as warnings.
func Warnings(log logr.Logger) logr.Logger { return at(log, Warning) }

// Notices returns a logger that writes all lines as notices.
func Notices(log logr.Logger) logr.Logger { return at(log, Notice) }

// Infos returns a logger that writes all lines as information, even lines with an error.
func Infos(log logr.Logger) logr.Logger { return at(log, Info) }

// at returns log with lines of that level, if its sink knows levels; else log itself.
func at(log logr.Logger, level Level) logr.Logger {
	if sink, ok := log.GetSink().(Leveler); ok {
		return log.WithSink(sink.At(level))
	}
	return log
}
