// Package e2e runs every scenario against the built canaryd and the kernel.
package e2e

import (
	"fmt"
	"os"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestMain(m *testing.M) {
	if os.Getenv(withoutIPv6) != "" {
		fmt.Fprintln(os.Stderr, executeWithoutIPv6())
		os.Exit(1)
	}
	nodetest.SideBySide()
	os.Exit(nodetest.Main(m, nodetest.Race()...))
}

func TestScenarios(t *testing.T) {
	t.Parallel()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, s := range scenario.All() {
			if !s.On(backend) {
				continue
			}
			t.Run(string(backend)+"/"+s.Name, func(t *testing.T) {
				t.Parallel()
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
					result := runScenario(t, backend, s)
					for _, problem := range result.Problems {
						t.Error(problem)
					}
					if t.Failed() {
						t.Log("the end of canaryd's log:\n" + result.Log)
					}
					t.Logf("%s; noticed after %s, back after %s", result.Lost, result.Noticed, result.Back)
				})
			})
		}
	}
}

// runScenario runs a scenario until canaryd waits for the flusher's last command. Next to other
// packages' tests, two of its twelve commands may be farther apart than the default --settle of
// 20 ms, and on a starved machine farther than any. A command that deletes chains fails once their
// rules are back.
func runScenario(t *testing.T, backend iptables.Backend, s scenario.Scenario) scenario.Result {
	t.Helper()
	for n := 0; ; n++ {
		// This namespace has its own /run: a socket's path must be short.
		dir := fmt.Sprintf("/run/%d", n)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		live := scenario.Live{Canaryd: nodetest.Canaryd(), Programs: scenario.Programs{With: backend}, Dir: dir,
			Flags: []string{"--settle=200ms"}, Limit: testkit.Left(t)}
		result, err := live.Run(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		if !result.Overtaken || len(result.Problems) == 0 {
			return result
		}
		t.Logf("canaryd wrote between the flusher's commands: once more after %q", result.Problems)
		if err := scenario.Wipe(t.Context(), live.Programs, rules.Families()...); err != nil {
			t.Fatal(err)
		}
	}
}
