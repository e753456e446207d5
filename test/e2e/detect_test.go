package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A detection is the output of detect -o json.
type detection struct {
	iptables.Evidence
	Protect string
	Native  []struct {
		Table, Word string
		Guarded     bool
	}
	Unguarded  []unguarded
	NotGuarded api.Unguarded

	UnguardedRules     []unguarded
	UnguardedRulesMore int
	UnguardedUnknown   []string
}

// An unguarded is a chain, or a rule of a built-in chain, that is not guarded.
type unguarded struct {
	Family               rules.Family
	Table, Chain, Rule   string
	Rules                int
	NotRead, Alike       bool
	Owner, Manager, Word string
}

// detected returns the evidence.
func detected(n *nodetest.Node, flags ...string) iptables.Evidence {
	n.Helper()
	return detect(n, flags...).Evidence
}

// detect returns the output of detect -o json.
func detect(n *nodetest.Node, flags ...string) (found detection) {
	n.Helper()
	stdout, _ := n.Want(0, "detect", append(flags, "-o", "json")...)
	decoder := json.NewDecoder(strings.NewReader(stdout))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&found); err != nil {
		n.Errorf("detect -o json printed %q: %v", stdout, err)
	}
	return found
}

// TestDetect tests the choice on a node, next to a running daemon and without
// one, and against a stranger's rules on the other backend.
func TestDetect(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		ours, other := n.Programs.With, n.Programs.With.Other()
		nstest.NeedProgram(n.T, "iptables-"+string(other), "ip6tables-"+string(other))
		before := tables(n)
		if e := detected(n); e.Backend != iptables.NFT || !e.Empty() || e.Mixed || e.Reason != "iptables' tables hold no rules, and nft is the default" {
			n.Errorf("without any rules: %+v", e)
		}
		if after := tables(n); after != before {
			n.Errorf("detect created tables: %s, before %s", after, before)
		}

		n.Load()
		alone := detected(n)
		if alone.Backend != ours || alone.Mixed || !strings.Contains(alone.Reason, string(ours)) {
			n.Errorf("on a node of %s: %+v", ours, alone)
		}
		for _, f := range rules.Families() {
			if got := alone.Counts[f]; got[ours].Rules < 100 || got[other] != (iptables.Count{}) {
				n.Errorf("%s: %+v", f, got)
			}
		}
		d := n.Start("--backend=auto")
		if diff := cmp.Diff(alone.Counts, detected(n).Counts); diff != "" {
			n.Errorf("canaryd's own marks are counted (-without +next to a daemon):\n%s", diff)
		}
		d.WantLog("Starting", `backend="`+string(ours)+`"`, alone.Reason)
		d.Stop()

		nstest.Command(n.T, "iptables-"+string(other), "-A", "INPUT", "-j", "ACCEPT")
		mixed := detected(n)
		if mixed.Backend != ours || !mixed.Mixed || mixed.Counts[rules.IPv4][other].Rules != 1 {
			n.Errorf("with one rule on %s: %+v", other, mixed)
		}
		if e := detected(n, "--backend="+string(ours)); e.Backend != ours || e.Reason != "it was asked for" {
			n.Errorf("asked for: %+v", e)
		}
		if e := detected(n, "--backend="+string(other), "--ip-family=ipv4"); e.Backend != other || !strings.HasPrefix(e.Reason, "it was asked for, against the evidence: ") ||
			len(e.Counts) != 1 || e.Counts[rules.IPv4][ours] != mixed.Counts[rules.IPv4][ours] {
			n.Errorf("asked for, against the evidence: %+v", e)
		}

		table, _ := n.Want(0, "detect")
		want := regexp.MustCompile(`^FAMILY +BACKEND +RULES +HINT +NOTE
ipv4 +nft +\d+ +(yes|no)
ipv4 +legacy +\d+ +(yes|no)
ipv6 +nft +\d+ +(yes|no)
ipv6 +legacy +\d+ +(yes|no)

FAMILY +TABLE +CHAIN +RULES +NOT GUARDED
ipv4 +filter +corp-input +2 +the word corp-input of --protect would
ipv6 +filter +corp-input +2 +the word corp-input of --protect would

FAMILY +TABLE +CHAIN +RULES +THE FIRST RULE +NOT GUARDED
(ipv[46] +(mangle|nat|filter) +[A-Z]+ +1 +.* the word 'rule:.*' of --protect would
)+
backend +` + string(ours) + `
reason +` + regexp.QuoteMeta(mixed.Reason) + `
mixed +yes: both backends hold rules
$`)
		if !want.MatchString(table) {
			n.Errorf("detect prints\n%s", table)
		}
	})
}

func tables(n *nodetest.Node) string {
	n.Helper()
	return nstest.Command(n.T, "nft", "list", "tables") + nstest.Command(n.T, "cat", "/proc/net/ip_tables_names", "/proc/net/ip6_tables_names")
}

func TestDetectWithoutPrivileges(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		words := append(dropNetAdmin(n), nodetest.Canaryd(), "detect")
		code, stdout, stderr := n.Exec(exec.CommandContext(n.Context(), words[0], words[1:]...))
		if code != 2 || stdout != "" || !strings.Contains(stderr, "CAP_NET_ADMIN is needed") {
			n.Errorf("exit code %d, %q, %q", code, stdout, stderr)
		}
		n.OneLine(stderr)
	})
}

// logs returns a function that fails until the log has the text.
func logs(p *nodetest.Process, text string) func() error {
	return func() error {
		if !strings.Contains(p.Log(), text) {
			return errors.New("not in the log yet")
		}
		return nil
	}
}

const waits = "There are no rules yet"

// TestFirstWait: no program has written rules yet. A program that starts at the
// same time decides the backend, and SIGTERM ends the wait.
func TestFirstWait(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		d := n.Launch("--backend=auto")
		n.Until("the wait", logs(d, waits))
		nstest.Command(n.T, "ip6tables-"+string(n.Programs.With), "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
		n.Until("the start", logs(d, "Starting"))
		d.WantLog("Starting", `backend="`+string(n.Programs.With)+`"`, "hint chain is in "+string(n.Programs.With)+" only")
		d.Stop()
	})
}

func TestFirstWaitEnds(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		d := n.Launch("--backend=auto")
		n.Until("the wait", logs(d, waits))
		start := time.Now()
		n.Until("the start", logs(d, "Starting"))
		if took := time.Since(start); took < time.Second {
			n.Errorf("it waited %s for rules, want 2 s", took)
		}
		d.Stop()

		forced := n.Launch()
		// The first run may have left a state. The signal must wait until canaryd
		// handles signals.
		n.Until("the second start", logs(forced, "Starting"))
		n.Until("the state to be on disk", func() error {
			_, err := os.Stat("/run/state/state.json")
			return err
		})
		forced.Stop()
		if strings.Contains(forced.Log(), waits) {
			n.Errorf("it waits although the backend was asked for:\n%s", forced.Log())
		}

		known := n.Launch("--backend=auto")
		n.Until("the start", logs(known, "Starting"))
		known.Stop()
		if strings.Contains(known.Log(), waits) {
			n.Errorf("it waits although the state names the backend:\n%s", known.Log())
		}
		n.Must(os.RemoveAll("/run/state"))

		third := n.Launch("--backend=auto")
		n.Until("the wait", logs(third, waits))
		third.Stop() // exit code 0
		if strings.Contains(third.Log(), "Starting") {
			n.Errorf("it started after SIGTERM:\n%s", third.Log())
		}
	})
}
