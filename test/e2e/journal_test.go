package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestJournal: the socket names the rules that a flush took. After a kill the
// next canaryd must name them, too.
func TestJournal(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		n.Load()
		first := n.Start()
		want := lostOf(n, rules.IPv4, rules.Nat)
		flush := exec.CommandContext(n.Context(), "iptables-"+string(n.Programs.With), "-w", "5", "-t", "nat", "-F")
		if code, _, stderr := n.Exec(flush); code != 0 {
			n.Fatalf("%s: %s", flush, stderr)
		}
		record := n.Healed(1)

		text, _ := n.Want(0, "status", "--flush=1")
		var told []string
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "-") {
				told = append(told, strings.TrimSuffix(line, "\n"))
			}
		}
		slices.Sort(told)
		if diff := cmp.Diff(want, told); diff != "" {
			n.Errorf("what iptables-save had, and what canaryd status --flush=1 says was lost (-want +got):\n%s", diff)
		}
		byID := flushJSON(n, record.ID)
		if byID.Flush.ID != record.ID || byID.Flush.Attempts < 1 || len(byID.Flush.Lost.Tables) != 1 || len(byID.Diff) != 1 {
			n.Errorf("canaryd status --flush %s -o json: %+v", record.ID, byID)
		}
		if command := byID.Flush.Culprit.Command; n.Programs.With == iptables.NFT && byID.Flush.Culprit.PID != 0 && command != "" && !strings.Contains(text, command) {
			n.Errorf("the command line %q is not in:\n%s", command, text)
		}
		n.Want(1, "status", "--flush=99")
		first.Kill()
		n.Want(2, "status", "--flush=1")

		info, err := os.Stat("/run/state/journal.jsonl")
		n.Must(err)
		if info.Mode() != 0o600 {
			n.Errorf("the journal's mode is %v", info.Mode())
		}
		// canaryd was killed in the middle of a line.
		file, err := os.OpenFile("/run/state/journal.jsonl", os.O_APPEND|os.O_WRONLY, 0)
		n.Must(err)
		_, err = file.WriteString(`{"id":"6`)
		n.Must(err)
		n.Must(file.Close())

		second := n.Start()
		if all := n.WholeStatus().Flushes; len(all) != 1 || all[0].ID != record.ID || !all[0].Earlier || len(n.Status().Flushes) != 0 {
			n.Errorf("after a restart: %+v", all)
		}
		byID.Flush.Earlier = true
		if diff := cmp.Diff(byID, flushJSON(n, record.ID)); diff != "" {
			n.Errorf("before and after a restart (-before +after):\n%s", diff)
		}
		n.Flush()
		n.Healed(1)
		second.Stop()
		third := n.Start()
		if all := n.WholeStatus().Flushes; len(all) < 2 || all[len(all)-1].ID != record.ID {
			n.Errorf("after another flush and restart: %+v", all)
		}
		third.Stop()
	})
}

// lostOf returns the lines that a flush takes from one table, as in a diff.
func lostOf(n *nodetest.Node, f rules.Family, t rules.TableName) []string {
	n.Helper()
	var lines []string
	for _, c := range n.Save()[f][t].Chains {
		for _, r := range c.Rules {
			if !canary.IsMark(r) && (n.Protects(c.Name) || n.Protects(r.Target)) {
				lines = append(lines, fmt.Sprintf("--A %s %s", c.Name, r.Spec))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// flushJSON returns all details of one flush.
func flushJSON(n *nodetest.Node, name string) api.FlushReply {
	n.Helper()
	stdout, _ := n.Want(0, "status", "--flush", name, "-o", "json")
	var reply api.FlushReply
	n.Must(json.Unmarshal([]byte(stdout), &reply))
	return reply
}
