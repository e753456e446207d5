package daemon

import (
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestAWordThatNamesNothing: a mistyped glob or rule: word of --protect guards nothing. The log
// and the status name it, until a rule with that name appears. The node is healthy, because its
// other rules are guarded.
func TestAWordThatNamesNothing(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		late, mistyped := "rule:filter:FORWARD:-i wg0 -j ACCEPT", "KUB-*"
		r := start(t, backend, setup{protect: append([]string{late, mistyped}, scenario.Protect...)})
		r.wantLog("Words of --protect name nothing that canaryd guards")
		want := func(words ...string) {
			t.Helper()
			s := r.d.Status()
			if diff := cmp.Diff(words, s.IdleWords); diff != "" || !s.Healthy {
				t.Errorf("healthy: %t; words that name nothing (-want +got):\n%s", s.Healthy, diff)
			}
			if text := s.ProtectText(strconv.Itoa); !strings.Contains(text, strings.Join(words, " or ")) {
				t.Errorf("the line of the status names them not: %s", text)
			}
		}
		want(late, mistyped)
		must(t, r.fake.RestoreNoflush(rules.IPv4, "*filter\n-A FORWARD -i wg0 -j ACCEPT\nCOMMIT\n"))
		r.settled()
		r.after(2 * findEvery)
		want(mistyped)
	})
}
