package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

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
