// Detect measures how soon canaryd notices a flush, and the cost of that. It does so for small
// and large rule sets, on both backends, and compares with the probe that kube-proxy executes.
// Each row runs in namespaces of its own and does not affect the machine's.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// marker is the environment variable with the row that a child measures: a Plan as JSON.
const marker = "CANARYD_BENCH_DETECT"

// oneRow is the longest time of one row. 200 flushes at 20,000 rules take longest.
const oneRow = time.Hour

// A Plan describes the measurement of one row.
type Plan struct {
	Program  string           `json:"program"`
	Backend  iptables.Backend `json:"backend"`
	Rules    int              `json:"rules"`
	Flushes  int              `json:"flushes"`
	Lockless int              `json:"lockless"` // flushes that bypass the lock, on legacy
	Rounds   int              `json:"rounds"`   // of looks
	Idle     time.Duration    `json:"idle"`
	// Rest is the wait before the daemon counts as idle. It writes a changed generation to disk
	// within a second or two.
	Rest time.Duration `json:"rest"`
	// After is the wait after the flushes before memory is measured, because the daemon frees
	// memory at most twice a minute.
	After time.Duration `json:"after"`
}

func main() {
	os.Exit(run())
}

func run() int {
	program := flag.String("canaryd", "bin/canaryd", "the canaryd `program` to measure")
	output := flag.String("o", "table", "table or json")
	short := flag.Bool("short", false, "few rules, flushes and seconds, to check that it works")
	sizes := flag.String("rules", "", "comma-separated `numbers` of rules; default 1000,20000")
	backends := flag.String("backends", "nft,legacy", "comma-separated `names`")
	flushes := flag.Int("flushes", 0, "flushes for each row; default 200")
	idle := flag.Duration("idle", 0, "how long to watch the idle daemon; default 60s")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if plan, inside := netns.Inside(marker); inside {
		return child(ctx, plan)
	}
	plan := Plan{Flushes: 200, Lockless: 40, Rounds: 60, Idle: time.Minute, Rest: 10 * time.Second, After: 40 * time.Second}
	numbers := []int{1000, 20000}
	if *short {
		plan = Plan{Flushes: 6, Lockless: 2, Rounds: 5, Idle: 2 * time.Second, Rest: 2 * time.Second, After: time.Second}
		numbers = []int{200}
	}
	if *flushes > 0 {
		plan.Flushes, plan.Lockless = *flushes, min(plan.Lockless, *flushes)
	}
	if *idle > 0 {
		plan.Idle = *idle
	}
	plans, err := plan.forAll(*program, *backends, *sizes, numbers)
	if err == nil && *output != "table" && *output != "json" {
		err = fmt.Errorf("-o is %q: want table or json", *output)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "detect:", err)
		return 2
	}
	return parent(ctx, plans, *output)
}

// forAll returns a plan for each backend and size.
func (p Plan) forAll(program, backends, sizes string, numbers []int) ([]Plan, error) {
	if sizes != "" {
		numbers = nil
		for size := range strings.SplitSeq(sizes, ",") {
			var n int
			if _, err := fmt.Sscan(size, &n); err != nil || n < 1 {
				return nil, fmt.Errorf("-rules: %q is not a number of rules", size)
			}
			numbers = append(numbers, n)
		}
	}
	path, err := filepath.Abs(program)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		return nil, fmt.Errorf("there is no canaryd to measure, run make build: %w", err)
	}
	var all []Plan
	for backend := range strings.SplitSeq(backends, ",") {
		if b := iptables.Backend(backend); b != iptables.NFT && b != iptables.Legacy {
			return nil, fmt.Errorf("-backends: %q is neither nft nor legacy", backend)
		}
		for _, n := range numbers {
			row := p
			row.Program, row.Backend, row.Rules = path, iptables.Backend(backend), n
			all = append(all, row)
		}
	}
	return all, nil
}

