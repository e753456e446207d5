package drill

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
)

// A levelSink keeps the levels of its lines.
type levelSink struct {
	level severity.Level
	lines *[]severity.Level
}

func (s levelSink) Init(klog.RuntimeInfo)                {}
func (s levelSink) Enabled(int) bool                     { return true }
func (s levelSink) Info(int, string, ...any)             { *s.lines = append(*s.lines, s.level) }
func (s levelSink) Error(error, string, ...any)          { *s.lines = append(*s.lines, s.level) }
func (s levelSink) WithValues(...any) klog.LogSink       { return s }
func (s levelSink) WithName(string) klog.LogSink         { return s }
func (s levelSink) At(level severity.Level) klog.LogSink { return levelSink{level, s.lines} }

// TestLevelsInDrill: a line of the log that a drill's reply keeps has the same level as without
// a drill, and is in the reply.
func TestLevelsInDrill(t *testing.T) {
	var got []severity.Level
	x := &Drill{}
	log := x.Tee(klog.New(levelSink{severity.Info, &got}))
	severity.Errors(log).Info("A rule is in quarantine")
	severity.Warnings(log).Error(nil, "The rules are back")
	severity.Notices(log.WithValues("flush", "f1")).Info("The drill has passed")
	log.Info("Starting")
	if diff := cmp.Diff([]severity.Level{severity.Error, severity.Warning, severity.Notice, severity.Info}, got); diff != "" {
		t.Errorf("levels (-want +got):\n%s", diff)
	}
	if len(x.Reply.Log) != 4 {
		t.Errorf("the reply has %q", x.Reply.Log)
	}
}
