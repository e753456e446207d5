package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestOf386: a program of 386 guards iptables-nft. Of tables of iptables-legacy it says at once
// that it cannot read them, and what to do.
func TestOf386(t *testing.T) {
	nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
		nstest.NeedProgram(n.T, "iptables-legacy", "go")
		program := filepath.Join(n.TempDir(), "canaryd")
		build := exec.CommandContext(n.Context(), "go", "build", "-o", program, "../../cmd/canaryd")
		build.Env = append(os.Environ(), "GOARCH=386", "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			n.Fatalf("%s: %v\n%s", build, err, out)
		}
		nstest.Need(n.T, "a kernel that runs programs of 386", exec.CommandContext(n.Context(), program, "version").Run())
		n.Load()
		want := func(code int, words string, args ...string) {
			n.Helper()
			got, stdout, stderr := n.Exec(exec.CommandContext(n.Context(), program, args...))
			if got != code || !strings.Contains(stdout+stderr, words) {
				n.Errorf("canaryd %s ended with %d and printed %s%s, want %d and %q", strings.Join(args, " "), got, stdout, stderr, code, words)
			}
		}
		want(0, "\nbackend  nft\n", "detect")
		nstest.Command(n.T, "iptables-legacy", "-A", "INPUT", "-j", "ACCEPT")
		const refused = "reading table filter of ipv4: a 386 program reads other structures of x_tables than its kernel writes"
		want(2, refused, "detect")
		want(2, refused, "check", "--state-dir=/run/state")
		want(2, "or --backend=nft", "check", "--state-dir=/run/state", "--backend=legacy")
	})
}
