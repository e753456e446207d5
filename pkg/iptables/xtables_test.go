package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTablesThatComeLaterAreListed: the kernel's list is read anew each time,
// though its file is opened once.
func TestTablesThatComeLaterAreListed(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "ip6tables-legacy")
		for _, family := range rules.Families() {
			s, err := openXT(family)
			if err != nil {
				t.Fatal(err)
			}
			var want []rules.TableName
			for _, next := range []rules.TableName{"", rules.Mangle, rules.Nat, rules.Filter} {
				if next != "" {
					iptablesCommand(t, Legacy, family, "-t "+string(next)+" -L -n")
					want = sortedTables(append(want, next))
				}
				got, err := s.tables()
				if diff := cmp.Diff(want, got); diff != "" || err != nil {
					t.Errorf("%s, after %q came: %v (-want +got):\n%s", family, next, err, diff)
				}
			}
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
	})
}
