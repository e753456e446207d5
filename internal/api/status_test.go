package api_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/golden"
	"github.com/canaryd/canaryd/internal/testkit/sample"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

func TestStatusJSON(t *testing.T) {
	text, err := json.MarshalIndent(sample.Status(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "status.json", append(text, '\n'))

	var back api.Status
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sample.Status(), back); diff != "" {
		t.Errorf("what was written is read differently (-want +got):\n%s", diff)
	}
}

func TestEmptyStatusHasNoNulls(t *testing.T) {
	text, err := json.Marshal(api.Status{Flushes: []api.Flush{{}}})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "null") {
		t.Errorf("a null in %s", text)
	}
	text, err = json.Marshal(api.Status{})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`"flushes":[]`, `"families":{}`} {
		if !strings.Contains(string(text), part) {
			t.Errorf("no %s in %s", part, text)
		}
	}
}

func TestPublicHoldsNoSecret(t *testing.T) {
	s := sample.Status()
	text, err := json.Marshal(s.Public())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "SECRET") {
		t.Errorf("a command line or rule in %s", text)
	}
	for _, part := range []string{`"comm":"iptables"`, `"pid":4242`, "KUBE-SERVICES"} {
		if !strings.Contains(string(text), part) {
			t.Errorf("no %s in %s", part, text)
		}
	}
	if diff := cmp.Diff(sample.Status(), s); diff != "" {
		t.Errorf("Public changed the status itself:\n%s", diff)
	}
}

func TestReady(t *testing.T) {
	with := func(v canary.Verdict) api.Status {
		s := sample.Status()
		s.Families[rules.IPv4][rules.Filter] = v
		return s
	}
	paused := sample.Status()
	paused.Paused = true
	until := with(canary.Emptied)
	until.Families[rules.IPv4][rules.Mangle], until.Families[rules.IPv4][rules.Nat] = canary.Drifted, canary.Emptied
	several := sample.Status()
	several.Families = until.Families
	until.Paused, until.PausedUntil = true, time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	refused := with(canary.Refused)
	refused.DeclaredRefused, refused.SourceErrors = nil, []api.SourceError{{Source: "rules-dir", Where: "/etc/site/10.v4:7", InForce: api.StoredGood}}
	broken := sample.Status()
	broken.SourceErrors = refused.SourceErrors
	const unusable = "rules-dir cannot be used because of /etc/site/10.v4:7: the rules that an earlier run read from it are in force"
	forgotten := sample.Status()
	delete(forgotten.Families[rules.IPv4], rules.Nat)
	tests := []struct {
		name   string
		status api.Status
		want   string // empty: ready
	}{
		{"intact and changed", sample.Status(), ""},
		{"unknown", with(canary.Unknown), "ipv4 filter is unknown"},
		{"a table nobody looked at", forgotten, "ipv4 nat is unknown"},
		{"paused", paused, "replays are paused"},
		{"several", several, "ipv4 mangle is drifted, ipv4 nat is emptied, ipv4 filter is emptied"},
		{"several, and paused", until, "ipv4 mangle is drifted, ipv4 nat is emptied, ipv4 filter is emptied; replays are paused until 2026-03-04T05:06:07Z"},
		{"a file that cannot be used", broken, unusable},
		{"what it said before is refused", refused, "ipv4 filter is not as declared: a rule is refused; " + unusable},
		{"nothing yet", api.Status{}, "no family has been looked at yet"},
	}
	for _, kind := range canary.LossKinds() {
		tests = append(tests, struct {
			name   string
			status api.Status
			want   string
		}{string(kind), with(kind), "ipv4 filter is " + string(kind)})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if err := tt.status.Ready(); err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestCulpritOf(t *testing.T) {
	at := time.Unix(1, 0)
	got := api.CulpritOf(watch.Writer{Time: at, Genid: 9, PID: 3, Comm: "nft", Command: "nft flush ruleset"})
	if diff := cmp.Diff(api.Culprit{Time: at, PID: 3, Comm: "nft", Command: "nft flush ruleset"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
