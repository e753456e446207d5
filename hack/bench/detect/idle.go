package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Idle is canaryd's cost while nothing happens.
type Idle struct {
	Seconds    float64 `json:"seconds"`
	CPUPercent float64 `json:"cpuPercent"` // of one core
	Memory
	// ChildFaults are the page faults of children that ended meanwhile. Each program has some,
	// so 0 means that none was executed.
	ChildFaults int64 `json:"childFaults"`

	// These are strace's counts, from a separate period, because strace takes CPU time. Traced
	// is 0 if strace is not installed.
	Traced             float64 `json:"tracedSeconds"`
	SyscallsPerMinute  float64 `json:"syscallsPerMinute"`
	ProcessesPerMinute float64 `json:"processesPerMinute"`
	// Commonest are the system calls, the most frequent first.
	Commonest []Syscall `json:"commonest"`
}

// Memory is the memory of a process, in MiB.
type Memory struct {
	RSS  float64 `json:"residentMiB"`
	Anon float64 `json:"residentAnonymousMiB"` // RSS without the program's file
	Peak float64 `json:"peakMiB"`              // the highest RSS so far
}

// A Syscall is the rate of a system call.
type Syscall struct {
	Name      string  `json:"name"`
	PerMinute float64 `json:"perMinute"`
}

// idle measures the daemon for that long, and again for the same time with strace.
func (n *node) idle(ctx context.Context, long time.Duration) (Idle, error) {
	var i Idle
	faults, err := childFaults(n.PID())
	if err != nil {
		return i, err
	}
	before, err := cpuOf(n.PID())
	if err != nil {
		return i, err
	}
	start := time.Now()
	if err := pause(ctx, long); err != nil {
		return i, err
	}
	after, err := cpuOf(n.PID())
	took := time.Since(start)
	if err != nil {
		return i, err
	}
	i.Seconds, i.CPUPercent = took.Seconds(), 100*(after-before).Seconds()/took.Seconds()
	faultsAfter, err := childFaults(n.PID())
	if err != nil {
		return i, err
	}
	i.ChildFaults = faultsAfter - faults
	if i.Memory, err = memory(n.PID()); err != nil {
		return i, err
	}
	return i, n.trace(ctx, long, &i)
}

// trace counts system calls with strace.
func (n *node) trace(ctx context.Context, long time.Duration, i *Idle) error {
	out := filepath.Join(n.dir, "strace")
	cmd := exec.CommandContext(ctx, "strace", "-f", "-c", "-U", "name,calls", "-o", out, "-p", strconv.Itoa(n.PID()))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); errors.Is(err, exec.ErrNotFound) {
		return nil
	} else if err != nil {
		return err
	}
	start := time.Now()
	waited := pause(ctx, long)
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		return errors.Join(err, waited)
	}
	_ = cmd.Wait() // strace ends with the signal's status
	took := time.Since(start).Seconds()
	text, err := os.ReadFile(out)
	if err != nil {
		return fmt.Errorf("strace: %w: %s", errors.Join(err, waited), &stderr)
	}
	counts, err := parseCounts(text)
	if err != nil {
		return fmt.Errorf("%w; strace said: %s", err, &stderr)
	}
	i.Traced = took
	for name, count := range counts {
		rate := float64(count) * 60 / took
		i.SyscallsPerMinute += rate
		i.Commonest = append(i.Commonest, Syscall{name, rate})
		// Each process that canaryd starts executes a program at once. clone3 alone may start a
		// thread.
		if name == "execve" || name == "execveat" {
			i.ProcessesPerMinute += rate
		}
	}
	slices.SortFunc(i.Commonest, func(a, b Syscall) int {
		if a.PerMinute != b.PerMinute {
			return int(b.PerMinute*1000 - a.PerMinute*1000)
		}
		return strings.Compare(a.Name, b.Name)
	})
	return waited
}

// parseCounts reads strace's table of names and calls:
//
//	syscall          calls
//	---------------- ---------
//	futex                   95
//	---------------- ---------
//	total                  121
func parseCounts(text []byte) (map[string]int, error) {
	counts, sum, total := map[string]int{}, 0, -1
	for scan := bufio.NewScanner(bytes.NewReader(text)); scan.Scan(); {
		words := strings.Fields(scan.Text())
		if len(words) != 2 {
			continue
		}
		calls, err := strconv.Atoi(words[1])
		switch {
		case err != nil:
		case words[0] == "total":
			total = calls
		default:
			counts[words[0]] = calls
			sum += calls
		}
	}
	if total != sum {
		return nil, fmt.Errorf("cannot read strace's table: the calls are %d, and the total is %d:\n%s", sum, total, text)
	}
	return counts, nil
}

// childFaults returns cminflt of /proc/PID/stat; see proc(5). The command's name is in brackets
// and may contain any character.
func childFaults(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const cminflt = 11 - 3 // counted from 1, and state is the third
	if len(fields) <= cminflt {
		return 0, fmt.Errorf("/proc/%d/stat reads %q", pid, text)
	}
	return strconv.ParseInt(fields[cminflt], 10, 64)
}

// memory reads /proc/PID/status.
func memory(pid int) (m Memory, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for _, want := range []struct {
		name string
		to   *float64
	}{{"VmRSS:", &m.RSS}, {"RssAnon:", &m.Anon}, {"VmHWM:", &m.Peak}} {
		_, rest, _ := strings.Cut(string(text), "\n"+want.name)
		var kib float64
		if _, err := fmt.Sscan(rest, &kib); err != nil {
			return m, fmt.Errorf("/proc/%d/status: %s %w", pid, want.name, err)
		}
		*want.to = kib / 1024
	}
	return m, nil
}
