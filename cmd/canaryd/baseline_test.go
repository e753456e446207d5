package main

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/control"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A confirmer answers requests about the baseline, and notes them.
type confirmer struct {
	control.Controller
	reply api.BaselineReply
	asked []api.BaselineRequest
}

func (c *confirmer) Baseline(_ context.Context, r api.BaselineRequest) (api.BaselineReply, error) {
	c.asked = append(c.asked, r)
	return c.reply, nil
}

func confirmedAt() api.BaselineName {
	return api.BaselineName{Generation: "0123456789ab", Confirmed: time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)}
}

// appeared is an answer with chains of all kinds; an attacker chose their names.
func appeared() api.BaselineReply {
	r := api.BaselineReply{
		Baseline: &api.Baseline{BaselineName: confirmedAt(), Rules: 460, Chains: 147, AppearedRules: 1003, AppearedChains: 103, GoneRules: 2, ReorderedChains: 1},
		Present:  api.Generation{ID: "ba9876543210", Rules: 1461, Chains: 247},
		Changes: []api.BaselineChange{
			{Family: rules.IPv4, Table: rules.Nat, Chain: "PREROUTING", Known: true, Appeared: 1, Rules: []string{"-A PREROUTING -j KUBE-EVIL"}},
			{Family: rules.IPv4, Table: rules.Nat, Chain: "KUBE-\x1b[2J", Known: true, Appeared: 2, Gone: 2, Reordered: true, Rules: []string{"-A KUBE-\x1b[2J -j RETURN", "-A KUBE-\x1b[2J -j ACCEPT"}},
			{Family: rules.IPv6, Table: rules.Filter, Chain: "KUBE-FILLED", Appeared: 900, More: 400},
		},
		More: 3,
	}
	r.Baseline.NativeTables, r.NativeTables, r.Generations = 2, 2, []string{"ba9876543210", "00112233aabb", "44556677ccdd"}
	r.Baseline.AppearedParts, r.Baseline.AppearedTables, r.Baseline.GoneTables = 1, 1, 1
	r.Changes = append(r.Changes,
		api.BaselineChange{Family: rules.IPv4, Table: "kube-proxy", Native: true, Chain: "nat-prerouting", Known: true, Appeared: 1, Rules: []string{"rule nat-prerouting jump evil"}},
		api.BaselineChange{Family: rules.IPv4, Table: "kube-proxy", Native: true, Kind: "set", Chain: "evil-ips", Appeared: 1, Rules: []string{"set evil-ips { type ipv4_addr; }"}},
		api.BaselineChange{Family: tableid.Inet, Table: "ev\x1bil", Native: true, Kind: "table", Appeared: 9, More: 9},
		api.BaselineChange{Family: tableid.IPv6, Table: "docker-bridges", Native: true, Kind: "table", Known: true, Gone: 4})
	for range 500 {
		r.Changes[2].Rules = append(r.Changes[2].Rules, "-A KUBE-FILLED -j ACCEPT")
	}
	for i := range 100 {
		name := fmt.Sprintf("KUBE-SVC-%03d", i)
		r.Changes = append(r.Changes, api.BaselineChange{Family: rules.IPv6, Table: rules.Filter, Chain: name, Appeared: 1, Rules: []string{"-A " + name + " -j RETURN"}})
	}
	return r
}

