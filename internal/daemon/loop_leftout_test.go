package daemon

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The log has the chains that were left out when they change, and not at each count. They are
// in the status and in a metric, and the node is healthy, but its page shows them.
func TestWhatIsLeftOutIsSaid(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		var now atomic.Pointer[[]iptables.LeftOut]
		set := func(list ...iptables.LeftOut) { now.Store(&list) }
		chain := func(name string, n int) iptables.LeftOut {
			return iptables.LeftOut{Family: rules.IPv4, Table: rules.Nat, Chain: name, Rules: n}
		}
		set()
		r := start(t, backend, setup{leftOut: func() []iptables.LeftOut { return *now.Load() }})
		var got []string
		for _, list := range [][]iptables.LeftOut{
			{}, {chain("KUBE-A", 300)}, {chain("KUBE-A", 301)}, {chain("KUBE-A", 302), chain("KUBE-B", 200)}, {chain("KUBE-B", 200)}, {},
		} {
			set(list...)
			r.after(3 * time.Second)
			s := r.d.Status()
			if len(s.LeftOut) != len(list) || !s.Healthy {
				t.Errorf("with %v: left out %v, healthy %t", list, s.LeftOut, s.Healthy)
			}
			if page := pageOf(t, s); len(list) > 0 != strings.Contains(page, "not guarded") {
				t.Errorf("with %v the page says %s", list, page)
			}
			got = append(got, fmt.Sprintf("%q, gauge %v, logged %d and %d", s.NotGuarded(), r.metrics("chains_left_out")["chains_left_out{family=ipv4,table=nat}"],
				strings.Count(r.log.String(), "Chains are left out"), strings.Count(r.log.String(), "no longer left out")))
		}
		want := []string{
			`"", gauge 0, logged 0 and 0`,
			`"the rules of one chain are not guarded", gauge 1, logged 1 and 0`,
			`"the rules of one chain are not guarded", gauge 1, logged 1 and 0`,
			`"the rules of 2 chains are not guarded", gauge 2, logged 2 and 0`,
			`"the rules of one chain are not guarded", gauge 1, logged 2 and 1`,
			`"", gauge 0, logged 2 and 2`,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	})
}
