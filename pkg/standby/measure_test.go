//go:build measure

package standby_test

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/standby"
)

// natOf returns the nat table that kube-proxy wrote for count services.
func natOf(t *testing.T, count int) string {
	t.Helper()
	return testkit.Unpacked(t, fmt.Sprintf("../../hack/bench/heal/testdata/services-%d.rules.gz", count))
}

// kernelMemory returns the machine's kernel memory of the kinds that rules use, in KiB.
func kernelMemory(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/meminfo")
	must(t, err)
	total := 0
	for line := range strings.Lines(string(text)) {
		var kb int
		for _, name := range []string{"SUnreclaim:", "Percpu:", "VmallocUsed:"} {
			if rest, found := strings.CutPrefix(line, name); found {
				_, _ = fmt.Sscan(rest, &kb)
				total += kb
			}
		}
	}
	return total
}

// TestMeasureStandby prints the time of each operation at each size, with a gate and without: the
// median and the worst of several.
func TestMeasureStandby(t *testing.T) {
	for _, size := range []int{100, 1000, 5000} {
		for _, mode := range []string{"gate", "added"} {
			t.Run(fmt.Sprintf("%d services, %s", size, mode), func(t *testing.T) {
				nstest.Run(t, func(t *testing.T) { measure(t, size, mode) })
			})
		}
	}
}

// TestMeasureNative prints the same for kube-proxy's native table.
func TestMeasureNative(t *testing.T) {
	for _, size := range []int{100, 1000} {
		t.Run(fmt.Sprintf("%d services", size), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				text := testkit.Unpacked(t, fmt.Sprintf("../../hack/bench/heal/testdata/services-%d.nft.gz", size))
				nstest.CommandInput(t, text, "nft", "-f", "-")
				table := captured(t, dial(t), kubeProxy)
				c, err := standby.TranslateNative(table, nil)
				must(t, err)
				s := open(t, standby.Config{})
				runtime.LockOSThread()
				before := processor(t)
				must(t, s.Put(c))
				t.Logf("%d services: built in %s of the kernel, %s of a processor", size, s.Status(kubeProxy).Took, processor(t)-before)
				for range 10 {
					start, before := time.Now(), processor(t)
					must(t, s.Open(kubeProxy, c.Hooks(), nil))
					t.Logf("  opened in %s, %s of a processor", time.Since(start), processor(t)-before)
					must(t, s.Shut(kubeProxy))
				}
			})
		})
	}
}

func measure(t *testing.T, size int, mode string) {
	restore(t, nat.Family, natOf(t, size))
	conn := dial(t)
	most := 1 << 30
	if mode == "added" {
		most = -1
	}
	times := map[string][]time.Duration{}
	runtime.LockOSThread()
	timed := func(what string, f func()) {
		start, before := time.Now(), processor(t)
		f()
		times[what] = append(times[what], time.Since(start))
		times[what+", processor"] = append(times[what+", processor"], processor(t)-before)
	}
	var src standby.Source
	timed("dump", func() { src = source(t, conn, nat) })
	const rounds = 3
	var kib []int
	var s *standby.Standby
	var c *standby.Copy
	for round := range rounds {
		s = open(t, standby.Config{GateMost: most})
		timed("translate", func() { c = translate(t, src, nil) })
		before := kernelMemory(t)
		timed("build", func() { must(t, s.Put(c)) })
		times["build, kernel"] = append(times["build, kernel"], s.Status(nat).Took)
		kib = append(kib, kernelMemory(t)-before)
		if round < rounds-1 {
			timed("close", func() { must(t, s.Close()) })
			testkit.Pass(t, 200*time.Millisecond, "that the kernel frees the closed copy")
		}
	}
	c = nil
	st := s.Status(nat)
	for range 20 {
		timed("open", func() { must(t, s.Open(nat, s.Held(nat).Hooks(), nil)) })
		timed("shut", func() { must(t, s.Shut(nat)) })
	}
	edit(t, s, conn, timed)
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	t.Logf("%d services, %s: %d chains, %d left out; kernel memory %v KiB; heap with the source %d KiB", size, mode, st.Chains, st.LeftOut, kib, m.HeapAlloc>>10)
	for _, what := range slices.Sorted(maps.Keys(times)) {
		all := slices.Sorted(slices.Values(times[what]))
		t.Logf("  %-32s median %9.3f ms, worst %9.3f ms", what, all[len(all)/2].Seconds()*1e3, all[len(all)-1].Seconds()*1e3)
	}
}

// processor returns the processor time of this thread, with the kernel's part. On a busy machine it
// says more than the clock.
func processor(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	must(t, unix.Getrusage(unix.RUSAGE_THREAD, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// edit changes one service again and again, as kube-proxy does with a new endpoint, and the copy
// follows.
func edit(t *testing.T, s *standby.Standby, conn *nft.Conn, timed func(string, func())) {
	t.Helper()
	src := source(t, conn, nat)
	service := ""
	chains := src.Chains.(nft.ChainMap)
	for name := range chains {
		if strings.HasPrefix(name, "KUBE-SVC-") && (service == "" || name < service) {
			service = name
		}
	}
	for name, c := range chains { // as a mirror has them
		c.Version = 1
		chains[name] = c
	}
	must(t, s.Put(translate(t, src, s.Held(nat))))
	held := chains[service]
	services := chains["KUBE-SERVICES"]
	for round := range 10 {
		next := held
		next.Version = uint64(round + 2)
		if round%2 == 0 {
			next.Rules = slices.Values(slices.Collect(held.Rules)[1:])
		}
		chains[service] = next
		moved := services
		moved.Version = uint64(round + 2)
		all := slices.Collect(services.Rules)
		some := len(all) / 3
		moved.Rules = slices.Values(slices.Concat(all[some:len(all)-1], all[:some], all[len(all)-1:]))
		chains["KUBE-SERVICES"] = moved
		var c *standby.Copy
		timed("retranslate", func() { c = translate(t, src, s.Held(nat)) })
		if n := c.Outstanding(s.Held(nat)); n < 1 || n > 4 { // the service, and endpoints that only it has
			t.Fatalf("%d chains are outstanding", n)
		}
		if round < 7 {
			timed("follow a service", func() { must(t, s.Put(c)) })
			continue
		}
		timed("open with a service", func() { must(t, s.Open(nat, c.Hooks(), c)) })
		must(t, s.Shut(nat))
	}
}
