package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// full returns all known facts of one flush.
func (r *rig) full(name string) api.FlushReply {
	r.t.Helper()
	reply, err := r.d.Flush(r.t.Context(), api.FlushRequest{Name: name})
	must(r.t, err)
	return reply
}

// lostLines returns nat's rules in chains that protects names, and the jumps there, as lines of
// a diff.
func lostLines(table *rules.Table, protects func(string) bool) []string {
	var lines []string
	for _, c := range table.Chains {
		for _, rule := range c.Rules {
			if !canary.IsMark(rule) && (protects(c.Name) || protects(rule.Target)) {
				lines = append(lines, fmt.Sprintf("--A %s %s", c.Name, rule.Spec))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// TestFlushIsRemembered: canaryd reports the lost rules of a flush one by one, by its number
// and by its ID, also after a restart.
func TestFlushIsRemembered(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{journal: dir})
		want := lostLines(r.tables()[rules.IPv4][rules.Nat], r.d.cfg.Protection.Chain)
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		record := r.oneRecord()
		told := r.full("1")
		if diff := cmp.Diff(record, told.Flush); diff != "" {
			t.Errorf("the record of the status, and in full (-want +got):\n%s", diff)
		}
		if len(told.Diff) != 1 || told.Diff[0].More != 0 || told.NoDiff != "" {
			t.Fatalf("the diff is %+v %s", told.Diff, told.NoDiff)
		}
		got := slices.Sorted(slices.Values(told.Diff[0].Lines))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("what was lost (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(told, r.full(record.ID)); diff != "" {
			t.Errorf("by number and by ID (-number +ID):\n%s", diff)
		}
		r.stop()

		next := run(t, loadedFake(t, backend), setup{journal: dir})
		next.settled()
		told.Flush.Earlier = true
		if diff := cmp.Diff(told, next.full(record.ID)); diff != "" {
			t.Errorf("after a restart (-want +got):\n%s", diff)
		}
		if moved := next.metrics("flush_events", "flushes", "last_flush", "journal_errors"); len(moved) != 0 {
			t.Errorf("an earlier run's flushes are counted: %v", moved)
		}
		must(t, next.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		next.settled()
		flushes := next.d.Status().Flushes
		if len(flushes) != 2 || flushes[0].Earlier || !flushes[1].Earlier || flushes[1].ID != record.ID {
			t.Errorf("the newest comes first: %+v", flushes)
		}
		if next.full("2").Flush.ID != record.ID {
			t.Error("number 2 is another one")
		}
	})
}

// TestUnknownFlush: the error says which flushes are known.
func TestUnknownFlush(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{journal: t.TempDir()})
		ask := func(name, want string) {
			t.Helper()
			reply, err := r.d.Flush(t.Context(), api.FlushRequest{Name: name})
			if !errors.Is(err, api.ErrNoFlush) || err.Error() != want || reply.Flush.ID != "" {
				t.Errorf("%q: %+v, %v; want %s", name, reply, err, want)
			}
		}
		ask("1", `no such flush: "1"; none was seen`)
		for range 2 {
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
			r.settled()
		}
		for _, name := range []string{"", "0", "3", "-1", "abc", "0123456789abc", "1234567890123", "../../1", strings.Repeat("9", 400)} {
			ask(name, fmt.Sprintf(`no such flush: %q; there are 1 to 2, the newest is 1`, name))
		}
	})
}