func TestBaselineTexts(t *testing.T) {
	none := api.BaselineReply{Present: api.Generation{ID: "ba9876543210", Rules: 460, Chains: 147}}
	same := none
	same.Baseline = &api.Baseline{BaselineName: confirmedAt(), Rules: 460, Chains: 147}
	native := same
	native.NativeTables, native.Generations = 2, []string{"ba9876543210", "00112233aabb", "44556677ccdd"}
	nativeNone := native
	nativeNone.Baseline = nil
	nativeTable := native
	nativeTable.Baseline = &api.Baseline{BaselineName: confirmedAt(), Rules: 460, Chains: 147, NativeTables: 1, AppearedTables: 1}
	nativeTable.Changes = []api.BaselineChange{{Family: rules.IPv4, Table: "kube-proxy", Native: true, Kind: "table", Appeared: 189, More: 189}}
	replaced := same
	name := confirmedAt()
	replaced.Replaced = &name
	broken := none
	broken.Baseline = &api.Baseline{BaselineName: api.BaselineName{Error: "baseline.json is corrupt"}}
	for _, test := range []struct {
		name  string
		args  []string
		reply api.BaselineReply
		code  int
		asked api.BaselineRequest
	}{
		{"none", nil, none, exitOK, api.BaselineRequest{}},
		{"same", nil, same, exitOK, api.BaselineRequest{}},
		{"native", nil, native, exitOK, api.BaselineRequest{}},
		{"native-none", nil, nativeNone, exitOK, api.BaselineRequest{}},
		{"native-table", nil, nativeTable, exitNo, api.BaselineRequest{}},
		{"appeared", nil, appeared(), exitNo, api.BaselineRequest{}},
		{"broken", nil, broken, exitError, api.BaselineRequest{}},
		{"confirmed", []string{"--confirm"}, same, exitOK, api.BaselineRequest{Confirm: true}},
		{"replaced", []string{"--confirm", "--generation=ba9876543210"}, replaced, exitOK, api.BaselineRequest{Confirm: true, Generation: "ba9876543210"}},
		{"forgotten", []string{"--forget"}, api.BaselineReply{Replaced: &name}, exitOK, api.BaselineRequest{Forget: true}},
		{"nothing-forgotten", []string{"--forget"}, none, exitOK, api.BaselineRequest{Forget: true}},
		{"json", []string{"-o", "json"}, replaced, exitOK, api.BaselineRequest{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := &confirmer{reply: test.reply}
			socket := serveControl(t, c)
			code, stdout, stderr := call(t, append([]string{"baseline", "--socket=" + socket}, test.args...)...)
			if code != test.code {
				t.Errorf("exit code %d, want %d: %s", code, test.code, stderr)
			}
			if d := cmp.Diff([]api.BaselineRequest{test.asked}, c.asked); d != "" {
				t.Errorf("asked (-want +got):\n%s", d)
			}
			golden(t, "baseline-"+test.name, stdout+stderr)
		})
	}
	for _, args := range [][]string{{"--confirm", "--forget"}, {"--generation=ba9876543210"}} {
		if code, _, stderr := call(t, append([]string{"baseline", "--socket=/nowhere"}, args...)...); code != exitError || strings.Contains(stderr, "nowhere") {
			t.Errorf("%q: exit code %d, %q", args, code, stderr)
		}
	}
}

// TestStatusOfABaseline: the status has one line about the baseline, and none without one.
func TestStatusOfABaseline(t *testing.T) {
	for name, b := range map[string]*api.Baseline{
		"": nil,
		"baseline of 2026-11-20 10:00 UTC, generation 0123456789ab: no rule appeared since\n":                                                                                                              {BaselineName: confirmedAt()},
		"baseline of 2026-11-20 10:00 UTC, generation 0123456789ab: 12 rules appeared since in 3 chains: canaryd baseline\n":                                                                               {BaselineName: confirmedAt(), AppearedRules: 12, AppearedChains: 3},
		"baseline of 2026-11-20 10:00 UTC, generation 0123456789ab: 1 rule appeared since in 1 chain, 2 rules gone, another order in 1 chain: canaryd baseline\n":                                          {BaselineName: confirmedAt(), AppearedRules: 1, AppearedChains: 1, GoneRules: 2, ReorderedChains: 1},
		"the confirmed baseline is UNUSABLE: baseline.json is corrupt:\\x1b: canaryd baseline\n":                                                                                                           {BaselineName: api.BaselineName{Error: "baseline.json is corrupt:\x1b"}},
		"baseline of 2026-11-20 10:00 UTC, generation 0123456789ab: 2 other parts of native tables appeared, 1 native table never confirmed, 3 other parts gone, 2 native tables gone: canaryd baseline\n": {BaselineName: confirmedAt(), AppearedParts: 2, AppearedTables: 1, GoneParts: 3, GoneTables: 2},
		"the confirmed baseline is being read\n": {BaselineName: api.BaselineName{Reading: true}},
	} {
		s := status()
		s.Baseline = b
		var out bytes.Buffer
		if err := printStatus(&out, "table", s); err != nil {
			t.Fatal(err)
		}
		if name == "" && strings.Contains(out.String(), "baseline") || !strings.Contains(out.String(), name) {
			t.Errorf("want %q in\n%s", name, out.String())
		}
	}
}

