package native_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
)

// TestWithout: a table loses chains, and the rules and elements that lead to them. The table itself
// stays as it was.
func TestWithout(t *testing.T) {
	for _, test := range []struct {
		name   string
		chains map[string]bool
		gone   []string // of the table's text
	}{
		{"no chain", nil, nil},
		{"a chain that it lacks", map[string]bool{"service-C": true}, nil},
		{"a service, to which an element leads", map[string]bool{"service-B/dns": true, "endpoint-B1": true}, []string{
			", 172.30.0.2 . 53 : goto service-B/dns",
			"	chain service-B/dns { numgen random mod 1 vmap { 0 : goto endpoint-B1 }; }\n",
			"	chain endpoint-B1 { meta l4proto udp dnat to 10.0.0.3:53; }\n",
		}},
		{"a chain to which a base chain's rule leads", map[string]bool{"services": true}, []string{
			" jump services;",
			"	chain services { ip daddr . tcp dport vmap @service-ips; ip daddr . tcp dport vmap @no-endpoint-services; ip daddr @cluster-ips reject; }\n",
		}},
		{"a base chain", map[string]bool{"nat-postrouting": true}, []string{
			"	chain nat-postrouting { type nat hook postrouting priority srcnat; ip saddr 10.0.0.0/8 masquerade; }\n",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft")
				conn, text := dial(t), kubeProxy
				for _, gone := range test.gone {
					if !strings.Contains(text, gone) {
						t.Fatalf("the table has no %q", gone)
					}
					text = strings.Replace(text, gone, "", 1)
				}
				want, _ := stage(t, conn, text)
				was, _ := stage(t, conn, kubeProxy)
				before := was.Digest()
				got := was.Without(test.chains)
				if diff := cmp.Diff([]native.Change(nil), native.Diff(want, got)); diff != "" {
					t.Errorf("other than the table without these (-want +got):\n%s", diff)
				}
				if was.Digest() != before {
					t.Error("the table itself has changed")
				}
				if (got == was) != (test.gone == nil) {
					t.Errorf("it is the same table: %t", got == was)
				}
			})
		})
	}
}