// TestKilledInALoss: the next canaryd knows culprit and losses of a flush that it did not see.
// The unfinished record counts as interrupted.
func TestKilledInALoss(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		r := start(t, backend, setup{journal: dir})
		_, err := r.d.Pause(t.Context(), api.PauseRequest{Seconds: 60})
		must(t, err)
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		open := r.full("1")
		if open.Flush.Outcome != api.WaitingPaused || len(open.Diff) != 1 || len(open.Diff[0].Lines) == 0 {
			t.Errorf("a loss that lasts: %+v", open)
		}
		// A killed daemon leaves the present files.
		left := t.TempDir()
		must(t, os.CopyFS(left, os.DirFS(dir)))

		next := run(t, loadedFake(t, backend), setup{journal: left})
		next.settled()
		got := next.full("1")
		open.Flush.Outcome, open.Flush.Earlier = api.Interrupted, true
		if diff := cmp.Diff(open, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestJournalOfStrangers: canaryd skips records that make no sense, and shows the records of
// another boot with their time. It learns and replays nothing from them.
func TestJournalOfStrangers(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		long := time.Date(1999, 4, 5, 6, 7, 8, 9, time.UTC)
		old := api.Flush{
			ID: "35d013b37e000", Time: long, Kind: canary.Emptied, Families: rules.Families(), Tables: []rules.TableName{rules.Nat},
			Outcome: reload.Skipped, Lost: api.Lost{Rules: 5},
		}
		bad := old
		bad.ID, bad.Kind = "b", canary.Intact
		j := journal.New(dir)
		for id, record := range map[string]any{"35d013b37e000": old, "a": old, "b": bad, "c": 7, "d": map[string]any{"id": "d", "families": []string{"ipv5"}}, "e": nil} {
			text, err := json.Marshal(record)
			must(t, err)
			must(t, j.Keep(journal.Entry{ID: id, Record: text, Detail: json.RawMessage(`{"diff":7}`)}))
		}
		j.Close()
		j.Run(func(err error) { must(t, err) })

		r := start(t, backend, setup{journal: dir, mode: api.Observe})
		old.Earlier = true
		if diff := cmp.Diff([]api.Flush{old}, r.d.Status().Flushes); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if got := r.full("1"); got.NoDiff == "" || len(got.Diff) != 0 {
			t.Errorf("a diff that cannot be read: %+v", got)
		}
		// In observe mode an absence ends when the owner has written its rules again, for this
		// run's record only.
		foreign := r.tables()
		must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
		r.settled()
		r.write(rules.Nat, sectionOf(foreign[rules.IPv4][rules.Nat])...)
		r.after(20 * time.Second)
		flushes := r.d.Status().Flushes
		if len(flushes) != 2 || flushes[0].AbsentSeconds == 0 || flushes[1].AbsentSeconds != 0 {
			t.Errorf("%+v", flushes)
		}
		r.stop()
		after := run(t, loadedFake(t, backend), setup{journal: dir})
		after.settled()
		if got := after.d.Status().Flushes[0]; got.AbsentSeconds != flushes[0].AbsentSeconds {
			t.Errorf("absent for %v s in the journal, %v s before", got.AbsentSeconds, flushes[0].AbsentSeconds)
		}
	})
}

// sectionOf returns the lines that write a table's chains again, without canaryd's.
func sectionOf(table *rules.Table) []string {
	var declared, lines []string
	for _, c := range table.Chains {
		if c.Name == canary.DefaultChain {
			continue
		}
		if c.Policy == "" {
			declared = append(declared, ":"+c.Name+" - [0:0]")
		}
		for _, rule := range c.Rules {
			if !canary.IsMark(rule) {
				lines = append(lines, "-A "+c.Name+" "+rule.Spec)
			}
		}
	}
	return append(declared, lines...)
}

// TestJournalTrouble: the disk refuses the journal. No replay waits for it; status, metric and
// log report it, and the kept records are written later.
func TestJournalTrouble(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		dir := t.TempDir()
		blocked := filepath.Join(dir, "journal.jsonl")
		r := start(t, backend, setup{journal: dir})
		must(t, os.Remove(blocked)) // the start has made it
		must(t, os.Mkdir(blocked, 0o700))
		moved := r.moved(func() {
			must(t, r.programs().Flush(t.Context(), rules.IPv4, rules.Nat, ""))
			r.settled()
		}, "journal_errors")
		r.wantReady()
		wantMoved(t, moved, series{"journal_errors_total": 1})
		r.wantLog("A flush record is not on disk")
		if s := r.d.Status(); s.JournalError == "" || !s.Healthy {
			t.Errorf("healthy %t, journal: %q", s.Healthy, s.JournalError)
		}
		if got := r.full("1"); len(got.Diff) == 0 {
			t.Errorf("what waits for the disk is forgotten: %+v", got)
		}
		must(t, os.Remove(blocked))
		r.after(2 * time.Minute)
		r.wantLog("The flush records are on disk again")
		if s := r.d.Status(); s.JournalError != "" {
			t.Errorf("the journal is well: %q", s.JournalError)
		}
		if text, err := os.ReadFile(blocked); err != nil || !strings.Contains(string(text), r.oneRecord().ID) {
			t.Errorf("on disk: %.200s, %v", text, err)
		}
	})
}
