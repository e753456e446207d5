package iptables

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

// onDemandText has rules for packets before conntrack, and rules in security.
// They are NOTRACK in both of its words, CT with a zone, a helper and events, and
// DROPs.
const onDemandText = `*raw
:BEFORE - [0:0]
-A PREROUTING -d {address} -p udp -m udp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j NOTRACK
-A PREROUTING -i eth1 -j BEFORE
-A OUTPUT -s {address} -p tcp -m tcp --sport 53 -j CT --notrack
-A BEFORE -i eth1 -j CT --zone 7
-A BEFORE -p tcp -m tcp --dport 21 -j CT --helper ftp
-A BEFORE -p udp -j CT --ctevents new,destroy
-A BEFORE -m rpfilter --validmark --invert -j DROP
COMMIT
*security
:SEC - [0:0]
-A FORWARD -j SEC
-A SEC -d {address} -m conntrack --ctstate NEW -j DROP
COMMIT
`

// TestRulesBeforeConntrack: a flush empties raw and security, and one Restore
// brings both back, on nft by canaryd's own transaction. canaryd never makes a
// table that no program has made.
func TestRulesBeforeConntrack(t *testing.T) {
	onBoth(t, func(t *testing.T, backend Backend, family rules.Family) {
		onDemand := []rules.TableName{rules.Raw, rules.Security}
		k := openKernel(t, Config{Backend: backend})
		s := begin(t, k)
		before := mustRead(t, s, family)
		mustProbe(t, k, family, Place{Table: rules.Raw, Chain: "BEFORE"}, Place{Table: rules.Security, Chain: "SEC"})
		mustStamp(t, k, family)
		for _, table := range onDemand {
			if before.Tables[table] != nil || strings.Contains(tablesOf(t, backend), string(table)) {
				t.Errorf("%s exists", table)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}

		address := map[rules.Family]string{rules.IPv4: "169.254.20.10/32", rules.IPv6: "fd00::10/128"}[family]
		runTool(t, strings.ReplaceAll(onDemandText, "{address}", address), program(backend, family, "-restore"), "--noflush")
		s = begin(t, k)
		was := mustRead(t, s, family)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		for _, table := range onDemand {
			iptablesCommand(t, backend, family, "-t "+string(table)+" -F")
		}
		s = begin(t, k)
		mustRead(t, s, family)
		var scripts []Script
		for _, table := range onDemand {
			script := Script{Table: table}
			for _, c := range was.Tables[table].Chains {
				if !rules.Builtin(table, c.Name) {
					script.Declare = append(script.Declare, c.Name)
				}
				for _, r := range c.Rules {
					script.Steps = append(script.Steps, Step{Verb: Append, Chain: c.Name, Rule: r})
				}
			}
			scripts = append(scripts, script)
		}
		w := s.Restore(t.Context(), Payload{family: scripts})[family]
		if w.Err != nil || w.Raced {
			t.Fatalf("Restore returns %+v", w)
		}
		if backend == NFT && (w.Detour != nil || !slices.Equal(slices.Sorted(slices.Values(w.Direct)), onDemand)) {
			t.Errorf("directly were written %v, because of %v", w.Direct, w.Detour)
		}
		now := mustRead(t, s, family)
		for _, table := range onDemand {
			if diff := cmp.Diff(was.Tables[table].Chains, now.Tables[table].Chains); diff != "" {
				t.Errorf("%s (-want +got):\n%s", table, diff)
			}
		}
	})
}
