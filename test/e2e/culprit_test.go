package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestTwoFlushers: two programs flush within the settle time, and each is named for the
// tables that it took something from.
func TestTwoFlushers(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		process := n.Start("--settle=2s") // so long may a busy machine take to start nft
		both := exec.CommandContext(n.Context(), "sh", "-c", "iptables-nft -t nat -F; nft flush ruleset")
		if code, _, stderr := n.Exec(both); code != 0 {
			n.Fatalf("%s: %s", both, stderr)
		}
		n.Healed(1)
		wantTakers(n, map[string]string{
			"ipv4 nat": "iptables-nft nft", "ipv4 filter": "nft", "ipv4 mangle": "nft",
			"ipv6 nat": "nft", "ipv6 filter": "nft", "ipv6 mangle": "nft",
		})
		if text, _ := n.Want(0, "status"); !strings.Contains(text, " nft, iptables-nft ") {
			n.Errorf("the list does not name both:\n%s", text)
		}
		process.Stop()
	})
}

// TestFlushBesideABusyOwner: an owner that never rests is not blamed for what a flusher
// took, neither for tables of its own nor for the one that was flushed.
func TestFlushBesideABusyOwner(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		process := n.Start()
		ctx, stop := context.WithCancel(n.Context())
		defer stop()
		owner := exec.CommandContext(ctx, "sh", "-c", `while :; do
			printf '*mangle\n:BUSY - [0:0]\n-A BUSY -j RETURN\nCOMMIT\n*nat\n:BUSY - [0:0]\n-A BUSY -j RETURN\nCOMMIT\n' | iptables-nft-restore -n
			sleep 0.01
		done`)
		n.Must(owner.Start())
		n.Until("the owner writes", func() error {
			if n.Save()[rules.IPv4][rules.Mangle].Chain("BUSY") == nil {
				return errors.New("it has not written yet")
			}
			return nil
		})
		flush := exec.CommandContext(n.Context(), "iptables-nft", "-t", "nat", "-F")
		if code, _, stderr := n.Exec(flush); code != 0 {
			n.Fatalf("%s: %s", flush, stderr)
		}
		n.Healed(1)
		stop()
		_ = owner.Wait() // it was killed
		wantTakers(n, map[string]string{"ipv4 nat": "iptables-nft"})
		process.Stop()
	})
}

// wantTakers fails unless the newest record says who took from which table, by name.
func wantTakers(n *nodetest.Node, want map[string]string) {
	n.Helper()
	record := flushJSON(n, "1").Flush
	got := map[string]string{}
	for _, t := range record.Lost.Tables {
		var names []string
		for _, pid := range t.By {
			i := slices.IndexFunc(record.Culprits, func(c api.Culprit) bool { return c.PID == pid })
			if i < 0 {
				n.Fatalf("pid %d is not among the culprits %+v", pid, record.Culprits)
			}
			names = append(names, record.Culprits[i].Comm)
		}
		got[fmt.Sprintf("%s %s", t.Family, t.Table)] = strings.Join(names, " ")
	}
	for table, names := range want {
		if got[table] != names {
			n.Errorf("%s was taken from by %q, want %q; writers: %+v", table, got[table], names, record.Writers)
		}
	}
}

// TestSecondFlusher: a flush that comes shortly after another one was put back and proved is the
// second flusher's alone, and began no sooner than that proof.
func TestSecondFlusher(t *testing.T) {
	for _, tt := range []struct {
		name          string
		backend       iptables.Backend
		native        bool
		first, second string
	}{
		{"nft", iptables.NFT, false, "iptables-nft -t nat -F", "nft flush ruleset"},
		{"legacy", iptables.Legacy, false, "iptables-legacy -t nat -F", "iptables-legacy -t nat -F"},
		{"restart of nftables.service", iptables.NFT, true, "nft flush ruleset", "nft -f /run/nftables.conf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nodetest.On(t, tt.backend, func(n *nodetest.Node) {
				n.Load()
				var flags []string
				if tt.native {
					nstest.NeedProgram(n.T, "nft")
					n.LoadNative(100)
					flags = append(flags, guardNative)
				}
				n.Must(os.WriteFile("/run/nftables.conf", []byte("flush ruleset\ntable inet mine {\n chain input {\n }\n}\n"), 0o600))
				process, records := n.Start(flags...), 0
				protected, native := n.Protected(), listed(n)
				named := 0
				// Each distance, and each time on the virtual clock, is tried in internal/daemon.
				for _, distance := range []string{"0.1", "0.3"} {
					first, second := flushers(n, tt.first, distance, tt.second)
					n.Until("the rules", func() error {
						if !slices.Equal(n.Protected(), protected) || listed(n) != native {
							return errors.New("they are not as they were")
						}
						return nil
					})
					n.Healed(records + 1)
					// The rules are back a moment before the second flush has its record.
					n.Until("the records of both flushes", func() error {
						list := n.WholeStatus().Flushes
						both, err := ownFlushes(n, list[:len(list)-records], first, second)
						if err == nil && both {
							named++
						}
						if err == nil {
							records = len(list)
						}
						return err
					})
				}
				if named == 0 {
					n.Errorf("at no distance do the records name both flushers")
				}
				process.Stop()
			})
		})
	}
}

