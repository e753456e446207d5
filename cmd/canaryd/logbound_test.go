package main

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestLogBound: a storm of one message is cut to 60 lines and then one a second. The next line
// counts the dropped ones, other messages are not affected, and after a quiet minute the bound
// starts again.
func TestLogBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b logBound
		storm := func(lines int, each time.Duration) (written, counted int) {
			for range lines {
				values, ok := b.admit("storm")
				if ok {
					written++
				}
				if len(values) > 0 && values[0] == "leftOut" {
					counted += values[1].(int)
				}
				time.Sleep(each)
			}
			return written, counted
		}
		var got []string
		note := func(what string, written, counted int) {
			got = append(got, fmt.Sprintf("%s: %d written, %d said to be left out", what, written, counted))
		}
		w, c := storm(1000, 0)
		note("at once", w, c)
		if values, ok := b.admit("other"); !ok || values != nil {
			t.Errorf("another message: %v, %t", values, ok)
		}
		w, c = storm(1000, 10*time.Millisecond)
		note("in ten seconds", w, c)
		time.Sleep(time.Minute)
		w, c = storm(60, 0)
		note("after a minute", w, c)
		want := []string{
			"at once: 60 written, 0 said to be left out",
			"in ten seconds: 9 written, 1832 said to be left out",
			"after a minute: 60 written, 99 said to be left out",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		for i := range 2 * logMessages {
			b.admit(fmt.Sprint(i))
		}
		if len(b.messages) > logMessages+1 {
			t.Errorf("%d messages are counted", len(b.messages))
		}
	})
}

// TestLogBoundIsInTheLog: canaryd's logger has the bound, also after WithValues.
func TestLogBoundIsInTheLog(t *testing.T) {
	log := newLogger(&lineWriter{}, false).WithValues("a", "b")
	sink, ok := log.GetSink().(lineSink)
	if !ok || sink.bound == nil {
		t.Fatalf("the sink is %T, its bound nil: %t", log.GetSink(), sink.bound == nil)
	}
}
