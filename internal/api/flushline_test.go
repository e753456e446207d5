package api_test

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
)

// flushLine returns the line of a record that has every field.
func flushLine(t *testing.T) (api.FlushLine, []byte) {
	t.Helper()
	record := sample.Status().Flushes[0]
	record.LastInForce, record.AbsentAtMost = record.Time.Add(-time.Minute), true
	record.WrittenSeconds, record.KernelSeconds, record.DrillFailed = 0.1, 0.02, true
	record.Drill = api.DrillForReal
	record.Policies = []string{"ipv4 filter FORWARD is DROP, was ACCEPT"}
	record.Lost.UnprotectedUnknown = true
	record.Native = []api.NativeLoss{{
		Family: "ip", Table: "ip kube-proxy", Kind: "table_deleted", Why: "the ruleset was flushed: the witness went with it",
		Chains: 141, Rules: 189, Elements: 221, Parts: []string{"chain filter-input with 1 rule"}, More: 140, By: []uint32{4242},
	}}
	record.Lost.Elements = 221
	line := record.Line("node-1", api.Over)
	line.LeftOut = 7
	text, err := json.Marshal(line)
	if err != nil {
		t.Fatal(err)
	}
	return line, text
}

// TestFlushLine: the line has its own fields first, all of the record, and no text of a rule.
func TestFlushLine(t *testing.T) {
	_, text := flushLine(t)
	golden.Compare(t, "flushline.json", append(text, '\n'))
	if strings.Contains(strings.ReplaceAll(string(text), "iptables -F SECRET", ""), "-A SECRET") {
		t.Errorf("a rule is in %s", text)
	}
	var back struct {
		Event, Node, ID string
		Final           bool
	}
	if err := json.Unmarshal(text, &back); err != nil || back.Event != "flush" || back.Node != "node-1" || back.ID != "f1" || !back.Final {
		t.Errorf("%v, %+v", err, back)
	}
}

// TestFlushLineIsDocumented: docs/architecture.md has a row for each field of the line and no
// other.
func TestFlushLineIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(page), "<!-- fields of a flush -->")
	table, _, ends := strings.Cut(table, "<!-- end -->")
	if !found || !ends {
		t.Fatal("docs/architecture.md has no table of fields between its two comments")
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*?) \\|").FindAllStringSubmatch(table, -1) {
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			documented = append(documented, name[1])
		}
	}
	want := slices.DeleteFunc(fieldsOf(reflect.TypeFor[api.FlushLine](), ""), func(name string) bool { return name == "detail" }) // never in the line
	slices.Sort(documented)
	slices.Sort(want)
	if diff := cmp.Diff(want, documented); diff != "" {
		t.Errorf("the fields of the page are not those of the line (-line +page):\n%s", diff)
	}
}

// fieldsOf returns the JSON names of a struct's fields, and the paths of nested fields.
func fieldsOf(of reflect.Type, path string) (names []string) {
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		inner := f.Type
		for inner.Kind() == reflect.Slice || inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		within := inner.Kind() == reflect.Struct && inner != reflect.TypeFor[time.Time]()
		switch {
		case f.Anonymous:
			names = append(names, fieldsOf(inner, path)...)
			continue
		case name == "culprits" || name == "writers" || name == "standby": // as culprit; see docs/how-it-works.md
			within = false
		}
		names = append(names, path+name)
		if within {
			names = append(names, fieldsOf(inner, path+name+".")...)
		}
	}
	return names
}

// TestShorterFlushLine: a line that would be too long loses its lists, and says so.
func TestShorterFlushLine(t *testing.T) {
	line, _ := flushLine(t)
	long := api.Culprit{PID: 1, Comm: "nft", Command: strings.Repeat("<0>", 170), Ancestors: []string{"bash"}}
	for range 500 {
		line.Writers, line.Culprits = append(line.Writers, long), append(line.Culprits, long)
		line.Native = append(line.Native, line.Native[0])
		line.Policies = append(line.Policies, line.Policies[0])
		line.Lost.Tables = append(line.Lost.Tables[:min(len(line.Lost.Tables), 8)], line.Lost.Tables[0])
	}
	text, err := json.Marshal(line.Shorter())
	if err != nil || len(text) > 8<<10 || !strings.Contains(string(text), `"cut":true`) || !strings.Contains(string(text), `"id":"f1"`) {
		t.Errorf("%v, %d bytes: %.300s", err, len(text), text)
	}
	if len(line.Writers) < 500 || line.Culprits[len(line.Culprits)-1].Command != long.Command {
		t.Error("the record itself was changed")
	}
}

// TestStages: a flush lasts from ten seconds on, or as soon as it waits for a person. A removal
// that waits for its owner is no flush yet.
func TestStages(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for _, test := range []struct {
		outcome api.Outcome
		after   time.Duration
		want    api.Stage
	}{
		{api.Pending, 9 * time.Second, api.Fresh}, {api.Pending, 10 * time.Second, api.Lasts},
		{reload.Failed, time.Second, api.Fresh}, {reload.Failed, time.Minute, api.Lasts},
		{api.WaitingLock, 9 * time.Second, api.Fresh}, {api.WaitingLock, 10 * time.Second, api.Lasts},
		{api.WaitingOwner, time.Minute, api.Fresh},
		{api.WaitingObserve, 0, api.Lasts}, {api.WaitingPaused, 0, api.Lasts}, {api.AwaitingDecision, 0, api.Lasts},
		{reload.Partial, 0, api.Partly},
		{reload.Proved, 0, api.Over}, {reload.Raced, 0, api.Over}, {reload.Skipped, 0, api.Over}, {api.Dismissed, 0, api.Over},
		{api.Interrupted, 0, api.Over}, {api.Requested, 0, api.Over}, {api.Drilled, 0, api.Over}, {api.TakenForOwners, 0, api.Over},
	} {
		f := api.Flush{Time: at, Kind: canary.Emptied, Outcome: test.outcome}
		if got := f.Stage(at.Add(test.after)); got != test.want {
			t.Errorf("%s after %s: %d, want %d", test.outcome, test.after, got, test.want)
		}
	}
}
