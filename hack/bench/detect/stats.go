package main

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A Spread describes many measurements of one value by their quantiles, in microseconds.
type Spread struct {
	N      int     `json:"n"`
	P10    float64 `json:"p10"`
	Median float64 `json:"median"`
	P90    float64 `json:"p90"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
}

func spread(all []time.Duration) Spread {
	if len(all) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(all))
	at := func(part float64) float64 {
		// This is the smallest value that is not below this part of all.
		i := int(part*float64(len(sorted)) + 0.999999)
		return microseconds(sorted[min(max(i, 1), len(sorted))-1])
	}
	return Spread{len(sorted), at(0.10), at(0.50), at(0.90), at(0.99), at(1)}
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// cpuOf returns the CPU time of all threads of a process, also ended ones, in nanoseconds;
// /proc/PID/stat counts in steps of 10 ms. It makes the clock's ID like clock_getcpuclockid(3).
// 0 is this process.
func cpuOf(pid int) (time.Duration, error) {
	const sched = 2 // CPUCLOCK_SCHED, in include/linux/posix-timers_types.h
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0, err
	}
	return time.Duration(t.Nano()), nil
}

// childrenCPU returns the CPU time of this process's children that have ended.
func childrenCPU() (time.Duration, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		return 0, err
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
