package owners

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A shell executes the lines that it receives.
type shell struct {
	*nodetest.Node
	stdin  io.Writer
	stdout *bufio.Reader
}

// startShell starts a person's shell, or a script that reads commands.
func startShell(n *nodetest.Node, person bool) shell {
	n.Helper()
	words := []string{"bash"}
	if !person {
		const path = "/run/job.sh"
		n.Must(os.WriteFile(path, []byte("while read -r line; do eval \"$line\"; done\n"), 0o600))
		words = append(words, path)
	}
	cmd := exec.CommandContext(n.Context(), words[0], words[1:]...)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	n.Must(err)
	stdout, err := cmd.StdoutPipe()
	n.Must(err)
	n.Must(cmd.Start())
	n.Cleanup(func() {
		stdin.Close()
		_ = cmd.Wait() // it is killed if the test ends first
	})
	return shell{n, stdin, bufio.NewReader(stdout)}
}

// do executes a line in the shell, and waits for its end.
func (s shell) do(line string) {
	s.Helper()
	_, err := fmt.Fprintf(s.stdin, "%s || echo failed; echo\n", line)
	s.Must(err)
	answer, err := s.stdout.ReadString('\n')
	s.Must(err)
	if answer != "\n" {
		s.Fatalf("%s: %s", line, answer)
	}
}

// canaries returns the number of lines of canaryd's canaries.
func (s shell) canaries() (lines int) {
	s.Helper()
	for _, line := range s.Marks() {
		if strings.Contains(line, "CANARY") {
			lines++
		}
	}
	return lines
}

// healed waits until canaries and protected rules exist, and canaryd has nothing
// to do.
func (s shell) healed(canaries int, protected []string) {
	s.Helper()
	s.Until("marks and rules to be back", func() error {
		if err := nodetest.Ready(); err != nil { // the cheapest check
			return err
		}
		if d := cmp.Diff(protected, s.Protected()); d != "" {
			return fmt.Errorf("(-want +got):\n%s", d)
		}
		if got := s.canaries(); got != canaries {
			return fmt.Errorf("%d lines of canaries of %d", got, canaries)
		}
		return nodetest.Ready()
	})
}

// TestACleanupIsObeyed: a shell flushes tables and deletes a mark by name. Then
// an owner that this shell starts deletes its rules by name, or the person at the
// shell deletes them. That is a decision: no later flush may bring any of these
// rules back.
func TestACleanupIsObeyed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		person bool   // at the shell, otherwise a script
		owner  string // the name of the program that cleans up; empty: the shell itself
		first  []string
	}{
		{"a flush of a table with a mark alone", true, "cleanup", []string{"-t mangle -F"}},
		{"everything, in a script", false, "kube-proxy", []string{"-t mangle -F", "-t filter -F", "mark"}},
		{"a flush of a chain with a mark alone", false, "cleanup", []string{"-t filter -F INPUT"}},
		{"a mark by name, in a script, and another one", false, "cleanup", []string{"mark"}},
		{"all by hand", true, "", []string{"-t mangle -F", "mark"}},
		// Only make test-large has the following cases.
		{"in a script", false, "cleanup", []string{"-t mangle -F"}},
		{"a flush of a table with rules", false, "kube-proxy", []string{"-t filter -F", "-t nat -F"}},
		{"a mark by name", true, "kube-proxy", []string{"mark"}},
		{"a mark by name, in a script", false, "kube-proxy", []string{"mark"}},
	}[testkit.Size(0, 5):testkit.Size(5, 9)] {
		for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy} {
			t.Run(tt.name+"/"+string(backend), func(t *testing.T) {
				nodetest.On(t, backend, func(n *nodetest.Node) {
					n.Families = []rules.Family{rules.IPv4}
					n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, purgedNode))
					if backend == iptables.Legacy { // a table without rules has no marks there
						n.Must(n.Programs.RestoreNoflush(n.Context(), rules.IPv4, "*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"))
					}
					program := "iptables-" + string(backend) + " "
					n.Start("--ip-family=ipv4")
					sh := startShell(n, tt.person)
					before, canaries := n.Protected(), sh.canaries()
					for _, words := range tt.first {
						line := program + "-w 20 " + words
						if words == "mark" { // the mark may be renewed between the two commands
							line = `until ` + program + `-w 20 -t nat $(` + program + `-w 20 -t nat -S PREROUTING | sed -n '/canaryd-witness/{s/^-A/-D/;s/"//g;p}'); do :; done`
						}
						sh.do(line)
						sh.healed(canaries, before)
					}
					cleanup := cleanupOf(n, program)
					if tt.owner == "" {
						for _, line := range cleanup {
							sh.do(line)
						}
					} else {
						bash, err := os.ReadFile("/bin/bash")
						n.Must(err)
						n.Must(os.WriteFile("/run/"+tt.owner, bash, 0o700)) //nolint:gosec // it is executed
						n.Must(os.WriteFile("/run/cleanup.sh", []byte("set -e\n"+strings.Join(cleanup, "\n")+"\n"), 0o600))
						sh.do("/run/" + tt.owner + " /run/cleanup.sh")
					}
					left := n.Protected()
					n.Until("the cleanup to be learned", func() error {
						if s := n.Status(); !s.LearningPendingSince.IsZero() || s.Generation.Rules >= 35 {
							return fmt.Errorf("%d rules, pending since %s", s.Generation.Rules, s.LearningPendingSince)
						}
						return nil
					})
					n.Same("protected rules after the cleanup", left, n.Protected())
					for _, table := range []string{"filter", "nat", "mangle"} {
						sh.do(program + "-w 20 -t " + table + " -F")
					}
					sh.healed(canaries, left)
				})
			})
		}
	}
}

// cleanupOf returns the commands by which kube-proxy --cleanup removes its rules:
// its jumps one by one, and the chains of each table in one file.
func cleanupOf(n *nodetest.Node, program string) (commands []string) {
	n.Helper()
	var files []string
	for t, table := range n.Save()[rules.IPv4] {
		var empty, remove strings.Builder
		for _, c := range table.Chains {
			if strings.HasPrefix(c.Name, "KUBE-") && !strings.HasPrefix(c.Name, "KUBE-CANARYD") {
				fmt.Fprintf(&empty, ":%s - [0:0]\n", c.Name)
				fmt.Fprintf(&remove, "-X %s\n", c.Name)
				continue
			}
			for _, r := range c.Rules {
				if strings.HasPrefix(r.Target, "KUBE-") {
					commands = append(commands, program+"-w 20 -t "+string(t)+" -D "+c.Name+" "+r.Spec)
				}
			}
		}
		path := "/run/cleanup." + string(t)
		n.Must(os.WriteFile(path, []byte("*"+string(t)+"\n"+empty.String()+remove.String()+"COMMIT\n"), 0o600))
		files = append(files, strings.TrimSpace(program)+"-restore -w 20 --noflush "+path)
	}
	return append(commands, files...)
}
