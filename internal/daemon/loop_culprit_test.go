package daemon

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// whose lists each table with the processes that took from it, such as "ipv4 nat: 11 22".
func whose(f api.Flush) []string {
	var list []string
	for _, t := range f.Lost.Tables {
		list = append(list, strings.TrimSpace(fmt.Sprintf("%s %s: %s", t.Family, t.Table, strings.Trim(fmt.Sprint(t.By), "[]"))))
	}
	slices.Sort(list)
	return list
}

func pidsOf(list []api.Culprit) (pids []uint32) {
	for _, c := range list {
		pids = append(pids, c.PID)
	}
	return pids
}

// TestTwoFlushersInOneSettle: iptables -t nat -F runs, and nft flush ruleset before canaryd has
// settled. The record names both, each at the tables that it took from.
func TestTwoFlushersInOneSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, ""))
		r.after(7 * time.Millisecond)
		must(t, r.fake.As(22, "nft").FlushRuleset())
		r.settled()
		record := r.oneRecord()
		want := []string{"ipv4 filter: 22", "ipv4 mangle: 22", "ipv4 nat: 11 22", "ipv6 filter: 22", "ipv6 mangle: 22", "ipv6 nat: 22"}
		if diff := cmp.Diff(want, whose(record)); diff != "" {
			t.Errorf("who took from which table (-want +got):\n%s", diff)
		}
		if record.Culprit.Comm != "nft" || !slices.Equal(pidsOf(record.Culprits), []uint32{22, 11}) {
			t.Errorf("the culprit is %+v of %+v, want nft of both", record.Culprit, record.Culprits)
		}
		if got := record.ByText(); got != "nft, iptables" {
			t.Errorf("the list says by %q", got)
		}
		r.wantLog(`"Rules were lost"`)
		r.wantLog(`by="pid 22 (nft -F), pid 11 (iptables -F)"`)
	})
}

// TestOwnerBesideAFlush: an owner commits to tables and chains of its own before and after a
// flush. canaryd does not blame it for the flusher's takings.
func TestOwnerBesideAFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.NFT, setup{})
		owner := r.fake.As(900, "iptables-restor")
		flushed := false
		r.fake.OnCommit(func(c nft.Commit) {
			if c.PID != 11 || flushed {
				return
			}
			flushed = true
			for i := range 5 { // to tables that the flush spared, and to the flushed one
				must(t, owner.RestoreNoflush(rules.IPv4, section(rules.Mangle, fmt.Sprintf(":KUBE-BUSY-%d - [0:0]", i))))
				must(t, owner.RestoreNoflush(rules.IPv6, section(rules.Nat, fmt.Sprintf(":KUBE-BUSY-%d - [0:0]", i))))
				must(t, owner.RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-MARK-MASQ - [0:0]", "-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000")))
			}
		})
		must(t, owner.RestoreNoflush(rules.IPv4, section(rules.Filter, ":KUBE-BUSY - [0:0]")))
		must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		record := r.oneRecord()
		if diff := cmp.Diff([]string{"ipv4 nat: 11"}, whose(record)); diff != "" || record.Culprit.PID != 11 {
			t.Errorf("the culprit is %+v; who took from which table (-want +got):\n%s", record.Culprit, diff)
		}
		if !slices.ContainsFunc(record.Writers, func(c api.Culprit) bool { return c.PID == 900 }) {
			t.Errorf("the owner wrote meanwhile and is not among the writers: %+v", record.Writers)
		}
	})
}

// TestJumpDeletedBesideOthers: a process deletes a jump by name, and canaryd sees the loss only
// after the grace. It blames neither the process that deleted another jump meanwhile nor the
// last writer.
func TestJumpDeletedBesideOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := loadedFake(t, iptables.NFT)
		must(t, fake.RestoreNoflush(rules.IPv4, section(rules.Nat, ":DOCKER - [0:0]", "-A PREROUTING -j DOCKER")))
		r := run(t, fake, setup{})
		r.settled()
		jump := ""
		for _, spec := range r.chain(rules.IPv4, rules.Nat, "PREROUTING") {
			if strings.Contains(spec, "-j KUBE-SERVICES") {
				jump = spec
			}
		}
		must(t, fake.As(11, "iptables").RestoreNoflush(rules.IPv4, section(rules.Nat, "-D PREROUTING "+jump)))
		r.after(time.Second)
		must(t, fake.As(33, "dockerd").RestoreNoflush(rules.IPv4, section(rules.Nat, "-D PREROUTING -j DOCKER")))
		r.after(20 * time.Second)
		must(t, fake.As(34, "late").RestoreNoflush(rules.IPv4, section(rules.Filter, ":LATE - [0:0]")))
		r.after(20 * time.Second)
		record := r.oneRecord()
		if diff := cmp.Diff([]string{"ipv4 nat: 11"}, whose(record)); diff != "" || record.Culprit.PID != 11 {
			t.Errorf("the culprit is %+v; who took from which table (-want +got):\n%s", record.Culprit, diff)
		}
	})
}

