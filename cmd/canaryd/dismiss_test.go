package main

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestStatusAwaitingDecision: the status names the loss, the reason for the wait, and the
// remedies.
func TestStatusAwaitingDecision(t *testing.T) {
	s := status()
	tables := map[rules.Family]api.Verdicts{rules.IPv4: {rules.Nat: canary.Emptied}}
	s.Decision = &api.Decision{
		Flush: "660c8b90ccb7b", Generation: "0123456789ab", Tables: tables,
		Reason:  "the rules were last seen in force longer ago than --max-stored-age (10m0s)",
		Restore: "canaryd restore --generation 0123456789ab", Dismiss: "canaryd dismiss",
	}
	s.Flushes[0].Outcome, s.Flushes[0].AbsentSeconds, s.Flushes[0].Culprit = api.AwaitingDecision, 0, api.Culprit{}
	s.Flushes[0].LastInForce = s.Flushes[0].Time.Add(-time.Hour)
	s.Flushes[1].AbsentSeconds, s.Flushes[1].AbsentAtMost, s.Flushes[1].Outcome = 28.0123, true, api.Dismissed
	var out bytes.Buffer
	if err := printStatus(&out, "table", s); err != nil {
		t.Fatal(err)
	}
	golden(t, "status-decision", out.String())
}

// A decider has a loss that waits for a decision.
type decider struct {
	control.Controller
	reply api.DismissReply
}

func (d decider) Dismiss(context.Context) (api.DismissReply, error) { return d.reply, nil }

func TestDismiss(t *testing.T) {
	for name, test := range map[string]struct {
		reply api.DismissReply
		args  []string
		want  string
	}{
		"nothing": {want: "nothing waits for a decision\n"},
		"one": {
			reply: api.DismissReply{Flush: "660c8b90ccb7b", Generation: "0123456789ab", Rules: 112},
			want:  "the loss of flush 660c8b90ccb7b is accepted: 112 rules; generation 0123456789ab stays on disk\n",
		},
		"json": {
			reply: api.DismissReply{Flush: "660c8b90ccb7b", Generation: "0123456789ab", Rules: 1}, args: []string{"-o", "json"},
			want: "{\n  \"flush\": \"660c8b90ccb7b\",\n  \"generation\": \"0123456789ab\",\n  \"rules\": 1\n}\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			socket := serveControl(t, decider{reply: test.reply})
			code, stdout, stderr := call(t, append([]string{"dismiss", "--socket=" + socket}, test.args...)...)
			if code != exitOK || stdout != test.want || stderr != "" {
				t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
			}
		})
	}
}
