// Package e2e runs every scenario against the built canaryd and the kernel.
package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/internal/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// program is the environment variable that names the canaryd to test. It is
// built once, by the process outside; those in the namespaces inherit it.
const program = "CANARYD_E2E_PROGRAM"

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if os.Getenv(program) == "" {
		dir, err := os.MkdirTemp("", "canaryd-e2e")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "canaryd")
		// A race found ends canaryd with 66, and the scenario says so.
		build := exec.Command("go", "build", "-race", "-o", path, "github.com/canaryd/canaryd/cmd/canaryd")
		build.Stdout, build.Stderr = os.Stderr, os.Stderr
		if err := build.Run(); err != nil {
			panic("building canaryd: " + err.Error())
		}
		if err := os.Setenv(program, path); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

func TestScenarios(t *testing.T) {
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
		for _, s := range scenario.All() {
			if !s.On(backend) {
				continue
			}
			t.Run(string(backend)+"/"+s.Name, func(t *testing.T) {
				nstest.Run(t, func(t *testing.T) {
					nstest.NeedProgram(t, "iptables-"+string(backend), "ip6tables-"+string(backend), "nft")
					// In this namespace's own /run: a socket's path must be short.
					live := scenario.Live{Canaryd: os.Getenv(program), Programs: scenario.Programs{With: backend}, Dir: "/run"}
					result, err := live.Run(t.Context(), s)
					if err != nil {
						t.Fatal(err)
					}
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
