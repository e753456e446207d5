// Package measure tells what work costs: time, processor and memory of a
// program, of this process or of one that runs on, and medians of several
// such measurements.
package measure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Use is what some work took.
type Use struct {
	Seconds       float64 `json:"seconds"`                 // by the clock on the wall
	UserSeconds   float64 `json:"userSeconds,omitempty"`   // of all processors, children included
	SystemSeconds float64 `json:"systemSeconds,omitempty"` // the same, in the kernel
	// MiB is the memory that was resident, where it was looked at: of a
	// program its peak. A program that is started counts at least as much
	// as the process that starts it (Linux keeps the peak across exec).
	MiB float64 `json:"mebibytes,omitempty"`
}

// Program runs a program to its end; input is the path of its standard input,
// "" for none.
func Program(ctx context.Context, input, name string, args ...string) (Use, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if input != "" {
		file, err := os.Open(input)
		if err != nil {
			return Use{}, err
		}
		defer func() { _ = file.Close() }() // it was read from only
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

// Work does work in this process. What other goroutines and children that have
// ended used meanwhile counts too; MiB is the peak of the process itself.
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

// ForgetPeak makes what is resident now the peak (proc_pid_clear_refs(5)).
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

// tick is the unit of times in /proc/PID/stat: USER_HZ is 100 on every
// architecture that Go runs on.
const tick = 0.01

// Times returns what a process that runs on, and its children that have ended,
// have used so far (proc_pid_stat(5)), to a hundredth of a second.
func Times(pid int) (user, system float64, err error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The program's name may hold anything, so count behind its bracket: field 3 is the first.
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

// Memory returns how much of a process is resident, and the most that ever was,
// in MiB (proc_pid_status(5)).
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
		return 0, 0, errors.New("the kernel does not tell how much memory is resident")
	}
	return resident, peak, nil
}
