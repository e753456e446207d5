//go:build measure

package native_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
)

// TestMeasureReplay prints the time of a replay, and of "nft -f" with the same text, as medians of
// five. NATIVE_TEXT names a file such as ../../hack/bench/heal/testdata/services-100.nft.gz.
func TestMeasureReplay(t *testing.T) {
	path := os.Getenv("NATIVE_TEXT")
	if path == "" {
		path = services100
	}
	text := services(t, path)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		file := filepath.Join(t.TempDir(), "text.nft")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		nstest.Command(t, "nft", "-f", file)
		conn := dial(t)
		runtime.LockOSThread()
		var reads, builds, kernel, kernelCPU, program, programCPU []time.Duration
		timed := func(all *[]time.Duration, f func()) {
			start := time.Now()
			f()
			*all = append(*all, time.Since(start))
		}
		flush := func() {
			nstest.Command(t, "nft", "flush", "ruleset")
			testkit.Pass(t, time.Second, "that the kernel frees the deleted objects")
		}
		for range 5 {
			var was *native.Ruleset
			timed(&reads, func() { was = capture(t, conn) })
			flush()
			genid, err := conn.Genid()
			if err != nil {
				t.Fatal(err)
			}
			timed(&builds, func() { build(t, was, genid) })
			b := build(t, was, genid)
			before := processor(t)
			if err := b.Send(); err != nil {
				t.Fatal(err)
			}
			kernel, kernelCPU = append(kernel, b.Took), append(kernelCPU, processor(t)-before)
			flush()
			nft := exec.Command("nft", "-f", file)
			timed(&program, func() {
				if err := nft.Run(); err != nil {
					t.Fatal(err)
				}
			})
			programCPU = append(programCPU, nft.ProcessState.SystemTime()+nft.ProcessState.UserTime())
		}
		for _, all := range [][]time.Duration{reads, builds, kernel, kernelCPU, program, programCPU} {
			slices.Sort(all)
		}
		t.Logf("MEASURE capture %v, build %v, replay %v (%v to %v; processor %v), nft -f %v (processor %v)",
			reads[2], builds[2], kernel[2], kernel[0], kernel[4], kernelCPU[2], program[2], programCPU[2])
	})
}

// processor returns the processor time of this thread.
func processor(t *testing.T) time.Duration {
	t.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Stime.Nano() + usage.Utime.Nano())
}
