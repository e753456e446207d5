package daemon

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/watch"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// sampleStatus has every field set, secrets in those that may hold some.
func sampleStatus() Status {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	writer := Culprit{
		Time: at, PID: 4242, Comm: "iptables", Command: "iptables -F SECRET", Ancestors: []string{"bash", "cron"}, Unit: "cron.service",
		ContainerID: "0123456789abcdef", ContainerName: "router", PodUID: "8d1f0a52-6c3e-4a8b-9d7e-2f1c0b9a8e7d",
	}
	return Status{
		Healthy: true, Mode: Heal, Paused: false,
		Backend: Backend{Name: iptables.NFT, Version: "1.8.9", Reason: "KUBE-IPTABLES-HINT stands in nft", Mixed: true, Mismatch: true},
		Families: map[rules.Family]Verdicts{
			rules.IPv4: {rules.Mangle: canary.Intact, rules.Nat: canary.Changed, rules.Filter: canary.Intact},
		},
		DisabledFamilies: map[rules.Family]string{rules.IPv6: "the kernel lacks it"},
		CanaryChain:      "KUBE-CANARYD-CANARY",
		Generation:       Generation{ID: "0123abcd", Source: "snapshot", Captured: at.Add(-time.Hour), Rules: 56, Chains: 20},
		LossSince:        at, CapturePendingSince: at, JournalError: "no space left on device",
		RulesWithoutOwner: &OwnerlessRules{Since: at, Families: []rules.Family{rules.IPv4}, Choices: ownerChoices()},
		Baseline: &Baseline{
			BaselineName: BaselineName{Generation: "4567cdef", Confirmed: at.Add(-24 * time.Hour)},
			Rules:        50, Chains: 19, AppearedRules: 7, AppearedChains: 2, GoneRules: 1, ReorderedChains: 1,
		},
		Keeper: map[rules.Family]FamilyKeeper{rules.IPv4: {State: KeeperUnavailable, Reason: "no nf_tables"}},
		Flushes: []Flush{{
			ID: "f1", Time: at, Kind: canary.Emptied,
			Families: []rules.Family{rules.IPv4}, Tables: []rules.TableName{rules.Nat},
			Culprit: writer, Culprits: []Culprit{writer}, Writers: []Culprit{writer},
			Lost: Lost{
				Chains: 2, Rules: 30, Hooks: 4, Unprotected: 3,
				Tables: []TableLoss{{
					Family: rules.IPv4, Table: rules.Nat, Kind: canary.Emptied, Chains: 2, Rules: 30, Hooks: 4, Unprotected: 3, By: []uint32{4242},
					PerChain: []ChainLoss{{Chain: "KUBE-SERVICES", Rules: 25}, {Chain: "PREROUTING", Rules: 4, Hooks: 4}}, More: 1,
				}},
			},
			NotInBaseline: &NotInBaseline{
				BaselineName: BaselineName{Generation: "4567cdef", Confirmed: at.Add(-24 * time.Hour)},
				Rules:        3, Chains: []ChainName{{rules.IPv4, rules.Nat, "KUBE-SECRET", 2}}, More: 1,
			},
			Pods:           []LostPod{{"default", "web-0", "5f1e", []string{"8080/tcp"}, true}},
			MorePods:       2,
			NoticedSeconds: 0.004, AbsentSeconds: 0.12, Outcome: reload.Proved, Attempts: 1, Detail: "-A SECRET", Earlier: true,
		}},
	}
}

func TestStatusJSON(t *testing.T) {
	text, err := json.MarshalIndent(sampleStatus(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "status.json", append(text, '\n'))

	var back Status
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sampleStatus(), back); diff != "" {
		t.Errorf("what was written is read differently (-want +got):\n%s", diff)
	}
}

func TestEmptyStatusHasNoNulls(t *testing.T) {
	text, err := json.Marshal(Status{Flushes: []Flush{{}}})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "null") {
		t.Errorf("a null in %s", text)
	}
	text, err = json.Marshal(Status{})
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
	s := sampleStatus()
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
	if diff := cmp.Diff(sampleStatus(), s); diff != "" {
		t.Errorf("Public changed the status itself:\n%s", diff)
	}
}

func TestReady(t *testing.T) {
	with := func(v canary.Verdict) Status {
		s := sampleStatus()
		s.Families[rules.IPv4][rules.Filter] = v
		return s
	}
	paused := sampleStatus()
	paused.Paused = true
	until := with(canary.Emptied)
	until.Families[rules.IPv4][rules.Mangle], until.Families[rules.IPv4][rules.Nat] = canary.Drifted, canary.Emptied
	several := sampleStatus()
	several.Families = until.Families
	until.Paused, until.PausedUntil = true, time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	forgotten := sampleStatus()
	delete(forgotten.Families[rules.IPv4], rules.Nat)
	tests := []struct {
		name   string
		status Status
		want   string // empty: ready
	}{
		{"intact and changed", sampleStatus(), ""},
		{"unknown", with(canary.Unknown), "ipv4 filter is unknown"},
		{"a table nobody looked at", forgotten, "ipv4 nat is unknown"},
		{"paused", paused, "replays are paused"},
		{"several", several, "ipv4 mangle is drifted, ipv4 nat is emptied, ipv4 filter is emptied"},
		{"several, and paused", until, "ipv4 mangle is drifted, ipv4 nat is emptied, ipv4 filter is emptied; replays are paused until 2026-03-04T05:06:07Z"},
		{"nothing yet", Status{}, "no family has been looked at yet"},
	}
	for _, kind := range canary.LossKinds() {
		tests = append(tests, struct {
			name   string
			status Status
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
	got := CulpritOf(watch.Writer{Time: at, Genid: 9, PID: 3, Comm: "nft", Command: "nft flush ruleset"})
	if diff := cmp.Diff(Culprit{Time: at, PID: 3, Comm: "nft", Command: "nft flush ruleset"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
