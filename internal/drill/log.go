package drill

import (
	"fmt"
	"strconv"
	"strings"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
)

// logLines bounds the lines of the log in a drill's reply.
const logLines = 50

// A teeSink logs, and keeps each line for the present drill.
type teeSink struct {
	klog.LogSink
	drill *Drill
}

// Tee returns log with its lines kept for the drill's reply: the daemon logs the drill's loss
// with it (flushLog).
func (x *Drill) Tee(log klog.Logger) klog.Logger {
	sink := log.GetSink()
	if deeper, ok := sink.(interface{ WithCallDepth(int) klog.LogSink }); ok {
		sink = deeper.WithCallDepth(1)
	}
	return klog.New(teeSink{sink, x})
}

// Init does nothing, because the wrapped sink is already initialised.
func (s teeSink) Init(klog.RuntimeInfo) {}

// At returns the sink for lines of a level, if the wrapped sink knows levels; severity calls
// it.
func (s teeSink) At(level severity.Level) klog.LogSink {
	if leveler, ok := s.LogSink.(severity.Leveler); ok {
		s.LogSink = leveler.At(level)
	}
	return s
}

func (s teeSink) Info(level int, message string, values ...any) {
	s.drill.keep(message, values)
	s.LogSink.Info(level, message, values...)
}

func (s teeSink) Error(err error, message string, values ...any) {
	s.drill.keep(message, append(values[:len(values):len(values)], "err", err))
	s.LogSink.Error(err, message, values...)
}

func (s teeSink) WithValues(values ...any) klog.LogSink {
	return teeSink{s.LogSink.WithValues(values...), s.drill}
}

func (s teeSink) WithName(name string) klog.LogSink {
	return teeSink{s.LogSink.WithName(name), s.drill}
}

// keep adds a line in the log's form, without its time and place, to the reply; beyond logLines
// none.
func (x *Drill) keep(message string, values []any) {
	if len(x.Reply.Log) >= logLines {
		return
	}
	var b strings.Builder
	b.WriteString(strconv.Quote(message))
	for i := 0; i+1 < len(values); i += 2 {
		switch v := values[i+1].(type) {
		case int, []string:
			fmt.Fprintf(&b, " %v=%v", values[i], v)
		default:
			fmt.Fprintf(&b, " %v=%q", values[i], fmt.Sprint(v))
		}
	}
	x.Reply.Log = append(x.Reply.Log, b.String())
}
