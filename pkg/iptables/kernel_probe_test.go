package iptables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestUrgent: the stamp names the flushed table, be it small or large. A
// probeOnly of that table says nothing about the others.
func TestUrgent(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		k := openKernel(t, Config{Backend: Legacy})
		const family = rules.IPv4
		var text strings.Builder
		text.WriteString("*nat\n:LARGE - [0:0]\n:" + canary + " - [0:0]\n")
		for n := range 1000 {
			fmt.Fprintf(&text, "-A LARGE -d 10.0.%d.%d -j RETURN\n", n/250, n%250)
		}
		text.WriteString("-A " + canary + " -m comment --comment canaryd-1\nCOMMIT\n*filter\n:" + canary + " - [0:0]\nCOMMIT\n")
		nstest.CommandInput(t, text.String(), program(Legacy, family, "-restore"))
		last := mustStamp(t, k, family)
		want := func(command string, urgent ...rules.TableName) {
			t.Helper()
			iptablesCommand(t, Legacy, family, command)
			now := mustStamp(t, k, family)
			if diff := cmp.Diff(urgent, now.Urgent(last)); diff != "" {
				t.Errorf("after iptables %s (-want +got):\n%s", command, diff)
			}
			last = now
		}
		want("-t filter -A INPUT -j ACCEPT", rules.Filter)
		want("-t nat -A LARGE -j RETURN")
		want("-t nat -R LARGE 1 -j RETURN") // no shape differs
		want("-t nat -F LARGE", rules.Nat)
		want("-t mangle -S", rules.Mangle) // this creates mangle

		place, other := Place{Table: rules.Filter, Chain: canary}, Place{Table: rules.Security, Chain: canary}
		got, err := k.ProbeOnly(t.Context(), family, []Place{place, other})
		if diff := cmp.Diff(Probed{Holdings: map[Place]Holding{place: {Presence: Present}, other: {}}}, got); err != nil || diff != "" {
			t.Errorf("a probeOnly says (-want +got), %v:\n%s", err, diff)
		}
		if strings.Contains(tablesOf(t, Legacy), "security") {
			t.Error("a probeOnly created a table")
		}
	})
}
