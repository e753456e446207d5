package owners

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestNoProgramRuns: on nft canaryd captures the rules of kube-proxy and of CNI
// plugins, and follows an owner that commits 100 times a second. It answers each
// kind of flush, and starts again after a flush. It executes iptables only for
// its version, which status shows. A program would cost some milliseconds, and
// more on a starved node. So canaryd also works without iptables.
func TestNoProgramRuns(t *testing.T) {
	for _, tt := range []struct {
		name      string
		installed bool
		executed  string // by canaryd at each start
	}{
		{"iptables is installed", true, `iptables-nft", \["[^"]*", "--version"\]`},
		{"iptables is not installed", false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			nodetest.On(t, iptables.NFT, func(n *nodetest.Node) {
				nstest.NeedProgram(n.T, "strace")
				if !tt.installed {
					hideIptables(n)
				}
				// With -D strace is a child, and canaryd the process that the test started.
				n.Under = []string{"strace", "-D", "-f", "-qq", "--seccomp-bpf", "-A", "-o", "/run/executed", "-e", "trace=execve,execveat"}
				n.Load()
				if !tt.installed { // only iptables can spell this rule, but it comes back, too
					n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*filter\n-A KUBE-FORWARD -m string --string \"canary\" --algo bm -j RETURN\nCOMMIT\n"))
				}
				d := n.Start()
				if !tt.installed {
					d.WantLog("iptables programs are missing", "iptables-nft is not installed")
				}
				storm(n, d)
				n.Renewed()
				for _, s := range scenario.All() {
					if !s.On(iptables.NFT) {
						continue
					}
					if s.Prepare != nil {
						n.Prepare(s)
						n.Learned()
					}
					before, records := n.Protected(), len(n.Status().Flushes)
					n.Must(s.Do(n.Context(), n.Programs))
					n.Healed(records + 1)
					n.Same("protected rules after "+s.Name, before, n.Protected())
				}
				d.Stop()
				before := n.Protected()
				n.Flush()
				n.Start()
				n.Healed(1)
				n.Same("protected rules that were lost while canaryd did not run", before, n.Protected())
				wantExecuted(n, "canaryd", tt.executed)
			})
		})
	}
}

// wantExecuted fails the test unless the trace has two executions of each program, and no others.
func wantExecuted(n *nodetest.Node, programs ...string) {
	n.Helper()
	text, err := os.ReadFile("/run/executed")
	n.Must(err)
	calls := regexp.MustCompile(`exec\w+\(.*`).FindAllString(string(text), -1)
	want := 0
	for _, program := range programs {
		if program == "" {
			continue
		}
		want += 2
		found := 0
		for _, call := range calls {
			if regexp.MustCompile(`^exec\w+\("[^"]*` + program).MatchString(call) {
				found++
			}
		}
		if found != 2 {
			n.Errorf("%s was executed %d times, want 2", program, found)
		}
	}
	if len(calls) != want {
		n.Errorf("%d programs were executed, want %d:\n%s", len(calls), want, text)
	}
}

// hideIptables hides iptables from canaryd, but not from the test.
func hideIptables(n *nodetest.Node) {
	n.Helper()
	const tools = "/run/tools"
	multi, err := exec.LookPath("xtables-nft-multi")
	n.Must(err)
	multi, err = filepath.EvalSymlinks(multi)
	n.Must(err)
	n.Must(os.Mkdir(tools, 0o755))
	program, err := os.ReadFile(multi)
	n.Must(err)
	n.Must(os.WriteFile(tools+"/xtables-nft-multi", program, 0o755))
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			n.Must(os.Symlink("xtables-nft-multi", tools+"/"+family+"-nft"+suffix))
		}
	}
	for _, name := range []string{multi, filepath.Dir(multi) + "/xtables-legacy-multi"} {
		n.Must(unix.Mount("/dev/null", name, "", unix.MS_BIND, ""))
	}
	n.Env = append(n.Env, "PATH="+os.Getenv("PATH"))
	n.Must(os.Setenv("PATH", tools+":"+os.Getenv("PATH")))
}
