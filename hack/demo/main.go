// Demo flushes real kube-proxy rules in each way that canaryd must survive, and prints how long
// the rules were missing. It does so in iptables mode and in nftables mode. Each flush has a
// network namespace of its own and does not affect the machine's.
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
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// marker is the environment variable with the row of a child: "nft/flush-all".
const marker = "CANARYD_DEMO"

// oneRow is the longest time of one row; the scenario's own limits are shorter.
const oneRow = 2 * time.Minute

// enough bounds the printed problems of one row.
const enough = 8

func main() {
	os.Exit(run())
}

func run() int {
	canaryd := flag.String("canaryd", "bin/canaryd", "the canaryd `program` to try")
	only := flag.String("only", "", "comma-separated `names` of scenarios; default all")
	verbose := flag.Bool("v", false, "list the flush records of each row")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	program, err := filepath.Abs(*canaryd)
	if err == nil {
		_, err = os.Stat(program)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: there is no canaryd to try, run make build:", err)
		return 2
	}
	if row, inside := netns.Inside(marker); inside {
		return child(ctx, row, program)
	}
	return parent(ctx, program, *only, *verbose)
}

// parent runs each row in a process and namespaces of its own.
func parent(ctx context.Context, program, only string, verbose bool) int {
	const format = "%-46s %-7s %-52s %10s %14s  %s\n"
	fmt.Printf(format, "flush", "backend", "what was lost", "noticed", "back + proved", "")
	rows, failed := 0, 0
	start := time.Now()
	for _, backend := range []iptables.Backend{iptables.NFT, iptables.Legacy, nativeBackend} {
		for _, s := range scenariosOn(backend) {
			if only != "" && !slices.Contains(strings.Split(only, ","), s.Name) {
				continue
			}
			rows++
			result, err := row(ctx, program, backend, s)
			if errors.Is(err, netns.ErrImpossible) {
				fmt.Fprintln(os.Stderr, "demo:", err)
				return 2
			}
			verdict := "ok"
			if err != nil || len(result.Problems) > 0 {
				verdict = "FAILED"
				failed++
			}
			fmt.Printf(format, s.Command, backend, result.Lost, milliseconds(result.Noticed), milliseconds(result.Back), verdict)
			explain(result, err, verbose)
			if ctx.Err() != nil {
				return 1
			}
		}
	}
	fmt.Printf("\n%d rows, %d failed, %s. Times count from the start of the flush's first command; of several flushes the slowest.\n",
		rows, failed, time.Since(start).Round(time.Second))
	if failed > 0 || rows == 0 {
		return 1
	}
	return 0
}

// scenariosOn returns the rows of a backend, or of native tables.
func scenariosOn(backend iptables.Backend) []scenario.Scenario {
	var all []scenario.Scenario
	if backend == nativeBackend {
		for _, f := range nativeFlushes() {
			all = append(all, f.scenario())
		}
		return all
	}
	for _, s := range scenario.All() {
		if s.On(backend) {
			all = append(all, s)
		}
	}
	return all
}

func row(ctx context.Context, program string, backend iptables.Backend, s scenario.Scenario) (scenario.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, oneRow)
	defer cancel()
	var result scenario.Result
	cmd, err := netns.Command(ctx, marker, string(backend)+"/"+s.Name, "-canaryd", program)
	if err != nil {
		return result, err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 5 * time.Second
	if err := netns.Run(cmd); err != nil {
		return result, fmt.Errorf("%w\n%s", err, strings.TrimSpace(stderr.String()))
	}
	if err := json.Unmarshal(stdout.Bytes(), &result); err != nil {
		return result, fmt.Errorf("the namespace's process printed %.200q: %w", &stdout, err)
	}
	return result, nil
}

// child runs one row and prints its result as JSON.
func child(ctx context.Context, row, program string) int {
	result, err := try(ctx, row, program)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(result)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func try(ctx context.Context, row, program string) (scenario.Result, error) {
	if err := netns.Setup(); err != nil {
		return scenario.Result{}, err
	}
	dir, err := os.MkdirTemp("/run", "demo") // it ends with the namespace
	if err != nil {
		return scenario.Result{}, err
	}
	backend, name, _ := strings.Cut(row, "/")
	if backend == string(nativeBackend) {
		return tryNative(ctx, name, program, dir)
	}
	for _, s := range scenario.All() {
		if s.Name == name {
			live := scenario.Live{Canaryd: program, Programs: scenario.Programs{With: iptables.Backend(backend)}, Dir: dir, Limit: time.Minute}
			return live.Run(ctx, s)
		}
	}
	return scenario.Result{}, fmt.Errorf("there is no scenario %q", name)
}

func explain(result scenario.Result, err error, verbose bool) {
	if err != nil {
		fmt.Println(indent(err.Error()))
	}
	for i, problem := range result.Problems {
		if i == enough && !verbose {
			fmt.Println(indent(fmt.Sprintf("and %d more (-v lists them)", len(result.Problems)-enough)))
			break
		}
		fmt.Println(indent(problem))
	}
	if result.Log != "" {
		fmt.Println(indent("the end of canaryd's log:\n" + indent(result.Log)))
	}
	if !verbose {
		return
	}
	for _, r := range result.Records {
		fmt.Println(indent(fmt.Sprintf("%s %v %v by %s (%s), noticed %.3fs, absent %.3fs, %s",
			r.Kind, r.Families, r.Tables, r.Culprit.Comm, r.Culprit.Command, r.NoticedSeconds, r.AbsentSeconds, r.Outcome)))
	}
}

func indent(text string) string { return "    " + strings.ReplaceAll(text, "\n", "\n    ") }

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.0f ms", float64(d)/float64(time.Millisecond))
}
