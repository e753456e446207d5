package owners

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestEstimators: the match rateest needs an estimator, which exists while a rule
// with the target RATEEST does. The replay may write the match first. All rules
// must be restored, and the record must end as proved, wherever the two rules
// are.
func TestEstimators(t *testing.T) {
	const (
		target = "-A EST-Z -j RATEEST --rateest-name links --rateest-interval 250ms --rateest-ewmalog 1s\n"
		match  = "-A EST-A -m rateest --rateest links --rateest-gt --rateest-bps 1mbit -j RETURN\n-A EST-A -p tcp --dport 4242 -j ACCEPT\n"
	)
	for _, c := range []struct {
		name          string
		target, match rules.TableName
	}{
		{"in an earlier table", rules.Mangle, rules.Filter},
		{"in a later table", rules.Nat, rules.Mangle},
		{"in the last table", rules.Filter, rules.Nat},
		{"in the same table", rules.Mangle, rules.Mangle},
	} {
		t.Run(c.name, func(t *testing.T) {
			nodetest.OnBoth(t, func(n *nodetest.Node) {
				n.Families = []rules.Family{rules.IPv4}
				n.Protects = selectorOf(n, "EST-*").Protects
				text := func(table rules.TableName, chain, lines string) string {
					return "*" + string(table) + "\n:" + chain + " - [0:0]\n-A OUTPUT -j " + chain + "\n" + lines + "COMMIT\n"
				}
				n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, text(c.target, "EST-Z", target)+text(c.match, "EST-A", match)))
				before := n.Protected()
				p := n.Start("--protect=EST-*", "--ip-family=ipv4")
				for range 2 {
					n.Want(0, "pause", "--for=1m")
					for _, table := range protect.Always() {
						n.Must(n.Programs.Flush(n.Context(), rules.IPv4, table, ""))
					}
					n.Until("the kernel to forget the estimator", func() error {
						if exec.CommandContext(n.Context(), program(n, rules.IPv4, ""), "-w", "5", "-t", "raw", "-I", "OUTPUT", "-m", "rateest", "--rateest", "links", "--rateest-gt", "--rateest-bps", "1").Run() != nil {
							return nil
						}
						run(n, rules.IPv4, rules.Raw, "-D", "OUTPUT", "1")
						return errors.New("it is there")
					})
					n.Want(0, "resume")
					took := n.Until("all rules to be back", func() error {
						if got := n.Protected(); len(got) != len(before) {
							return errors.New(strings.Join(got, "\n"))
						}
						return nodetest.Ready()
					})
					n.Same("after the flush", before, n.Protected())
					n.Until("the records to be proved", func() error {
						for _, r := range n.Status().Flushes {
							if r.Outcome != "proved" {
								return errors.New(r.Outcome + ": " + r.Detail)
							}
						}
						return nil
					})
					n.Logf("back after %s", took)
				}
				p.Stop()
			})
		})
	}
}