// TestCulpritWhereMessagesWereLost: an overflow loses the contents of commits. Then canaryd
// names the process that alone wrote, and none of several.
func TestCulpritWhereMessagesWereLost(t *testing.T) {
	for _, tt := range []struct {
		name  string
		other bool
		want  uint32
	}{{"one writer", false, 11}, {"two writers", true, 0}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := start(t, iptables.NFT, setup{})
				must(t, r.fake.As(11, "iptables").Flush(rules.IPv4, rules.Nat, ""))
				if tt.other {
					must(t, r.fake.As(900, "iptables-restor").RestoreNoflush(rules.IPv4, section(rules.Nat, ":KUBE-BUSY - [0:0]")))
				}
				r.fake.ForgetTakings()
				r.settled()
				record := r.oneRecord()
				if record.Culprit.PID != tt.want || len(record.Writers) == 0 {
					t.Errorf("the culprit is %+v of %+v, want pid %d", record.Culprit, record.Writers, tt.want)
				}
			})
		})
	}
}

// TestManyCulpritsInAList: a list has each name once, two names at most, and the number of the
// other processes.
func TestManyCulpritsInAList(t *testing.T) {
	one, two, nft := api.Culprit{PID: 1, Comm: "iptables"}, api.Culprit{PID: 2, Comm: "iptables"}, api.Culprit{PID: 3, Comm: "nft"}
	for want, list := range map[string][]api.Culprit{
		"unknown":              nil,
		"iptables (pid 1)":     {one},
		"iptables (+1)":        {one, two},
		"iptables, nft":        {one, nft},
		"iptables, nft (+2)":   {one, two, nft, {PID: 4, Comm: "sh"}},
		"pid 7":                {{PID: 7}},
		"iptables, pid 7 (+1)": {one, {PID: 7}, {PID: 8}},
	} {
		f := api.Flush{Culprits: list}
		flushes.SettleCulprit(&f)
		if got := f.ByText(); got != want {
			t.Errorf("%+v: %q, want %q", list, got, want)
		}
	}
	if got := (api.Flush{Culprit: nft}).ByText(); got != "nft (pid 3)" {
		t.Errorf("a record of an earlier version: %q", got)
	}
}

// TestLegacyReaderIsNoCulprit: canaryd does not name a holder of the lock that only read,
// although it was the last.
func TestLegacyReaderIsNoCulprit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.Legacy, setup{})
		r.writers.Note(watch.Writer{Time: time.Now(), PID: 11, Comm: "iptables", Command: "/usr/sbin/iptables-legacy -t nat -F"})
		r.writers.Note(watch.Writer{Time: time.Now(), PID: 22, Comm: "iptables", Command: "iptables -w 5 -t mangle -S KUBE-PROXY-CANARY"})
		must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
		r.settled()
		if record := r.oneRecord(); record.Culprit.PID != 11 || len(record.Culprits) != 1 || len(record.Writers) != 2 {
			t.Errorf("the culprit is %+v of %+v", record.Culprits, record.Writers)
		}
	})
}

// TestLegacyHolders: a syncing owner holds the lock after the flusher. The kernel does not say
// which process took the rules, so both are named as likely. An owner that released the lock
// before the last replay is not named.
func TestLegacyHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, iptables.Legacy, setup{})
		flush := func(flusher, owner uint32) {
			r.writers.Note(watch.Writer{Time: time.Now(), PID: flusher, Comm: "iptables", Command: "iptables-legacy -t nat -F"})
			r.writers.Note(watch.Writer{Time: time.Now(), PID: owner, Comm: "iptables-restor", Command: "iptables-restore -w 5 --noflush --counters"})
			must(t, r.fake.Flush(rules.IPv4, rules.Nat, ""))
			r.after(120 * time.Millisecond)
		}
		flush(11, 900)
		r.after(time.Second)
		flush(22, 901)
		r.settled()
		for i, want := range [][]uint32{{11, 900}, {22, 901}} {
			record := r.records(0)[i]
			pids := pidsOf(record.Culprits)
			slices.Sort(pids)
			if diff := cmp.Diff(want, pids); diff != "" || !record.CulpritsLikely {
				t.Errorf("record %d: likely %t; the culprits (-want +got):\n%s", i+1, record.CulpritsLikely, diff)
			}
			if by := record.ByText(); !strings.HasPrefix(by, "likely ") {
				t.Errorf("the list says by %q", by)
			}
		}
		r.wantLog(`by="likely pid `)
	})
}
