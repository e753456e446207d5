package daemon

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
)

// TestNativeLossIsCounted: record and log of a flush count the lost rules, chains and elements,
// also if the record includes iptables' tables.
func TestNativeLossIsCounted(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		want api.Lost
		log  string
	}{
		{"flush map", func(k *fakeNative) { k.flushSet(proxyTable, "service-ips") }, api.Lost{Elements: 3}, "rules=0 chains=0 jumps=0 elements=3"},
		{"flush table", func(k *fakeNative) { k.flushTable(proxyTable) }, api.Lost{Rules: 3}, "rules=3 chains=0 jumps=0 elements=0"},
		{"flush ruleset", (*fakeNative).flushRuleset, api.Lost{Rules: 3, Chains: 2, Elements: 3}, "rules=3 chains=2 jumps=0 elements=3"},
	} {
		t.Run(test.name, func(t *testing.T) {
			proxy := tableOf(proxyTable, "a", "b")
			proxy.Sets = []native.Set{{Name: "service-ips", Elements: []native.Element{{1}, {2}, {3}}}}
			nativeNode(t, setup{guarded: newFakeNative(proxy), journal: t.TempDir()}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.settled()
				f := r.wantOneFlush(string(r.d.Status().Flushes[0].Kind), reload.Proved)
				got := f.Lost
				if got.Tables = nil; len(f.Native) != 1 || f.Native[0].Elements != got.Elements {
					t.Errorf("the record's tables are %+v", f.Native)
				}
				if d := cmp.Diff(test.want, got); d != "" {
					t.Errorf("what was lost (-want +got):\n%s", d)
				}
				if !strings.Contains(r.log.String(), test.log) {
					t.Errorf("no %q in the log:\n%s", test.log, r.log)
				}
				for _, d := range r.full("1").Diff {
					if d.Native != (d.Table == proxyTable.Name) {
						t.Errorf("the diff of %s is one of a native table: %v", d.Table, d.Native)
					}
				}
			})
		})
	}
}