// parent measures one row after the other and prints them.
func parent(ctx context.Context, plans []Plan, output string) int {
	var all []Result
	for _, plan := range plans {
		start := time.Now()
		result, err := row(ctx, plan)
		if err != nil {
			fmt.Fprintf(os.Stderr, "detect: %s, %d rules: %v\n", plan.Backend, plan.Rules, err)
			if errors.Is(err, netns.ErrImpossible) {
				return 2
			}
			return 1
		}
		fmt.Fprintf(os.Stderr, "detect: %s, %d rules: measured in %s\n", plan.Backend, result.Rules, time.Since(start).Round(time.Second))
		all = append(all, result)
	}
	if output == "json" {
		encoder := json.NewEncoder(os.Stdout)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(all); err != nil {
			fmt.Fprintln(os.Stderr, "detect:", err)
			return 1
		}
		return 0
	}
	fmt.Print(table(all))
	return 0
}

// row measures one row in a process and namespaces of its own.
func row(ctx context.Context, plan Plan) (Result, error) {
	ctx, cancel := context.WithTimeout(ctx, oneRow)
	defer cancel()
	text, err := json.Marshal(plan)
	if err != nil {
		return Result{}, err
	}
	cmd, err := netns.Command(ctx, marker, string(text))
	if err != nil {
		return Result{}, err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := netns.Run(cmd); err != nil {
		return Result{}, fmt.Errorf("%w\n%s", err, strings.TrimSpace(stderr.String()))
	}
	var result Result
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		return Result{}, fmt.Errorf("the namespace's process printed %.200q: %w", &stdout, err)
	}
	return result, nil
}

// child measures one row and prints its result as JSON.
func child(ctx context.Context, text string) int {
	var plan Plan
	err := json.Unmarshal([]byte(text), &plan)
	if err == nil {
		var result Result
		if result, err = fill(ctx, plan); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(result)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// otherLock is the lock of each program that this one executes. With the real lock, legacy
// programs would wake the daemon, and wait while this process holds it. The daemon's own
// children use a third lock.
const otherLock = "/run/bench.lock"

// fill measures one row in the namespaces of this process.
func fill(ctx context.Context, plan Plan) (result Result, err error) {
	if err := netns.Setup(); err != nil {
		return result, err
	}
	dir, err := os.MkdirTemp("/run", "bench") // in this namespace's /run, it ends by itself
	if err != nil {
		return result, err
	}
	if err := os.Setenv("XTABLES_LOCKFILE", otherLock); err != nil {
		return result, err
	}
	g, err := generation(plan.Rules)
	if err != nil {
		return result, err
	}
	count, chains := g.Counts()
	result = Result{Backend: plan.Backend, Rules: count, Chains: chains}
	if err := load(ctx, scenario.Programs{With: plan.Backend}, g); err != nil {
		return result, err
	}
	n, err := start(ctx, plan.Program, dir, plan.Backend)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, n.stop()) }()
	if err := pause(ctx, plan.Rest); err != nil {
		return result, err
	}
	if result.Idle, err = n.idle(ctx, plan.Idle); err != nil {
		return result, fmt.Errorf("watching the idle daemon: %w", err)
	}
	looks, err := newLooker(ctx, n, plan.Backend)
	if err != nil {
		return result, err
	}
	if result.Looks, err = looks.compare(ctx, plan.Rounds); err != nil {
		return result, errors.Join(fmt.Errorf("comparing looks: %w", err), looks.kernel.Close())
	}
	if err := looks.kernel.Close(); err != nil {
		return result, err
	}
	result.Verdicts, err = n.allVerdicts(ctx, plan)
	if err != nil {
		return result, err
	}
	if err := pause(ctx, plan.After); err != nil {
		return result, err
	}
	result.After, err = memory(n.PID())
	return result, err
}

// allVerdicts measures the delays that matter for the backend.
func (n *node) allVerdicts(ctx context.Context, plan Plan) ([]Verdict, error) {
	if plan.Backend == iptables.NFT {
		b, err := openBatch()
		if err != nil {
			return nil, err
		}
		v, err := n.verdicts(ctx, fromCommit, plan.Flushes, b.flush)
		return []Verdict{v}, errors.Join(err, b.close())
	}
	locked, err := n.verdicts(ctx, fromRelease, plan.Flushes, underLock)
	if err != nil {
		return nil, err
	}
	free, err := n.verdicts(ctx, fromProgram, plan.Lockless, withoutLock)
	return []Verdict{locked, free}, err
}
