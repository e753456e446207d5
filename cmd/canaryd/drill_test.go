package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A driller answers drills, and keeps its requests.
type driller struct {
	control.Controller
	reply api.DrillReply
	asked *[]api.DrillRequest
}

func (d driller) Drill(_ context.Context, r api.DrillRequest) (api.DrillReply, error) {
	*d.asked = append(*d.asked, r)
	return d.reply, nil
}

// passedDrill is a daemon's reply to a passed drill.
func passedDrill() api.DrillReply {
	return api.DrillReply{
		DrillEnd: api.DrillEnd{Time: time.Date(2026, 11, 22, 3, 0, 0, 0, time.UTC), Sort: api.DrillCanary, Result: api.DrillPassed, Flush: "660c8b90ccb7b"},
		Table:    rules.Nat, Kind: canary.ChainDeleted, Families: rules.Families(),
		Steps: []api.DrillStep{
			{What: "canaryd has taken away its canary of table nat"}, {Seconds: 0.0004, What: "a hint: something was written"},
			{Seconds: 0.00061, What: "noticed: ipv4 nat chain_deleted"}, {Seconds: 0.0243, What: "proved by a read of all tables"},
		},
		Log:   []string{`"A drill took the canary, and no rule" flush="660c8b90ccb7b"` + "\x1b[2J"},
		Alert: api.AlertOfFlush(false),
	}
}

// TestDrill: each result of a drill has its output and its exit code.
func TestDrill(t *testing.T) {
	void, real, refused := passedDrill(), passedDrill(), passedDrill()
	void.Result, void.Reason = api.DrillVoid, "another process flushed rules meanwhile"
	real.Sort, real.Kind, real.Jumps, real.Alert = api.DrillForReal, canary.JumpsMissing, 2, api.AlertOfFlush(true)
	native := passedDrill()
	native.Table, native.Kind, native.Families, native.Native = api.DrillNative, canary.TableDeleted, nil, []string{"ip canaryd-drill"}
	native.Steps = []api.DrillStep{{What: "canaryd has taken away its own table ip canaryd-drill"}, {Seconds: 0.0003, What: "noticed: ip canaryd-drill table_deleted"}, {Seconds: 0.0214, What: "proved by a read"}}
	refused.Result, refused.Reason = api.DrillRefused, "replays are paused until 2026-11-22T04:00:00Z"
	for _, test := range []struct {
		name  string
		reply api.DrillReply
		args  []string
		code  int
		want  api.DrillRequest
	}{
		{"passed", passedDrill(), []string{"--kind=emptied", "--table=filter"}, exitOK, api.DrillRequest{Table: rules.Filter, Kind: canary.Emptied}},
		{"json", passedDrill(), []string{"-o", "json"}, exitOK, api.DrillRequest{}},
		{"void", void, nil, exitNo, api.DrillRequest{}},
		{"for-real", real, []string{"--for-real", "--yes"}, exitOK, api.DrillRequest{ForReal: true}},
		{"refused", refused, nil, exitError, api.DrillRequest{}},
		{"native", native, []string{"--table=native", "--kind=table_deleted"}, exitOK, api.DrillRequest{Table: api.DrillNative, Kind: canary.TableDeleted}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var asked []api.DrillRequest
			socket := serveControl(t, driller{reply: test.reply, asked: &asked})
			code, stdout, stderr := call(t, append([]string{"drill", "--socket=" + socket}, test.args...)...)
			if code != test.code || (stderr != "") != (test.reply.Result == api.DrillRefused) {
				t.Errorf("exit code %d, want %d; %q on stderr", code, test.code, stderr)
			}
			if diff := cmp.Diff([]api.DrillRequest{test.want}, asked); diff != "" {
				t.Errorf("the daemon was asked (-want +got):\n%s", diff)
			}
			if strings.Contains(stdout, "\x1b") {
				t.Error("the terminal is given a control character of the log")
			}
			golden(t, "drill-"+test.name, stdout+stderr)
		})
	}
}

// TestDrillForRealAsks: no jump is removed without a yes.
func TestDrillForRealAsks(t *testing.T) {
	for answer, agreed := range map[string]bool{"y\n": true, "YES\n": true, "\n": false, "n\n": false, "": false, "yesterday\n": false} {
		var asked []api.DrillRequest
		socket := serveControl(t, driller{reply: passedDrill(), asked: &asked})
		var out, errs bytes.Buffer
		code := run(t.Context(), []string{"drill", "--for-real", "--socket=" + socket}, streams{out: &out, err: &errs, in: strings.NewReader(answer)})
		if agreed != (len(asked) == 1) || agreed != (code == exitOK) || !strings.Contains(errs.String(), "Go on? [y/N]") {
			t.Errorf("the answer %q: exit code %d, %d drills, %q", answer, code, len(asked), errs.String())
		}
	}
	code, _, stderr := call(t, "drill", "--for-real", "--socket=/nowhere")
	if code != exitError || !strings.Contains(stderr, "--yes where there is no terminal") {
		t.Errorf("without a terminal: exit code %d, %q", code, stderr)
	}
}

// TestDrillNamesTheAlert: the alert that a drill names is among the shipped alerts, with that
// severity. It watches a metric that drills do not count in.
func TestDrillNamesTheAlert(t *testing.T) {
	text, err := os.ReadFile("../../deploy/prometheus/canaryd.rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr string
				Labels      map[string]string
			}
		}
	}
	if text, err = yaml.YAMLToJSON(text); err == nil {
		err = json.Unmarshal(text, &file)
	}
	if err != nil {
		t.Fatal(err)
	}
	want := api.AlertOfFlush(true)
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			if rule.Alert == want.Name {
				if rule.Labels["severity"] != want.Severity || !strings.Contains(rule.Expr, "canaryd_flush_events_total") || !strings.Contains(rule.Expr, "canaryd_last_flush_timestamp_seconds") {
					t.Errorf("the alert is %+v, a drill says %+v", rule, want)
				}
				return
			}
		}
	}
	t.Errorf("there is no alert %s", want.Name)
}