// A flusher is a program that ran once.
type flusher struct {
	pid   uint32
	began time.Time
}

// flushers runs one program and, so many seconds later, another one.
func flushers(n *nodetest.Node, command, distance, another string) (first, second flusher) {
	n.Helper()
	const run = "sh -c 'echo $$ $(date +%%s%%N); exec %s'"
	script := fmt.Sprintf(run+"; sleep %s; "+run, command, distance, another)
	code, stdout, stderr := n.Exec(exec.CommandContext(n.Context(), "sh", "-c", script))
	var at [2]int64
	if _, err := fmt.Sscan(stdout, &first.pid, &at[0], &second.pid, &at[1]); code != 0 || err != nil {
		n.Fatalf("%s: %v %s", script, err, stderr)
	}
	first.began, second.began = time.Unix(0, at[0]), time.Unix(0, at[1])
	return first, second
}

// ownFlushes returns an error unless both flushers are in records, the newest first, and neither in
// one of a flush that began at another time. A record that was open when the second one came has
// both, unless nothing was left that the second one could take. On legacy a record may name no
// process: one that is quick may let go of the lock unseen. both: the records name both.
func ownFlushes(n *nodetest.Node, records []scenario.Record, first, second flusher) (both bool, err error) {
	n.Helper()
	back := map[string]time.Time{} // when a table was last put back
	// took: something was back by then. merged: the second one came while the first flush was open,
	// and of a table that it deleted the first one is not named.
	named, took, merged, unknown := map[uint32]bool{}, false, false, false
	for i := len(records); i > 0; i-- {
		record := flushJSON(n, fmt.Sprint(i)).Flush
		ends := record.Time.Add(api.Seconds(record.AbsentSeconds))
		if record.AbsentSeconds > 0 && ends.Before(first.began) {
			continue // of the flushers before
		}
		unknown = unknown || n.Programs.With == iptables.Legacy && len(record.Culprits) == 0
		for _, c := range record.Culprits {
			named[c.PID] = true
			merged = merged || c.PID == second.pid && record.Time.Before(second.began)
			if c.PID == first.pid && record.Time.After(second.began) || c.PID == second.pid && ends.Before(second.began) {
				return false, fmt.Errorf("pid %d began at %s and pid %d at %s; a record from %s to %s blames %+v",
					first.pid, first.began, second.pid, second.began, record.Time, ends, record.Culprits)
			}
		}
		var tables []string
		for _, t := range record.Lost.Tables {
			tables = append(tables, fmt.Sprint(t.Family, t.Table))
		}
		for _, table := range append(tables, record.NativeNames()...) {
			if record.Time.Before(back[table]) && record.Time.Before(second.began) {
				return false, fmt.Errorf("table %s was back at %s, the second flusher began at %s, and its record at %s", table, back[table], second.began, record.Time)
			}
			back[table] = record.Time.Add(api.Seconds(record.WrittenSeconds)).Round(time.Microsecond)
			took = took || back[table].Before(second.began)
		}
	}
	if unknown || (named[first.pid] || merged) && (!took || named[second.pid]) {
		return !unknown, nil
	}
	var all []string
	for i := range records {
		f := flushJSON(n, fmt.Sprint(i+1)).Flush
		all = append(all, fmt.Sprintf("record of %s, written %fs later, back %fs later: %s, by %s, culprit %d", f.Time, f.WrittenSeconds, f.AbsentSeconds, f.Summary(), f.ByText(), f.Culprit.PID))
	}
	return false, fmt.Errorf("%d began at %s and %d at %s; the records do not name both:\n%s", first.pid, first.began, second.pid, second.began, strings.Join(all, "\n"))
}
