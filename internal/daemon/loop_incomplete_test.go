package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestARecordEndsWithItsLastRule: rules of a flush wait in quarantine. The record is partial
// until they are back, and its absence lasts as long.
func TestARecordEndsWithItsLastRule(t *testing.T) {
	const corp = "*filter\n:CORP-CANARY - [0:0]\n-A CORP-CANARY -s 203.0.113.0/24 -j ACCEPT\nCOMMIT\n"
	tests := []struct {
		name, write string
		want        api.Outcome
	}{
		{"canaryd puts it back", corp, reload.Proved},
		{"its owner puts it back", corp + "*filter\n:KUBE-FORWARD - [0:0]\n-A KUBE-FORWARD -j CORP-CANARY\n-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT\nCOMMIT\n", reload.Proved},
		{"its owner writes its chain without it", "*filter\n:KUBE-FORWARD - [0:0]\n-A KUBE-FORWARD -j ACCEPT\nCOMMIT\n", reload.Partial},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			eachBackend(t, func(t *testing.T, backend iptables.Backend) {
				dir := t.TempDir()
				r := run(t, ipvsFake(t, backend), setup{journal: dir})
				r.settled()
				flushDelete(t, r.fake)
				r.settled()
				if f := r.d.Status().Flushes[0]; f.Outcome != reload.Partial || f.AbsentSeconds > 5 {
					t.Errorf("the flush ended %s after %v s", f.Outcome, f.AbsentSeconds)
				}
				r.after(time.Minute)
				must(t, r.fake.RestoreNoflush(rules.IPv4, test.write))
				r.after(pace.LastTry + time.Second)
				r.wantQuarantine(0)
				f := r.d.Status().Flushes[0]
				whole := test.want == reload.Proved
				if f.Outcome != test.want || (f.Detail == "") != whole || (f.AbsentSeconds > 60) != whole {
					t.Errorf("the flush ended %s after %v s: %s", f.Outcome, f.AbsentSeconds, f.Detail)
				}
				if told := strings.Contains(r.log.String(), "Nothing that a flush took is missing any more"); told != whole {
					t.Errorf("the log tells: %t", told)
				}
				r.stop()
				entries, err := journal.New(dir).Load(10)
				must(t, err)
				if len(entries) != 1 || !strings.Contains(string(entries[0].Record), `"outcome":"`+string(test.want)+`"`) {
					t.Errorf("the journal has %d entries: %s", len(entries), entries[0].Record)
				}
			})
		})
	}
}

// TestASearchForABadRuleSeesTheOtherFamily: canaryd tries rules of one family one by one, which
// takes seconds, and the other family is flushed. Its rules do not wait for the end of the
// search.
func TestASearchForABadRuleSeesTheOtherFamily(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		_, bad, found := strings.Cut(r.fake.SaveTable(rules.IPv4, rules.Nat), "\n-A KUBE-SEP-")
		_, bad, _ = strings.Cut(bad, " ")
		bad, _, _ = strings.Cut(bad, "\n")
		if !found || strings.Contains(r.fake.Save(rules.IPv6), bad) {
			t.Fatalf("no rule of IPv4's alone: %q", bad)
		}
		r.fake.RestoreTakes(200 * time.Millisecond)
		r.fake.Swallow(bad)
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.after(3 * time.Second)
		if trial := strings.Join(r.fake.Payloads(rules.IPv4), ""); !strings.Contains(trial, "TRIAL") || r.d.Status().Healthy {
			t.Fatal("no search is under way")
		}
		before := r.fake.SaveTable(rules.IPv6, rules.Filter)
		for _, table := range protect.Always() {
			must(t, r.fake.As(77, "flusher").Bypassing().Flush(rules.IPv6, table, ""))
		}
		r.hints.Give(watch.SourceLock)
		r.after(2 * time.Second)
		if got := unmarked(r.fake.SaveTable(rules.IPv6, rules.Filter)); !strings.Contains(got, "-A FORWARD") {
			t.Errorf("IPv6 waits for the search. filter is\n%s\nwant\n%s", got, unmarked(before))
		}
	})
}
