package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TestFlushLinesCannotBeForged: a flusher chooses its own name, and the names of chains. Its
// line must be one line of JSON with the facts of its record.
func TestFlushLinesCannotBeForged(t *testing.T) {
	f := sample.Status().Flushes[0]
	f.Culprit.Comm, f.Culprit.Command, f.Culprit.Unit, f.Culprit.ContainerName = forged, forged, forged, forged
	f.Lost.Tables[0].PerChain[0].Chain, f.Policies, f.Detail = forged, []string{forged}, forged
	f.Native = []api.NativeLoss{{Table: "ip " + forged, Why: forged, Parts: []string{forged}}}
	f.Drill = ""
	for _, test := range []struct {
		stage   api.Stage
		outcome api.Outcome
		drill   api.DrillSort
		level   string
	}{
		{api.Over, reload.Proved, "", "<4>"}, {api.Lasts, reload.Failed, "", "<3>"}, {api.Partly, reload.Partial, "", "<3>"},
		{api.Over, api.Drilled, api.DrillCanary, "<5>"}, {api.Over, api.Requested, "", "<5>"}, {api.Over, api.TakenForOwners, "", "<4>"},
	} {
		f.Outcome, f.Drill = test.outcome, test.drill
		var out bytes.Buffer
		lines := &flushLines{to: &lineWriter{out: &out, journal: true}, node: "node\n<0>"}
		lines.say(klog.Background(), f, test.stage)
		line, whole := strings.CutSuffix(out.String(), "\n")
		if !whole || strings.Contains(line, "\n") || plain(line) != line {
			t.Errorf("%s: not one plain line: %q", test.outcome, out.String())
		}
		rest, levelled := strings.CutPrefix(line, test.level+`{"event":"flush",`)
		var got api.Flush
		if err := json.Unmarshal([]byte("{"+rest), &got); err != nil || !levelled {
			t.Errorf("%s: %v in %q", test.outcome, err, line)
		}
		want := strings.ToValidUTF8(forged, "\ufffd")
		if got.Culprit.Comm != want || got.Lost.Tables[0].PerChain[0].Chain != want || got.Detail != "" {
			t.Errorf("%s: %q", test.outcome, line)
		}
	}
}

// TestLongFlushLine: a record with hundreds of writers fits one line.
func TestLongFlushLine(t *testing.T) {
	f := sample.Status().Flushes[0]
	for range 512 {
		w := f.Culprit
		w.Command = strings.Repeat("\u202e<", 256)
		f.Writers, f.Culprits = append(f.Writers, w), append(f.Culprits, w)
	}
	var out bytes.Buffer
	(&flushLines{to: &lineWriter{out: &out}}).say(klog.Background(), f, api.Over)
	if out.Len() > mostLine || !json.Valid(out.Bytes()) || !strings.Contains(out.String(), `"cut":true`) {
		t.Errorf("%d bytes: %.300s", out.Len(), out.String())
	}
}

// TestFlushLinesAreBounded: a storm of flushes writes 60 lines at once and then one a second.
// Each line counts the lines dropped before it.
func TestFlushLinesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		lines := &flushLines{to: &lineWriter{out: &out}}
		for range 1000 {
			lines.say(klog.Background(), api.Flush{ID: "f1", Outcome: reload.Proved}, api.Over)
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		lines.say(klog.Background(), api.Flush{ID: "f2", Outcome: reload.Proved}, api.Over)
		written, leftOut := 0, 0
		for text := range strings.Lines(out.String()) {
			var line struct {
				LeftOut int `json:"leftOut"`
			}
			if err := json.Unmarshal([]byte(text), &line); err != nil {
				t.Fatal(err)
			}
			written, leftOut = written+1, leftOut+line.LeftOut
		}
		if diff := cmp.Diff([2]int{1001 - 931, 931}, [2]int{written, leftOut}); diff != "" {
			t.Errorf("written and left out (-want +got):\n%s", diff)
		}
	})
}

// A failing writer is a pipe whose reader has ended.
type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// TestFlushLinesWithoutAReader: canaryd continues when standard output cannot be written.
func TestFlushLinesWithoutAReader(t *testing.T) {
	lines, said := &flushLines{to: &lineWriter{out: failing{}}}, 0
	lines.run(t.Context(), func(_ context.Context, say func(api.Flush, api.Stage)) {
		for range 3 {
			say(api.Flush{ID: "f1", Outcome: reload.Proved}, api.Over)
			said++
		}
	})
	if said != 3 {
		t.Errorf("%d flushes were reported", said)
	}
}
