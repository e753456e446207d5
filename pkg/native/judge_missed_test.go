package native_test

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
)

// TestJudgeOfAMissedMap: missed commits took the elements of kube-proxy's map of services. They are
// lost if their chains have rules. If no chain has, kube-proxy has removed its services. If only
// some chains have, it may have removed one, and another process the rest.
func TestJudgeOfAMissedMap(t *testing.T) {
	const theMap, first, second = "flush map ip kube-proxy service-ips\n", "flush chain ip kube-proxy service-A/web\n", "flush chain ip kube-proxy service-B/dns\n"
	for _, test := range []struct {
		name, commit string
		want         native.Verdict
		remedy       native.Remedy
	}{
		{"the map alone", theMap, native.Emptied, native.ByRefill},
		{"with the first chain", theMap + first, native.Emptied, native.NoRemedy},
		{"with the second chain", theMap + second, native.Emptied, native.NoRemedy},
		{"with both chains", theMap + first + second, native.Changed, native.NoRemedy},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn := dial(t)
				was, id := stage(t, conn, kubeProxy)
				nstest.CommandInput(t, test.commit, "nft", "-f", "-")
				f := native.Judge(native.Evidence{Was: was, Now: capture(t, conn).Tables[id], Missed: true, Habits: owners.HabitsOf(id)})
				if f.Verdict != test.want || f.Remedy != test.remedy {
					t.Errorf("%s (%s), remedy %d; want %s, %d", f.Verdict, f.Why, f.Remedy, test.want, test.remedy)
				}
			})
		})
	}
}
