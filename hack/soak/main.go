// Soak sends packets to services while their rules are flushed, and prints how long no pod
// answered. Each backend has a node of its own, in network namespaces that do not affect the
// machine's.
//
// It fails if a connection reaches a pod of another service, if canaryd does not put rules
// back, or if canaryd ends. It prints how long a heal takes and does not fail for that, because
// it also depends on the machine.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// The environment variables with the part of a child.
const (
	nodeMarker   = "CANARYD_SOAK_NODE"   // a node, by its plan
	clientMarker = "CANARYD_SOAK_CLIENT" // the client of a node, by its load
	viewMarker   = "CANARYD_SOAK_VIEW"   // a client of the view, by its load
)

// The healers.
const (
	byCanaryd = "canaryd"
	byMonitor = "monitor" // like kube-proxy's Monitor
	byStale   = "stale"   // brings back old rules, which this program must notice
)

// A plan describes one node.
type plan struct {
	Healer   string
	Backend  iptables.Backend
	Canaryd  string        // path of the program
	For      time.Duration // how long flushes continue
	Rate     int           // new connections a second
	Services int
	Seed     uint64
	Poll     time.Duration // of the monitor
	Standby  string        // --standby of canaryd; "both": off and on in turns
	Mode     string        // of kube-proxy: inIPTables or inNFTables
	Kinds    []string      // of flushes; empty: all that are possible on the backend

	View           bool // measure the clients' view, not a rate
	FlushesPerKind int  // instead of For
	ForwardDrop    bool // FORWARD's policy is DROP, and only marked connections are opened
	Strict         bool
	Each           int           // established connections of each way
	Ping           time.Duration // between two requests of one of them
	Patient        time.Duration // between two patient connections, of all ways
	Impatient      time.Duration // between two impatient ones, of all ways
}

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if text, inside := netns.Inside(clientMarker); inside {
		return exitCode(runClient(ctx, text, os.Stdin, os.Stdout))
	}
	if text, inside := netns.Inside(viewMarker); inside {
		return exitCode(runViewer(text, os.Stdin, os.Stdout))
	}
	if text, inside := netns.Inside(nodeMarker); inside {
		return exitCode(runNode(ctx, text))
	}
	return exitCode(parent(ctx))
}

func exitCode(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	return 0
}

// parent runs all nodes, and prints the results. Nodes of one healer run in parallel, healers
// one after the other.
func parent(ctx context.Context) error {
	first := plan{}
	flag.StringVar(&first.Canaryd, "canaryd", "bin/canaryd", "the canaryd `program` to try")
	flag.DurationVar(&first.For, "for", 10*time.Minute, "how long flushes go on")
	flag.IntVar(&first.Rate, "rate", 1000, "new connections a second, on each backend")
	flag.IntVar(&first.Services, "services", 100, "how many services there are")
	flag.Uint64Var(&first.Seed, "seed", 0, "of flushes and changes; 0 is a new one")
	flag.DurationVar(&first.Poll, "poll", 3*time.Second, "how often the monitor checks its canary; kube-proxy's does so every 30s")
	flag.StringVar(&first.Standby, "standby", "off", "--standby of canaryd; with on, flushes wait until it is ready; with -view, both has them in turns")
	viewFlags(&first)
	backends := flag.String("backends", "nft,legacy", "comma-separated `names`")
	healers := flag.String("healers", byCanaryd, "comma-separated `names`: canaryd; monitor for what kube-proxy does without it; stale for old rules")
	kinds := flag.String("kinds", "", "comma-separated `names` of flushes; default all that are possible on a backend")
	modes := flag.String("modes", inIPTables, "with -view, comma-separated `modes` of kube-proxy: iptables, nftables (on nft only)")
	sizes := flag.String("sizes", "", "with -view, comma-separated `numbers` of services, one after the other; default is -services")
	out := flag.String("json", "", "also write the results to this `file`")
	flag.Parse()
	var err error
	if first.Canaryd, err = filepath.Abs(first.Canaryd); err != nil {
		return err
	}
	if _, err := os.Stat(first.Canaryd); err != nil {
		return fmt.Errorf("there is no canaryd to try, run make build: %w", err)
	}
	if *kinds != "" {
		first.Kinds = strings.Split(*kinds, ",")
	}
	if first.Seed == 0 {
		first.Seed = rand.Uint64()
	}
	var results []result
	var errs []error
	each, err := first.each(*sizes, *modes)
	if err != nil {
		return err
	}
	for _, p := range each {
		p.announce()
		for healer := range strings.SplitSeq(*healers, ",") {
			some, err := sideBySide(ctx, p, healer, strings.Split(*backends, ","))
			results = append(results, some...)
			errs = append(errs, err)
		}
	}
	switch {
	case first.View && first.Standby == both:
		standbyReport(os.Stdout, results)
	case first.View:
		viewReport(os.Stdout, results)
	default:
		report(os.Stdout, results)
	}
	if *out != "" {
		data, err := json.MarshalIndent(results, "", "  ")
		if err == nil {
			err = os.WriteFile(*out, append(data, '\n'), 0o644)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// announce describes the beginning run.
func (p plan) announce() {
	if p.View {
		fmt.Printf("soak: the clients' view, %d flushes of each kind, %d services, %s mode, -seed %d\n", p.FlushesPerKind, p.Services, p.Mode, p.Seed)
	} else {
		fmt.Printf("soak: %s, %d services, %d connections a second on each backend, -seed %d\n", p.For, p.Services, p.Rate, p.Seed)
	}
}

func sideBySide(ctx context.Context, first plan, healer string, backends []string) ([]result, error) {
	results, errs := make([]result, len(backends)), make([]error, len(backends))
	var all sync.WaitGroup
	for i, backend := range backends {
		p := first
		p.Healer, p.Backend = healer, iptables.Backend(backend)
		p.Seed += uint64(i)
		all.Go(func() {
			results[i], errs[i] = node(ctx, p)
			if errs[i] == nil {
				errs[i] = results[i].err()
			}
			if errs[i] != nil {
				errs[i] = fmt.Errorf("%s on %s: %w", healer, backend, errs[i])
			}
		})
	}
	all.Wait()
	return results, errors.Join(errs...)
}

// node runs one node in namespaces of its own.
func node(ctx context.Context, p plan) (result, error) {
	var r result
	text, err := json.Marshal(p)
	if err != nil {
		return r, err
	}
	// The limit is for the flushes, and for the work before and after them.
	ctx, cancel := context.WithTimeout(ctx, p.longest())
	defer cancel()
	cmd, err := netns.Command(ctx, nodeMarker, string(text))
	if err != nil {
		return r, err
	}
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := netns.Run(cmd); err != nil {
		return r, fmt.Errorf("the node: %w", err)
	}
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		return r, fmt.Errorf("the node printed %.200q: %w", &stdout, err)
	}
	return r, nil
}
