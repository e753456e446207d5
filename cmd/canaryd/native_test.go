package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// nativeNode is a node on which kube-proxy writes only native tables, after a flush of a map
// and another of the ruleset.
func nativeNode() api.Status {
	s := status()
	s.DisabledFamilies, s.Backend.Reason = nil, "iptables' tables hold no rules, and nft is the default"
	s.Families, s.Generation.Rules, s.Generation.Chains = map[rules.Family]api.Verdicts{}, 0, 0
	var marks []api.TableLoss
	for _, f := range rules.Families() {
		s.Families[f] = verdicts(canary.Intact, canary.Intact, canary.Intact)
		s.Keeper[f] = api.FamilyKeeper{State: api.KeeperIdle}
		for _, table := range protect.Always() {
			marks = append(marks, api.TableLoss{Family: f, Table: table, Kind: canary.TableDeleted})
		}
	}
	s.Native = []api.NativeTable{
		{Family: "inet", Table: "inet firewalld", Verdict: canary.Intact, Immune: true},
		{Family: "ip", Table: "ip kube-proxy", Verdict: canary.Intact, Chains: 141, Rules: 189, Elements: 221, Witness: "canaryd-witness"},
	}
	flush := s.Flushes[0]
	flush.Culprit = api.Culprit{PID: 4711, Comm: "nft"}
	lost := api.NativeLoss{Family: "ip", Table: "ip kube-proxy", Kind: canary.TableDeleted, Chains: 141, Rules: 189, Elements: 221, Why: "the ruleset was flushed: the witness went with it"}
	ruleset, elements := flush, flush
	ruleset.Kind, ruleset.Families, ruleset.Tables = canary.TableDeleted, rules.Families(), protect.Always()
	ruleset.Lost, ruleset.Native = api.Lost{Chains: 141, Rules: 189, Elements: 221, Tables: marks}, []api.NativeLoss{lost}
	lost.Kind, lost.Chains, lost.Rules, lost.Elements = canary.Emptied, 0, 0, 102
	lost.Why, lost.Parts = "a commit took the elements of service-ips and did nothing else", []string{"set service-ips: 102 elements lost, empty"}
	elements.Families, elements.Tables, elements.Lost, elements.Native = nil, nil, api.Lost{Elements: 102}, []api.NativeLoss{lost}
	s.Flushes = []api.Flush{ruleset, elements}
	return s
}

// TestNativeNode: status shows a node in nftables mode in nftables' words, before all else.
func TestNativeNode(t *testing.T) {
	for name, change := range map[string]func(*api.Status){
		"native": func(*api.Status) {},
		"native-kubelet": func(s *api.Status) {
			s.Generation.Rules, s.Generation.Chains = 3, 2
			s.Backend.Reason = "kubelet's hint chain is in nft only"
		},
		"native-lost": func(s *api.Status) {
			s.Native[1].Verdict, s.Native[1].Why = canary.Emptied, s.Flushes[1].Native[0].Why
			s.Flushes[1].Outcome = reload.Failed
			s.Flushes = s.Flushes[1:]
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := nativeNode()
			change(&s)
			var out, check bytes.Buffer
			if err := printStatus(&out, "table", s); err != nil {
				t.Fatal(err)
			}
			golden(t, "status-"+name, out.String())
			if err := printVerdicts(&check, "table", s); err != nil {
				t.Fatal(err)
			}
			golden(t, "check-"+name, check.String())
		})
	}
}

// TestNativeLossWithoutCounts: the content of a table that was left out is not counted. So a record
// and a reply to a restore have no counts of it.
func TestNativeLossWithoutCounts(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	lost := api.NativeLoss{Family: "inet", Table: "inet blocklist", Kind: canary.TableDeleted, Unread: true, Why: "the ruleset was flushed"}
	f := api.Flush{ID: "f1", Time: at, Kind: canary.TableDeleted, Outcome: api.AwaitingDecision, Lost: api.Lost{Unread: true}, Native: []api.NativeLoss{lost}}
	if text := flushText(api.FlushReply{Flush: f}); !strings.Contains(text, "inet blocklist is table_deleted: unknown (") {
		t.Errorf("the record says\n%s", text)
	}
	var out bytes.Buffer
	writeRestored(&out, []api.NativeRestored{{Table: "inet blocklist", Unread: true, Outcome: reload.Skipped}}, "CONTENT", false)
	if text := out.String(); !strings.Contains(text, "  -  ") || strings.Contains(text, "0 rules") {
		t.Errorf("the reply says\n%s", text)
	}
}

// TestNativeFlush: a record with only native tables does not mention iptables' tables.
func TestNativeFlush(t *testing.T) {
	at := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for i, name := range []string{"flush-native-ruleset", "flush-native-map"} {
		f := nativeNode().Flushes[i]
		f.ID, f.Time, f.Attempts = fmt.Sprintf("%d", i+1), at, 1
		text := flushText(api.FlushReply{Flush: f, Diff: []api.TableDiff{{Family: rules.IPv4, Table: "kube-proxy", Native: true, Lines: []string{"-element service-ips 172.30.0.11 . tcp . 80 : goto service-ODLDF6PO"}}}})
		first, rest, _ := strings.Cut(text, "\n")
		if !strings.HasPrefix(first, "flush "+f.ID) {
			t.Errorf("it begins with %q", first)
		}
		golden(t, name, rest)
	}
}
