package owners

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// calicoPolicies writes Felix' rules for so many policies, and their ipsets.
func calicoPolicies(n *nodetest.Node, policies int) {
	n.Helper()
	for _, f := range n.Families {
		version, inet := "40", "inet"
		if f == rules.IPv6 {
			version, inet = "60", "inet6"
		}
		set := func(name string) string {
			nstest.Command(n.T, "ipset", "create", "cali"+version+name, "hash:net", "family", inet)
			return "cali" + version + name
		}
		filter := strings.Builder{}
		fmt.Fprintf(&filter, `*nat
:cali-POSTROUTING - [0:0]
:cali-nat-outgoing - [0:0]
-I POSTROUTING 1 -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-POSTROUTING -m comment --comment "cali:Z-c7XtVd2Bq7s_hA" -j cali-nat-outgoing
-A cali-nat-outgoing -m set --match-set %s src -m set ! --match-set %s dst -j MASQUERADE --random-fully
COMMIT
*filter
:cali-FORWARD - [0:0]
:cali-to-wl-dispatch - [0:0]
-I FORWARD 1 -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
-A cali-FORWARD -o cali+ -m comment --comment "cali:8ZoYfO5HKXWbB3pk" -j cali-to-wl-dispatch
`, set("masq-ipam-pools"), set("all-ipam-pools"))
		for i := range policies {
			s := set(fmt.Sprintf("s:%05d", i))
			fmt.Fprintf(&filter, ":cali-pi-_policy%05d - [0:0]\n:cali-tw-cali%07d - [0:0]\n", i, i)
			fmt.Fprintf(&filter, "-A cali-to-wl-dispatch -o cali%07d -g cali-tw-cali%07d\n", i, i)
			fmt.Fprintf(&filter, "-A cali-tw-cali%07d -m mark --mark 0x0/0x20000 -j cali-pi-_policy%05d\n", i, i)
			fmt.Fprintf(&filter, "-A cali-pi-_policy%05d -p tcp -m set --match-set %s src -m multiport --dports 80,443 -j MARK --set-xmark 0x10000/0x10000\n", i, s)
			fmt.Fprintf(&filter, "-A cali-pi-_policy%05d -m mark --mark 0x10000/0x10000 -j RETURN\n", i)
		}
		n.Must(n.Programs.RestoreNoflush(n.Context(), f, filter.String()+"COMMIT\n"))
	}
}

// TestAFlusherThatDeletesChainsBehindTheReplay: rules are written as text, and a
// flusher executes -X between canaryd's read and that write. The refusal says
// nothing about the rules: none is quarantined, and no record ends as partial or
// failed. CANARYD_FLUSHES sets the number of flushes.
func TestAFlusherThatDeletesChainsBehindTheReplay(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "ipset")
		n.Load()
		calicoPolicies(n, 40)
		n.Protects = selectorOf(n, "kube", "cni", "cali-*").Protects
		before := n.Protected()
		p := n.Start("--protect=kube,cni,cali-*", "--replay=text")
		flushes := testkit.Size(5, 9)
		if text := os.Getenv("CANARYD_FLUSHES"); text != "" {
			many, err := strconv.Atoi(text)
			n.Must(err)
			flushes = many
		}
		var took []time.Duration
		for i := range flushes {
			start := time.Now()
			for _, command := range []string{"-F", "-X"} {
				for _, f := range n.Families {
					for _, table := range protect.Always() {
						// It fails if canaryd has put rules back already.
						_ = exec.CommandContext(n.Context(), program(n, f, ""), "-w", "5", "-t", string(table), command).Run()
					}
				}
				testkit.Pass(n.T, time.Duration(i*13%90)*time.Millisecond, "the flusher's pause, so that -X meets another moment of the replay each time")
			}
			n.Until("all rules to be back", func() error {
				if err := nodetest.Ready(); err != nil { // the cheapest check
					return err
				}
				if d := len(before) - len(n.Protected()); d != 0 {
					return fmt.Errorf("%d rules are missing", d)
				}
				return nodetest.Ready()
			})
			took = append(took, time.Since(start).Round(time.Millisecond))
			n.Same(fmt.Sprintf("after flush %d", i+1), before, n.Protected())
		}
		n.Until("no record to be partial or failed", func() error {
			flushes := n.Status().Flushes
			if len(flushes) == 0 {
				return errors.New("there is no record")
			}
			for _, r := range flushes {
				if r.Outcome != "proved" && r.Outcome != "raced" && r.Outcome != "skipped" {
					return errors.New(r.Outcome + ": " + r.Detail)
				}
			}
			return nil
		})
		log := p.Log()
		if lines := regexp.MustCompile(`(?m)^.*quarantine.*$`).FindAllString(log, 5); len(lines) > 0 {
			n.Errorf("rules went to quarantine:\n%s", strings.Join(lines, "\n"))
		}
		slices.Sort(took)
		records, absent := n.Status().Flushes, 0.0
		for _, r := range records {
			absent = max(absent, r.AbsentSeconds)
		}
		n.Logf("%d flushes, whole after %s (median %s) with the flusher's commands; %d records, absent for %.2f s at most", flushes, took[len(took)-1], took[len(took)/2], len(records), absent)
		p.Stop()
	})
}
