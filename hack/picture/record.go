package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/canaryd"
	"github.com/canaryd/canaryd/internal/testkit/cluster"
	"github.com/canaryd/canaryd/internal/testkit/netns"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A recording has the events around one flush. Times are in milliseconds after the start of the
// flushing command.
type recording struct {
	Command  string
	Services int
	Ended    float64 // the flushing command
	Targets  []string
	Attempts []attempt
	Log      []line
}

// An attempt is one connection that a client began.
type attempt struct {
	At     float64
	Target int // an index of Targets
	OK     bool
}

// A line is one of canaryd's log lines.
type line struct {
	At   float64
	Text string // message and fields
}

const (
	services = 100
	before   = 30 * time.Millisecond  // of connections before the flush
	after    = 500 * time.Millisecond // of connections after it
	apart    = 8 * time.Millisecond   // between two connections to the same target
	patience = 15 * time.Millisecond  // of one connection; pods answer within one
)

// recordHere records a flush in this process's namespaces, and prints the recording as JSON.
func recordHere(ctx context.Context, program string) error {
	if err := netns.Setup(); err != nil {
		return err
	}
	c, err := cluster.New(ctx, services)
	if err != nil {
		return err
	}
	serving, done := context.WithCancel(ctx)
	wait, err := c.Serve(serving)
	if err != nil {
		done()
		return err
	}
	defer wait()
	defer done()
	text, err := c.Rules()
	if err != nil {
		return err
	}
	programs := scenario.Programs{With: iptables.NFT}
	if err := programs.RestoreNoflush(ctx, rules.IPv4, text); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/run", "picture") // it ends with the namespace
	if err != nil {
		return err
	}
	process, err := canaryd.Start(exec.CommandContext(ctx, program, canaryd.Flags(iptables.NFT, dir)...), dir+"/log")
	if err != nil {
		return err
	}
	if err := ready(ctx, process); err != nil {
		return err
	}
	r, start, err := flush(ctx, c, programs)
	if err == nil {
		err = process.Stop(10 * time.Second)
	}
	if err != nil {
		return fmt.Errorf("%w\n%s", err, process.Tail())
	}
	r.Log = logLines(process.Log(), start)
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", " ")
	return out.Encode(r)
}

// ready waits until canaryd has guarded everything for two seconds.
func ready(ctx context.Context, p *canaryd.Process) error {
	for deadline := time.Now().Add(30 * time.Second); ; {
		_, err := canaryd.Get(ctx, "/readyz")
		if err == nil {
			time.Sleep(2 * time.Second)
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("canaryd is not ready: %w\n%s", err, p.Tail())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// flush flushes while clients connect, and returns their view and the time of the flush.
func flush(ctx context.Context, c *cluster.Cluster, programs scenario.Programs) (recording, time.Time, error) {
	r := recording{Command: "nft flush ruleset", Services: services}
	var targets []netip.AddrPort
	add := func(name string, at netip.AddrPort) {
		r.Targets, targets = append(r.Targets, name), append(targets, at)
	}
	for i := range 4 {
		add(fmt.Sprintf("service %d", i+1), cluster.Service(i))
	}
	for i := range cluster.NodePorts {
		add(fmt.Sprintf("node port %d", i+1), cluster.NodePort(i))
	}
	for i := range cluster.HostPorts {
		add(fmt.Sprintf("host port %d", i+1), cluster.HostPort(i))
	}
	for _, at := range targets { // the first packets wait for hardware addresses
		if err := c.In(cluster.Client, func() error { answers(at); return nil }); err != nil {
			return r, time.Time{}, err
		}
	}
	var mu sync.Mutex
	var asking sync.WaitGroup
	var failed []error
	begin := time.Now()
	start := begin.Add(before)
	for i, at := range targets {
		for n := range int((before + after) / apart) {
			due := begin.Add(time.Duration(n)*apart + time.Duration(i)*apart/time.Duration(len(targets)))
			asking.Go(func() {
				time.Sleep(time.Until(due))
				var began time.Time
				ok := false
				err := c.In(cluster.Client, func() error {
					began = time.Now()
					ok = answers(at)
					return nil
				})
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					failed = append(failed, err)
				}
				r.Attempts = append(r.Attempts, attempt{milliseconds(began.Sub(start)), i, ok})
			})
		}
	}
	time.Sleep(time.Until(start))
	began := time.Now()
	err := programs.FlushRuleset(ctx)
	r.Ended = milliseconds(time.Since(began))
	asking.Wait()
	shift := milliseconds(began.Sub(start))
	for i := range r.Attempts {
		r.Attempts[i].At = round(r.Attempts[i].At - shift)
	}
	slices.SortFunc(r.Attempts, func(a, b attempt) int { return int(10 * (a.At - b.At)) })
	return r, began, errors.Join(append(failed, err)...)
}

// answers reports whether a pod answers a new connection in time.
func answers(at netip.AddrPort) bool {
	deadline := time.Now().Add(patience)
	conn, err := (&net.Dialer{Deadline: deadline}).Dial("tcp4", at.String())
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.(*net.TCPConn).SetLinger(0) // if that fails, the connection just ends later
	_ = conn.SetDeadline(deadline)       // after an error, the pod answers or the connection ends
	_, err = conn.Read(make([]byte, 16))
	return err == nil
}

// header matches a klog line: the time of day, and its message with the fields after it.
var header = regexp.MustCompile(`(?m)^[IWE]\d{4} (\d\d:\d\d:\d\d\.\d{6}) .*?\] (.*)$`)

// logLines returns canaryd's log lines after start.
func logLines(text string, start time.Time) []line {
	var lines []line
	for _, found := range header.FindAllStringSubmatch(text, -1) {
		at, err := time.ParseInLocation("15:04:05.000000", found[1], time.Local)
		if err != nil {
			continue // the pattern has digits at the layout's places
		}
		at = time.Date(start.Year(), start.Month(), start.Day(), at.Hour(), at.Minute(), at.Second(), at.Nanosecond(), time.Local)
		if since := at.Sub(start); since >= 0 && since < after {
			lines = append(lines, line{milliseconds(since), found[2]})
		}
	}
	return lines
}

func milliseconds(d time.Duration) float64 { return round(float64(d.Microseconds()) / 1000) }

// round keeps tenths.
func round(ms float64) float64 { return float64(int(ms*10+1000)-1000) / 10 }
