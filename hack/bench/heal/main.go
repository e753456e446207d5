// Heal measures the cost of putting rules back, and of being ready for it. In one run it
// compares canaryd with iptables-restore, and with a loop that polls and restores. It does so
// on both backends and at several sizes.
//
// It compares canaryd's replays of kube-proxy's nftables mode with "nft -f" in the same way.
//
// Each process that writes rules runs in a network namespace of its own. A repetition measures
// everything once, at each size on each backend, so that other load affects all alike.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/pkg/iptables"
)

const (
	// marker is the environment variable with a child's task: "repetition/nft/100/0.5",
	// "lab/nft/100", "native/100", "native-lab/100" or "generate/100".
	marker = "CANARYD_BENCH"
	// folder is the environment variable with the folder for a child's files.
	folder = "CANARYD_BENCH_FOLDER"
)

// oneTurn is the longest time of one repetition at one size.
const oneTurn = 10 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// A config describes the measurements.
type config struct {
	canaryd     string
	sizes       []int
	backends    []iptables.Backend
	repetitions int
	perf        string
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("heal", flag.ContinueOnError)
	flags.SetOutput(stderr)
	canaryd := flags.String("canaryd", "bin/canaryd", "the canaryd `program` to measure")
	size := flags.String("sizes", "100,1000,5000", "comma-separated `numbers` of services")
	backend := flags.String("backends", "nft,legacy,native", "comma-separated `names` of backends; native is kube-proxy's nftables mode")
	repetitions := flags.Int("n", 5, "`number` of repetitions")
	short := flags.Bool("short", false, "100 services, one repetition")
	output := flags.String("o", "table", "table or json")
	keep := flags.String("json", "", "`file` to write the JSON to as well")
	perf := flags.String("perf", "", "`folder` for profiles of canaryd while it heals, which perf records; they cost time")
	flags.Usage = func() {
		fmt.Fprintln(stderr, "usage: heal [flags]: compares canaryd's heals with other ways to put rules back")
		flags.PrintDefaults()
	}
	if task, inside := netns.Inside(marker); inside {
		return child(ctx, task, stdout, stderr)
	}
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	if *short {
		*size, *repetitions = "100", 1
	}
	c, err := configure(*canaryd, *size, *backend, *repetitions, *perf)
	if err == nil && *output != "table" && *output != "json" {
		err = fmt.Errorf("-o %s: want table or json", *output)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}
	report, err := measureAll(ctx, c, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	text, err := json.MarshalIndent(report, "", "  ")
	if err == nil && *keep != "" {
		err = os.WriteFile(*keep, append(text, '\n'), 0o644)
	}
	if err == nil && *output == "json" {
		_, err = fmt.Fprintf(stdout, "%s\n", text)
	} else if err == nil {
		err = report.write(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	return 0
}

func configure(canaryd, size, backends string, repetitions int, perf string) (config, error) {
	c := config{repetitions: repetitions}
	var errs []error
	for _, word := range strings.Split(size, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || !slices.Contains(sizes(), n) {
			errs = append(errs, fmt.Errorf("-sizes %s: there is data for %v services only", word, sizes()))
		}
		c.sizes = append(c.sizes, n)
	}
	for _, word := range strings.Split(backends, ",") {
		b := iptables.Backend(word)
		if b != iptables.NFT && b != iptables.Legacy && b != ofNative {
			errs = append(errs, fmt.Errorf("-backends %s: want nft, legacy or native", word))
		}
		c.backends = append(c.backends, b)
	}
	if repetitions < 1 {
		errs = append(errs, errors.New("-n: want at least 1"))
	}
	var err error
	if c.canaryd, err = filepath.Abs(canaryd); err == nil {
		_, err = os.Stat(c.canaryd)
	}
	if err != nil {
		errs = append(errs, fmt.Errorf("there is no canaryd to measure, run make build: %w", err))
	}
	if perf != "" {
		c.perf, err = filepath.Abs(perf)
		errs = append(errs, err, os.MkdirAll(perf, 0o755))
	}
	return c, errors.Join(errs...)
}

// measureAll runs all repetitions, each at each size on each backend.
func measureAll(ctx context.Context, c config, progress io.Writer) (*report, error) {
	r := newReport(c)
	start, before := time.Now(), load()
	for turn := range c.repetitions {
		for _, services := range c.sizes {
			uses, err := apart(ctx, false, fmt.Sprintf("generate/%d", services), c)
			if err != nil {
				return nil, err
			}
			r.add("", services, uses)
			for _, backend := range c.backends {
				// The flushes are spread evenly over the poll's period.
				phase := (float64(turn) + 0.5) / float64(c.repetitions)
				task := fmt.Sprintf("repetition/%s/%d/%v/%d", backend, services, phase, turn)
				if backend == ofNative {
					task = fmt.Sprintf("native/%d", services)
				}
				if uses, err = apart(ctx, true, task, c); err != nil {
					return nil, err
				}
				r.add(string(backend), services, uses)
			}
			fmt.Fprintf(progress, "bench: %s: repetition %d of %d, %d services: done\n",
				time.Since(start).Round(time.Second), turn+1, c.repetitions, services)
		}
	}
	r.Machine = fmt.Sprintf("%s, load %s before and %s after", machine(), before, load())
	return r, nil
}

// apart runs a task in another process, which has a namespace of its own if it writes rules.
func apart(ctx context.Context, writes bool, task string, c config) (Uses, error) {
	ctx, cancel := context.WithTimeout(ctx, oneTurn)
	defer cancel()
	if !writes {
		dir, err := os.MkdirTemp("", "bench")
		if err != nil {
			return nil, err
		}
		defer func() { _ = os.RemoveAll(dir) }() // a temporary folder may stay
		return within(ctx, task, dir)
	}
	cmd, err := netns.Command(ctx, marker, task)
	if err != nil {
		return nil, err
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Env = append(cmd.Env, "CANARYD_BENCH_PROGRAM="+c.canaryd, "CANARYD_BENCH_PERF="+c.perf)
	cmd.WaitDelay = 5 * time.Second
	if err := netns.Run(cmd); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", task, err, strings.TrimSpace(stderr.String()))
	}
	uses := Uses{}
	if err := json.Unmarshal(stdout.Bytes(), &uses); err != nil {
		return nil, fmt.Errorf("%s printed %.200q: %w", task, &stdout, err)
	}
	return uses, nil
}

// child runs a task, and prints its Uses as JSON.
func child(ctx context.Context, task string, stdout, stderr io.Writer) int {
	uses, err := do(ctx, task)
	if err == nil {
		err = json.NewEncoder(stdout).Encode(uses)
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	return 0
}

func do(ctx context.Context, task string) (Uses, error) {
	words := strings.Split(task, "/")
	number := func(i int) int {
		n, _ := strconv.Atoi(words[i]) // this program wrote it
		return n
	}
	switch words[0] {
	case "generate":
		return measureGeneration(ctx, number(1), os.Getenv(folder))
	case "lab":
		return measureLab(ctx, iptables.Backend(words[1]), number(2), os.Getenv(folder))
	case "native":
		r := nativeRepetition{services: number(1), canaryd: os.Getenv("CANARYD_BENCH_PROGRAM")}
		return r.run(ctx)
	case "native-lab":
		return measureNativeLab(ctx, number(1), os.Getenv(folder))
	case "repetition":
		phase, err := strconv.ParseFloat(words[3], 64)
		if err != nil {
			return nil, err
		}
		r := repetition{backend: iptables.Backend(words[1]), services: number(2), phase: phase, canaryd: os.Getenv("CANARYD_BENCH_PROGRAM")}
		if perf := os.Getenv("CANARYD_BENCH_PERF"); perf != "" {
			r.perf = filepath.Join(perf, fmt.Sprintf("heal-%s-%d-%s", r.backend, r.services, words[4]))
		}
		return r.run(ctx)
	}
	return nil, fmt.Errorf("there is no task %q", task)
}

// load returns the load average of the last minute. If it is high, compare processor times.
func load() string {
	text, err := os.ReadFile("/proc/loadavg")
	first, _, found := strings.Cut(string(text), " ")
	if err != nil || !found {
		return "unknown"
	}
	return first
}

// machine describes the machine of the measurements.
func machine() string {
	kernel, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		kernel = []byte("unknown")
	}
	return fmt.Sprintf("Linux %s, %d processors, %s", strings.TrimSpace(string(kernel)), runtime.NumCPU(), runtime.Version())
}
