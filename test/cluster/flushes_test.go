//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// quietFor is the quiet time after which a repair counts as the last. A flush of many
	// commands makes several flush records.
	quietFor = 2 * time.Second
	// calmFor is longer than the time within which canaryd counts a replay as undone. Ten such
	// replays in a row count as an endless flusher.
	calmFor = 11 * time.Second
)

// A flush is one way to take rules. Some ways lose nothing.
type flush struct {
	command  string
	do       func(ctx context.Context, f scenario.Programs) error
	lossless bool
}

// flushes returns the common list of flushes, and flushes that need a real cluster's rules. It
// omits an administrator's saved filter table, whose policy would cut off the services.
func (n *node) flushes() []flush {
	var all []flush
	for _, s := range scenario.All() {
		if s.On(n.backend) && s.Prepare == nil && s.Times <= 1 && s.Name != "restore-filter" {
			all = append(all, flush{command: s.Command, do: func(ctx context.Context, f scenario.Programs) error { return s.Do(ctx, f) }})
		}
	}
	return append(all,
		flush{command: "iptables -t nat -F KUBE-SERVICES", do: func(ctx context.Context, f scenario.Programs) error {
			return f.Flush(ctx, rules.IPv4, rules.Nat, "KUBE-SERVICES")
		}},
		flush{command: "iptables-restore < empty-tables.rules, both families", do: func(ctx context.Context, f scenario.Programs) error {
			return scenario.Wipe(ctx, f, rules.Families()...)
		}},
		flush{command: "iptables-save \\| iptables-restore", lossless: true, do: func(ctx context.Context, f scenario.Programs) error {
			text, err := f.Save(ctx, rules.IPv4)
			if err != nil {
				return err
			}
			return f.Restore(ctx, rules.IPv4, text)
		}},
	)
}

// tryFlushes flushes in each way in turn, while clients connect.
func tryFlushes(n *node) {
	for _, f := range n.flushes() {
		n.proxyRests()
		if r := n.strike(f); r != nil {
			n.results.rows = append(n.results.rows, *r)
		}
		testkit.Pass(n.T, calmFor, "that the flushes are no flusher without end")
	}
	if count := n.restarts(); count != "0" {
		n.Errorf("canaryd was restarted %s times", count)
	}
}

// proxyRests waits until kube-proxy has done the full sync that canaryd requests by deleting
// its canary. A flush during that sync leaves kube-proxy's jumps in another order, without
// canaryd too, because kube-proxy inserts each missing jump at the top.
func (n *node) proxyRests() {
	n.Helper()
	n.until("kube-proxy's canary in all tables", func() error {
		for _, family := range rules.Families() {
			tables, err := scenario.Tables(n.Context(), n.programs(), family)
			if err != nil {
				return err
			}
			for _, name := range []rules.TableName{rules.Mangle, rules.Nat, rules.Filter} {
				if table := tables[name]; table == nil || table.Chain("KUBE-PROXY-CANARY") == nil {
					return fmt.Errorf("%s %s has none", family, name)
				}
			}
		}
		return nil
	})
	testkit.Pass(n.T, quietFor, "that the sync itself, which follows, is done")
}

// strike flushes. Then it waits until the rules are as before, canaryd has proved them, and
// nothing more happens.
func (n *node) strike(f flush) *row {
	n.Helper()
	before, err := n.rules()
	n.must(err)
	since := n.newest()
	clients := n.newTraffic()
	testkit.Pass(n.T, quietFor, "that clients ask before the flush")
	err = f.do(n.Context(), n.programs())
	var records []scenario.Record
	if err == nil {
		records = n.wholeAgain(before, since, f.lossless)
	}
	r := &row{flush: f.command, seen: clients.end(), records: records}
	if err != nil {
		n.Errorf("%s: %v", f.command, err)
		return nil
	}
	for _, record := range records {
		if record.Outcome != "proved" && record.Outcome != "raced" { // the table has that outcome
			n.Errorf("%s: a flush record ended %q", f.command, record.Outcome)
		}
	}
	return r
}

// wholeAgain waits until the rules are as before, with flush records that are proved.
func (n *node) wholeAgain(before []string, since time.Time, lossless bool) (records []scenario.Record) {
	n.Helper()
	look := func() error {
		younger, healthy, err := n.records(since)
		n.must(err)
		came := len(younger) - len(records)
		records = younger
		switch {
		case !healthy:
			return errors.New("canaryd is not healthy")
		case len(younger) == 0 && !lossless:
			return errors.New("there is no flush record")
		case slices.ContainsFunc(younger, scenario.Record.Replaying):
			return errors.New("a flush record is pending")
		}
		if err := n.differ(before); err != nil || came == 0 {
			return err
		}
		return errors.New("a flush record has come")
	}
	n.until("the rules to be as before, and to stay so", func() error {
		if err := look(); err != nil {
			return err
		}
		for range 8 {
			testkit.Pass(n.T, quietFor/8, "that no further flush record comes")
			if err := look(); err != nil {
				return err
			}
		}
		return nil
	})
	return records
}

// differ returns an error if the rules are not those of before.
func (n *node) differ(before []string) error {
	now, err := n.rules()
	if err != nil || slices.Equal(before, now) {
		return err
	}
	return fmt.Errorf("the rules are others (-before +after):\n%s", cmp.Diff(before, now))
}

// flushAll runs iptables -F and -X on every table, in both families.
func (n *node) flushAll() error {
	for _, s := range scenario.All() {
		if s.Name == "flush-delete-all" {
			return s.Do(n.Context(), n.programs())
		}
	}
	return errors.New("the list of flushes has none of everything")
}

// same fails the test, without ending it, if the rules are not those of before.
func (n *node) same(when string, before []string) {
	n.Helper()
	if err := n.differ(before); err != nil {
		n.Errorf("%s: %v", when, err)
	}
}

// named returns the programs that the records name.
func named(records []scenario.Record) string {
	var all []string
	for _, r := range records {
		if r.Culprit.Comm != "" {
			all = append(all, "`"+r.Culprit.Comm+"`")
		}
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}
