package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The modes of kube-proxy.
const (
	inIPTables = "iptables"
	inNFTables = "nftables"
)

// both is -standby for off and on in turns, so that changes on the machine affect both alike.
const both = "both"

// restFor is how long canaryd is measured at rest.
const restFor = 5 * time.Second

// each returns a plan for each size and mode.
func (p plan) each(sizes, modes string) (all []plan, err error) {
	for size := range strings.SplitSeq(cmp.Or(sizes, strconv.Itoa(p.Services)), ",") {
		if p.Services, err = strconv.Atoi(size); err != nil {
			return nil, fmt.Errorf("-sizes: %w", err)
		}
		for mode := range strings.SplitSeq(modes, ",") {
			if mode != inIPTables && (mode != inNFTables || !p.View) {
				return nil, fmt.Errorf("-modes: there is no mode %q without -view", mode)
			}
			p.Mode = mode
			all = append(all, p)
		}
	}
	return all, nil
}

// settings returns how many settings of --standby the plan tries.
func (p plan) settings() int {
	if p.Standby == both {
		return 2
	}
	return 1
}

// perDaemon returns the number of flushes after which canaryd is restarted. With both settings
// of --standby, each gets the same kinds of flushes, the same number of times.
func (p plan) perDaemon(kinds int) int {
	if p.Standby != both {
		return flushesPerDaemon
	}
	if rounds := flushesPerDaemon / kinds; rounds > 1 && p.FlushesPerKind%rounds == 0 {
		return rounds * kinds
	}
	return kinds
}

// turn chooses the setting of --standby of the next canaryd.
func (l *lab) turn() {
	if l.Standby != both {
		return
	}
	if l.standby == "off" {
		l.standby = "on"
	} else {
		l.standby = "off"
	}
}

// A cost is the cost of one canaryd while nothing happens.
type cost struct {
	Standby   string
	Ready     time.Duration // from the start until it has learned everything and the copy is armed
	Processor float64       // share of a core
	Resident  int           // KiB
	Kernel    int           // KiB of the kernel's memory since before the start
}

// startCanaryd starts canaryd and measures its cost at rest.
func (l *lab) startCanaryd(ctx context.Context) (*daemon, error) {
	before, start := kernelMemory(), time.Now()
	d, err := startDaemon(ctx, l)
	if err != nil || l.Standby != both {
		return d, err
	}
	c := cost{Standby: l.standby, Ready: time.Since(start) - steady, Kernel: kernelMemory() - before}
	used := d.processor()
	if err := sleep(ctx, restFor); err != nil {
		return d, err
	}
	c.Processor = (d.processor() - used).Seconds() / restFor.Seconds()
	c.Resident = kib("/proc/"+strconv.Itoa(d.PID())+"/status", "VmRSS:")
	l.costs = append(l.costs, c)
	return d, nil
}

// processor returns the processor time of canaryd itself, in steps of 10 ms: fields 14 and 15 of
// /proc/PID/stat, where USER_HZ is 100.
func (d *daemon) processor() time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.PID()))
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if err != nil || len(fields) < 13 {
		return 0
	}
	user, _ := strconv.Atoi(fields[11])
	kernel, _ := strconv.Atoi(fields[12])
	return time.Duration(user+kernel) * 10 * time.Millisecond
}

// kernelMemory returns the machine's kernel memory of the kinds that rules use, in KiB.
func kernelMemory() int {
	return kib("/proc/meminfo", "SUnreclaim:", "Percpu:", "VmallocUsed:")
}

// kib adds lines of a file that hold a name and a number of KiB; 0 without the file.
func kib(path string, names ...string) (total int) {
	text, _ := os.ReadFile(path)
	for line := range strings.Lines(string(text)) {
		for _, name := range names {
			if rest, found := strings.CutPrefix(line, name); found {
				var n int
				_, _ = fmt.Sscan(rest, &n)
				total += n
			}
		}
	}
	return total
}

// runNFT runs a script of nft.
func runNFT(ctx context.Context, script string) error {
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %.500s", err, out)
	}
	return nil
}

// standbyReport writes two tables in Markdown: the clients' view of flushes with the standby
// and without, and canaryd's cost at rest.
func standbyReport(w io.Writer, results []result) {
	row := func(format string, cells ...any) { fmt.Fprintf(w, "| "+format+" |\n", cells...) }
	head := func(names ...string) {
		fmt.Fprintf(w, "\n| %s |\n|%s\n", strings.Join(names, " | "), strings.Repeat("---|", len(names)))
	}
	head("mode", "services", "flush", "standby", "flushes", "resets", "longest stall", "never connected", "refused", "impatient failed",
		"longest gap", "behind the last command", "never healed", "wrong")
	for _, r := range results {
		byBoth := func(c cell) string { return c.Flush + " " + c.Standby }
		for _, c := range merge(r.View, byBoth, cell.withWay) {
			row("%s | %d | %s | %s | %d | %d of %d | %s | %d of %d | %d | %s | %s | %s | %d | %d", r.Mode, r.ServiceCount, c.Flush, c.Standby, c.Flushes,
				c.Resets, c.Established, medianAndWorst(c.Stalls), c.Never, c.Begun, c.Refused, share(c.Failed, c.Asked),
				medianAndWorst(c.Gaps), medianAndWorst(c.Afters), c.neverHealed(), c.Wrong)
		}
	}
	head("mode", "services", "standby", "starts", "ready after", "processor at rest", "resident", "kernel memory")
	for _, r := range results {
		for _, standby := range []string{"off", "on"} {
			var all []cost
			for _, c := range r.Costs {
				if c.Standby == standby {
					all = append(all, c)
				}
			}
			if len(all) > 0 {
				row("%s | %d | %s | %d | %s | %.2f %% | %.1f MiB | %.1f MiB", r.Mode, r.ServiceCount, standby, len(all),
					milliseconds(middle(all, func(c cost) time.Duration { return c.Ready })), 100*middle(all, func(c cost) float64 { return c.Processor }),
					float64(middle(all, func(c cost) int { return c.Resident }))/1024, float64(middle(all, func(c cost) int { return c.Kernel }))/1024)
			}
		}
	}
}

// middle returns the median of one figure.
func middle[T cmp.Ordered](all []cost, of func(cost) T) T {
	var list []T
	for _, c := range all {
		list = append(list, of(c))
	}
	slices.Sort(list)
	return list[len(list)/2]
}
