// Package kernels tests canaryd on other kernels: those of four Debian releases, each with the
// iptables and nft of its release, in emulated machines. This package's test binary is such a
// machine's first process. The tests of stories_test.go run there, and the tests here judge
// their results. Times in an emulated machine mean nothing.
package kernels

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/outcome"
	"github.com/canaryd/canaryd/internal/testkit/versions"
)

// A kernel is a kernel under test.
type kernel struct{ versions.Kernel }

// only is the environment variable with the wanted kernels, separated by blanks; empty: all.
const only = "CANARYD_TEST_KERNELS"

// wanted reports whether the kernel is to be tried.
func (k kernel) wanted() bool {
	chosen := strings.Fields(os.Getenv(only))
	return len(chosen) == 0 || slices.Contains(chosen, k.String())
}

// stories returns the tests that run on the kernel.
func (k kernel) stories() []string {
	if k.Arch == "amd64" { // such a kernel also runs programs of 386
		return append([]string{"TestOf386/nft"}, stories...)
	}
	return stories
}

// stories are the tests that run on each kernel, and the rows of the table.
var stories = []string{"TestDetect/nft", "TestDetect/legacy", "TestFlushes/nft", "TestFlushes/legacy", "TestRestart/nft", "TestRestart/legacy", "TestNative/flushes", "TestNative/restart", "TestStandby/nft"}

func TestMain(m *testing.M) {
	if isFirstProcess() {
		os.Exit(runMachine(m))
	}
	os.Exit(nodetest.Main(m))
}

// TestKernels runs the stories on each kernel. An emulated machine has one processor, so as
// many run at a time as this machine has processors.
func TestKernels(t *testing.T) {
	var mu sync.Mutex
	var lines []string
	t.Cleanup(func() {
		slices.Sort(lines)
		t.Logf("verdicts, and the time of each machine:\n%s", strings.Join(lines, ""))
	})
	built := t.TempDir()
	for _, name := range strings.Fields(os.Getenv(only)) {
		if !slices.ContainsFunc(versions.Kernels, func(k versions.Kernel) bool { return k.String() == name }) {
			t.Errorf("%s names %s, which is no kernel of versions.Kernels", only, name)
		}
	}
	for _, of := range versions.Kernels {
		k := kernel{of}
		if !k.wanted() {
			continue
		}
		t.Run(k.String(), func(t *testing.T) {
			nstest.NeedFile(t, k.file(".unpacked"), k.userland(".unpacked"))
			nstest.NeedProgram(t, k.qemu())
			m := assemble(t, k, built)
			t.Parallel()
			started := time.Now()
			text := m.run(t)
			k.judge(t, text)
			k.judgeItself(t, said(text))
			mu.Lock()
			defer mu.Unlock()
			lines = append(lines, fmt.Sprintf("%-16s %s, %s\n", k, said(text), time.Since(started).Round(time.Second)))
		})
	}
}

// judge requires each story to have passed, and no other test to have run.
func (k kernel) judge(t *testing.T, text string) {
	t.Helper()
	var passed []string
	for _, o := range outcome.Of(text, true) {
		if o.Result == "PASS" {
			passed = append(passed, o.Name)
		} else {
			t.Errorf("%s: %s\n%s", o.Name, o.Result, o.Output)
		}
	}
	for _, story := range k.stories() {
		if !slices.Contains(passed, story) {
			t.Errorf("%s did not pass", story)
		}
	}
	if !strings.Contains(text, "\n"+lastWords+"\n") || t.Failed() {
		t.Errorf("the machine's end was not reached, or a test failed; it printed\n%s", text)
	}
}

// judgeItself requires the machine to have the kernel and the programs of docs/measured.md.
func (k kernel) judgeItself(t *testing.T, words string) {
	t.Helper()
	i := slices.IndexFunc(versions.Suites, func(s versions.Suite) bool { return s.Name == k.Suite })
	if !strings.HasPrefix(words, "Linux "+k.Release) || !strings.Contains(words, ", "+versions.Suites[i].Programs()) {
		t.Errorf("the machine is %q, want Linux %s and %s", words, k.Release, versions.Suites[i].Programs())
	}
}

// said returns the line in which the machine names its kernel and programs.
func said(text string) string {
	for line := range strings.Lines(text) {
		if words, ok := strings.CutPrefix(strings.TrimSpace(line), introduction); ok {
			return words
		}
	}
	return "it did not say which kernel it runs"
}

// file returns the path of a kernel's file from hack/kernels.sh.
func (k kernel) file(name string) string {
	return filepath.Join("/var/cache/canaryd-test/kernels", k.String(), name)
}

// userland returns the path of a file of the suite's programs from hack/userlands.sh.
func (k kernel) userland(name string) string {
	folder := "userlands"
	if k.Arch != "amd64" {
		folder += "-" + k.Arch
	}
	return filepath.Join("/var/cache/canaryd-test", folder, k.Suite, name)
}