// TestOldRecordBesideNativeTables: an older canaryd compared iptables' tables only, and its record
// claims no more.
func TestOldRecordBesideNativeTables(t *testing.T) {
	f := status().Flushes[0]
	for want, compared := range map[string]bool{"all of these rules of iptables' tables are in the baseline": false, "all of these rules are in the baseline": true} {
		f.NotInBaseline, f.Native = &api.NotInBaseline{BaselineName: confirmedAt(), Native: compared}, []api.NativeLoss{{Table: "ip kube-proxy"}}
		if text := flushText(api.FlushReply{Flush: f}); !strings.Contains(text, want) {
			t.Errorf("want %q in\n%s", want, text)
		}
	}
}

// TestFlushNotInBaseline: the output names the lost rules that were never confirmed.
func TestFlushNotInBaseline(t *testing.T) {
	for want, n := range map[string]*api.NotInBaseline{
		"": nil,
		"all of these rules are in the baseline that was confirmed at 2026-11-20T10:00:00Z (generation 0123456789ab)\n": {BaselineName: confirmedAt()},
		"of these, 4 rules are not in the baseline that was confirmed at 2026-11-20T10:00:00Z (generation 0123456789ab): ipv4 filter KUBE-FORWARD 3, 2 more chains\n": {
			BaselineName: confirmedAt(), Rules: 4, Chains: []api.ChainName{{Family: rules.IPv4, Table: rules.Filter, Chain: "KUBE-FORWARD", Rules: 3}}, More: 2,
		},
		"of these, 10 rules are not in the baseline that was confirmed at 2026-11-20T10:00:00Z (generation 0123456789ab): ip kube-proxy services 1, inet evil 9\n": {
			BaselineName: confirmedAt(), Rules: 10, Native: true, Chains: []api.ChainName{
				{Family: rules.IPv4, Table: "kube-proxy", Native: true, Chain: "services", Rules: 1}, {Family: tableid.Inet, Table: "evil", Native: true, Rules: 9}},
		},
	} {
		f := status().Flushes[0]
		f.NotInBaseline = n
		text := flushText(api.FlushReply{Flush: f})
		if want == "" && strings.Contains(text, "baseline") || !strings.Contains(text, want) {
			t.Errorf("want %q in\n%s", want, text)
		}
	}
}

// TestPreviewMarks: rules that were never confirmed have a mark in front, and are counted.
func TestPreviewMarks(t *testing.T) {
	name := confirmedAt()
	reply := api.RestoreReply{Generation: "0123456789ab", Changes: changes(), Baseline: &name}
	reply.Changes[0].Lines, reply.Changes[0].NewLines, reply.Changes[0].NotInBaseline = []string{"+-A KUBE-SVC-A -j ACCEPT", "--A KUBE-SVC-A -j RETURN"}, 1, 1
	reply.Changes[1].Lines = []string{"+-A INPUT -j KUBE-FIREWALL"}
	reply.Native = []api.NativeRestored{{Family: "ip", Table: "ip kube-proxy", Chains: 2, Rules: 3, NotInBaseline: 1}}
	var out bytes.Buffer
	if err := printPreview(&out, "table", reply); err != nil {
		t.Error(err)
	}
	reply.Baseline = &api.BaselineName{Error: "baseline.json is corrupt"}
	reply.Changes = reply.Changes[1:]
	if err := printPreview(&out, "table", reply); err != nil {
		t.Error(err)
	}
	golden(t, "restore-preview-baseline", out.String())
}
