package canaryd

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
)

// TestProcess: programs end in canaryd's ways; a Process must report their ends and logs.
func TestProcess(t *testing.T) {
	const ready = "echo ready\n"
	stop := func(p *Process) error { return p.Stop(testkit.Left(t)) }
	tests := []struct {
		name   string
		script string
		end    func(*Process) error
		want   string // part of the error; empty for none
		log    string
	}{
		{"it ends by itself", ready + "exit 3", (*Process).Err, "exit status 3", "ready"},
		{"it is stopped", "trap 'echo bye; exit 0' TERM\n" + ready + "while :; do sleep 0.01; done", stop, "", "ready\nbye"},
		{"it fails when it is stopped", "trap 'exit 4' TERM\n" + ready + "while :; do sleep 0.01; done", stop, "exit status 4", "ready"},
		{"it does not heed SIGTERM", "trap '' TERM\n" + ready + "while :; do sleep 0.01; done", func(p *Process) error { return p.Stop(10 * time.Millisecond) }, "did not end within 10ms", "ready"},
		{"it is killed", ready + "while :; do sleep 0.01; done", (*Process).Kill, "", "ready"},
		{"it has ended before it is stopped", ready, func(p *Process) error { <-p.Ended(); return stop(p) }, "", "ready"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			log := filepath.Join(t.TempDir(), "log")
			p, err := Start(exec.CommandContext(t.Context(), "sh", "-c", test.script), log)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Until(t, "the script to be ready", func() error {
				if tail := p.Tail(); tail != "ready" {
					return fmt.Errorf("the log ends with %q", tail)
				}
				return nil
			})
			got := ""
			if err := test.end(p); err != nil {
				got = err.Error()
			}
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("the end says %q, want %q", got, test.want)
			}
			if p.Running() {
				t.Error("it runs on")
			}
			if got := strings.TrimSpace(p.Log()); got != test.log {
				t.Errorf("the log is %q, want %q", got, test.log)
			}
		})
	}
}
