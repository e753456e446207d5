//go:build measure

package iptables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// bigPayload is a filter table of about n rules.
func bigPayload(n int) string {
	var b strings.Builder
	b.WriteString("*filter\n")
	for i := range n / 10 {
		fmt.Fprintf(&b, ":C%d - [0:0]\n", i)
	}
	for i := range n {
		fmt.Fprintf(&b, "-A C%d -s 10.%d.%d.0/24 -p tcp -m comment --comment \"rule %d\" -m tcp --dport %d -j ACCEPT\n", i/10, i>>8&255, i&255, i, i%60000+1)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// TestCosts prints the costs of the cheap questions next to 20,000 rules: go test
// -tags measure -run TestCosts -v. It checks nothing.
func TestCosts(t *testing.T) {
	for _, backend := range []Backend{NFT, Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.CommandInput(t, bigPayload(20000), program(backend, rules.IPv4, "-restore"))
				k := openKernel(t, Config{Backend: backend})
				places := []Place{}
				for _, table := range protect.Always() {
					iptablesCommand(t, backend, rules.IPv4, "-t "+string(table)+" -N "+canary)
					iptablesCommand(t, backend, rules.IPv4, "-t "+string(table)+" -A "+canary+" -m comment --comment canaryd-12345678")
					places = append(places, Place{Table: table, Chain: canary})
				}
				stamp := testing.Benchmark(func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						mustStamp(t, k, rules.IPv4)
					}
				})
				probe := testing.Benchmark(func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						mustProbe(t, k, rules.IPv4, places...)
					}
				})
				evidence := testing.Benchmark(func(b *testing.B) {
					for b.Loop() {
						if _, err := Choose(t.Context(), ChooseConfig{Canary: canary}); err != nil {
							t.Fatal(err)
						}
					}
				})
				t.Logf("%s, 20,000 rules: Stamp %v %v, Probe of 3 places %v %v, Choose %v", backend, stamp, stamp.MemString(), probe, probe.MemString(), evidence)
			})
		})
	}
}
