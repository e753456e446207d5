package daemon

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestCleanupRemovesWhatItMade: on nft a cleanup deletes the empty tables that canaryd made,
// also in an earlier run. Other tables stay, empty or not.
func TestCleanupRemovesWhatItMade(t *testing.T) {
	for _, restart := range []bool{false, true} {
		eachBackend(t, func(t *testing.T, backend iptables.Backend) {
			fake := iptablestest.NewFake(backend)
			must(t, fake.RestoreNoflush(rules.IPv4, "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n")) // empty, and another's
			dir := t.TempDir()
			r := run(t, fake, setup{store: openStore(t, dir, identity(backend))})
			r.settled()
			r.wantBare()
			must(t, fake.RestoreNoflush(rules.IPv6, "*nat\n-A OUTPUT -j RETURN\nCOMMIT\n")) // canaryd made it
			r.settled()
			if restart {
				r.stop()
				r = run(t, fake, setup{store: openStore(t, dir, identity(backend))})
				r.settled()
			}
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
			left := map[rules.Family][]rules.TableName{}
			for f, tables := range r.tables() {
				for _, table := range protect.Always() {
					if tables[table] != nil {
						left[f] = append(left[f], table)
					}
				}
			}
			// On legacy canaryd makes no table.
			want := map[rules.Family][]rules.TableName{rules.IPv4: {rules.Filter}, rules.IPv6: {rules.Nat}}
			if diff := cmp.Diff(want, left); diff != "" {
				t.Errorf("restart %t: tables that are left (-want +got):\n%s", restart, diff)
			}
		})
	}
}
