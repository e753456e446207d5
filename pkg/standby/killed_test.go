package standby_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/standby"
)

// worker is the environment variable that makes this binary a process that works at a standby until
// it is killed.
const worker = "STANDBY_WORKER"

// steps are the worker's work, again and again. It prints each step before beginning it.
var steps = []string{"put", "open", "follow", "shut", "remove"}

// TestWorker is the body of that process. Without the variable it does nothing.
func TestWorker(t *testing.T) {
	if os.Getenv(worker) == "" {
		return
	}
	s, err := standby.Dial(standby.Config{Piece: 4096})
	must(t, err)
	conn := dial(t)
	for {
		for _, step := range steps {
			fmt.Println(step)
			switch step {
			case "put":
				must(t, s.Put(translate(t, source(t, conn, nat), nil)))
			case "open":
				must(t, s.Open(nat, s.Held(nat).Hooks(), nil))
			case "follow":
				must(t, s.Put(translate(t, source(t, conn, nat), s.Held(nat))))
			case "shut":
				must(t, s.Shut(nat))
			case "remove":
				must(t, s.Remove(nat))
			}
		}
	}
}

// TestAKilledProcessLeavesNoStandby: a process is killed in each of its steps. It must leave no
// table.
func TestAKilledProcessLeavesNoStandby(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		restore(t, nat.Family, bigNat(1, -1))
		conn := dial(t)
		for _, at := range append(steps, "the end") {
			t.Run(at, func(t *testing.T) {
				c := exec.Command("/proc/self/exe", "-test.run=^TestWorker$")
				c.Env = append(os.Environ(), worker+"=1")
				out, err := c.StdoutPipe()
				must(t, err)
				must(t, c.Start())
				seen := 0
				for line := bufio.NewScanner(out); line.Scan() && seen < len(steps)+2; {
					if seen++; seen > len(steps) && line.Text() == at {
						break
					}
				}
				must(t, c.Process.Kill())
				_ = c.Wait() // it says that the process was killed
				if seen <= len(steps) {
					t.Fatalf("the process ended after %d steps", seen)
				}
				gone(t, conn)
			})
		}
	})
}
