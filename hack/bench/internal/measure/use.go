// Package measure measures the time, processor time and memory of a program, of this process or of
// a running process, and summarizes several measurements.
package measure

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Use is the resources that some work used.
type Use struct {
	Seconds       float64 `json:"seconds"`                 // wall time
	UserSeconds   float64 `json:"userSeconds,omitempty"`   // of all processors, children included
	SystemSeconds float64 `json:"systemSeconds,omitempty"` // the same, in the kernel
	// MiB is the resident memory, if it was measured; for a program, its peak. That is at least
	// the peak of the process that started the program, because Linux keeps it across exec.
	MiB float64 `json:"mebibytes,omitempty"`
}

// Program runs a program to its end. input is the path of its standard input, "" for none.
func Program(ctx context.Context, input, name string, args ...string) (Use, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if input != "" {
		file, err := os.Open(input)
		if err != nil {
			return Use{}, err
		}
		defer func() { _ = file.Close() }() // nothing was written to it
		cmd.Stdin = file
	}
	start := time.Now()
	err := cmd.Run()
	took := time.Since(start)
	if err != nil {
		return Use{}, fmt.Errorf("%s %s: %w: %.2000s", name, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	use := Use{Seconds: took.Seconds(), UserSeconds: cmd.ProcessState.UserTime().Seconds(), SystemSeconds: cmd.ProcessState.SystemTime().Seconds()}
	if usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage); ok {
		use.MiB = float64(usage.Maxrss) / 1024 // KiB on Linux, getrusage(2)
	}
	return use, nil
}

// Work runs work in this process. Other goroutines, and children that end meanwhile, count,
// too. MiB is the peak of this process alone.
func Work(work func() error) (Use, error) {
	if err := ForgetPeak(os.Getpid()); err != nil {
		return Use{}, err
	}
	user, system := ownTimes()
	start := time.Now()
	if err := work(); err != nil {
		return Use{}, err
	}
	took := time.Since(start)
	user2, system2 := ownTimes()
	_, peak, err := Memory(os.Getpid())
	return Use{Seconds: took.Seconds(), UserSeconds: user2 - user, SystemSeconds: system2 - system, MiB: peak}, err
}

// ForgetPeak sets the peak to the present resident memory (proc_pid_clear_refs(5)).
func ForgetPeak(pid int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
}

func ownTimes() (user, system float64) {
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var usage unix.Rusage
		if err := unix.Getrusage(who, &usage); err == nil { // it fails only for a bad who
			user += time.Duration(usage.Utime.Nano()).Seconds()
			system += time.Duration(usage.Stime.Nano()).Seconds()
		}
	}
	return user, system
}

// tick is the unit of times in /proc/PID/stat: USER_HZ is 100 on each architecture of Go.
const tick = 0.01

// Times returns the processor times that a running process, and its ended children, have used
// so far (proc_pid_stat(5)), in steps of 10 ms.
func Times(pid int) (user, system float64, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The program's name may contain any character. Field 3 is the first after its bracket.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 15 {
		return 0, 0, fmt.Errorf("/proc/%d/stat holds %q", pid, stat)
	}
	var times [4]float64 // utime, stime, cutime, cstime: fields 14 to 17
	for i := range times {
		n, err := strconv.ParseUint(fields[11+i], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		times[i] = float64(n) * tick
	}
	return times[0] + times[2], times[1] + times[3], nil
}

// Memory returns the resident memory of a process, and its peak, in MiB (proc_pid_status(5)).
func Memory(pid int) (resident, peak float64, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "VmRSS" && name != "VmHWM" {
			continue
		}
		kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			return 0, 0, fmt.Errorf("/proc/%d/status: %w", pid, err)
		}
		if name == "VmRSS" {
			resident = kib / 1024
		} else {
			peak = kib / 1024
		}
	}
	if resident == 0 || peak == 0 {
		return 0, 0, fmt.Errorf("/proc/%d/status lacks VmRSS or VmHWM", pid)
	}
	return resident, peak, nil
}
