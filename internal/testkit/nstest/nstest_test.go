package nstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/netns"
)

func TestRunIsInside(t *testing.T) {
	outside := namespaces(t)
	// The outside's numbers reach the child through a file, because code before Run is executed
	// again inside.
	handOver := filepath.Join(os.TempDir(), "canaryd-nstest-"+t.Name())
	if !us.inside {
		write(t, handOver, strings.Join(outside, "\n"))
		t.Cleanup(func() { os.Remove(handOver) })
	}
	Run(t, func(t *testing.T) {
		NeedProgram(t, "iptables-legacy", "iptables-nft")
		text, err := os.ReadFile(handOver)
		if err != nil {
			t.Fatal(err)
		}
		for i, before := range strings.Split(string(text), "\n") {
			if now := namespaces(t)[i]; now == before {
				t.Errorf("still in the outside's namespace %s", now)
			}
		}
		if entries, err := os.ReadDir("/run"); err != nil || len(entries) != 0 {
			t.Errorf("/run holds %v, %v; want nothing", entries, err)
		}
		if got := Command(t, "cat", "/proc/net/ip_tables_names"); got != "" {
			t.Errorf("a new namespace has the legacy tables %q", got)
		}
		Command(t, "iptables-legacy", "-w", "5", "-A", "INPUT", "-j", "ACCEPT")
		if got := Command(t, "cat", "/proc/net/ip_tables_names"); got != "filter\n" {
			t.Errorf("the legacy tables are %q, want filter", got)
		}
		if got := Command(t, "iptables-nft", "-w", "5", "-S", "INPUT"); got != "-P INPUT ACCEPT\n" {
			t.Errorf("a new namespace has the rules %q", got)
		}
		if _, err := os.Stat("/run/xtables.lock"); err != nil {
			t.Error(err)
		}
		if got := Command(t, "cat", "/sys/class/net/lo/flags", "/proc/net/dev"); !strings.Contains(got, "lo:") {
			t.Errorf("no loopback interface: %q", got)
		}
		if _, inherited := os.LookupEnv(marker); inherited {
			t.Errorf("%s is passed on to the programs that the test runs", marker)
		}
	})
	if !us.inside {
		for i, now := range namespaces(t) {
			if now != outside[i] {
				t.Errorf("the parent moved from namespace %s to %s", outside[i], now)
			}
		}
	}
}

func TestRunSubtests(t *testing.T) {
	for _, name := range []string{"plain", "with space", "a/b", "meta.(*)", "plain"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ran := 0
			Run(t, func(t *testing.T) {
				t.Run("inner", func(t *testing.T) {
					Run(t, func(*testing.T) { ran++ })
				})
				if ran != 1 {
					t.Errorf("the inner body ran %d times, want once", ran)
				}
				// One namespace for each: only this test's file is here.
				write(t, "/run/"+filepath.Base(t.Name()), "")
				if entries, err := os.ReadDir("/run"); err != nil || len(entries) != 1 {
					t.Errorf("/run holds %v, %v; want one file", entries, err)
				}
			})
		})
	}
}

// helper names the environment variable that enables the tests called TestHelper..., which
// TestOutcomes runs and which do nothing otherwise.
const helper = "CANARYD_NSTEST_HELPER"

func TestHelperSkips(t *testing.T) {
	if os.Getenv(helper) != "" {
		Run(t, func(t *testing.T) { t.Skip("no moon tonight") })
	}
}

func TestHelperFails(t *testing.T) {
	if os.Getenv(helper) != "" {
		Run(t, func(t *testing.T) { t.Error("the moon fell down") })
	}
}

func TestHelperDies(t *testing.T) {
	if os.Getenv(helper) != "" {
		Run(t, func(*testing.T) { os.Exit(0) })
	}
}

func TestHelperRunsNothing(t *testing.T) {
	if os.Getenv(helper) != "" && !us.inside {
		Run(t, func(*testing.T) {})
	}
}

func TestHelperPasses(t *testing.T) {
	if os.Getenv(helper) != "" {
		Run(t, func(*testing.T) {})
	}
}

func TestHelperLacksProgram(t *testing.T) {
	if os.Getenv(helper) != "" {
		NeedProgram(t, "no-such-program")
	}
}

func TestHelperLacksFile(t *testing.T) {
	if os.Getenv(helper) != "" {
		NeedFile(t, "/no/such/file")
	}
}

func TestHelperIsLarge(t *testing.T) {
	if os.Getenv(helper) != "" {
		Run(t, func(t *testing.T) {
			testkit.Large(t, "5,000 services")
			t.Logf("size %d", testkit.Size(1, 5000))
		})
	}
}

func TestHelperIsElsewhere(t *testing.T) {
	if os.Getenv(helper) != "" {
		NeedFile(t, "/usr/lib/cni/no-such-plugin")
	}
}

func TestOutcomes(t *testing.T) {
	// Without a PATH there is no program with which to try namespaces.
	const nowhere = "PATH=/nonexistent"
	for _, c := range []struct {
		test string
		env  []string
		want []string
	}{
		{"TestHelperPasses", nil, []string{"--- PASS: TestHelperPasses"}},
		{"TestHelperSkips", nil, []string{"--- SKIP: TestHelperSkips", "no moon tonight"}},
		{"TestHelperFails", nil, []string{"--- FAIL: TestHelperFails", "the moon fell down"}},
		{"TestHelperDies", nil, []string{"--- FAIL: TestHelperDies"}},
		{"TestHelperRunsNothing", nil, []string{"--- FAIL: TestHelperRunsNothing", "ran no test to its end"}},
		{"TestHelperPasses", []string{"CI=", nowhere}, []string{"--- SKIP: TestHelperPasses", "SKIPPED: needs root or user namespaces"}},
		{"TestHelperPasses", []string{"CI=true", nowhere}, []string{"--- FAIL: TestHelperPasses", "CI=true forbids to skip"}},
		{"TestHelperLacksProgram", []string{"CI="}, []string{"--- SKIP: TestHelperLacksProgram", "needs no-such-program"}},
		{"TestHelperLacksProgram", []string{"CI=true"}, []string{"--- FAIL: TestHelperLacksProgram", "needs no-such-program"}},
		{"TestHelperLacksFile", []string{"CI="}, []string{"--- SKIP: TestHelperLacksFile", "needs /no/such/file"}},
		{"TestHelperLacksFile", []string{"CI=true"}, []string{"--- FAIL: TestHelperLacksFile", "needs /no/such/file"}},
		{"TestHelperIsLarge", []string{"CI=true", "CANARYD_TEST_LARGE="}, []string{"--- SKIP: TestHelperIsLarge", "left to make test-large: 5,000 services"}},
		{"TestHelperIsLarge", []string{"CI=true", "CANARYD_TEST_LARGE=1"}, []string{"--- PASS: TestHelperIsLarge", "size 5000"}},
		{"TestHelperIsElsewhere", []string{"CI=true", "CANARYD_TEST_LEAVE=1"}, []string{"--- SKIP: TestHelperIsElsewhere", "left to make test-programs: it needs /usr/lib/cni"}},
		{"TestHelperIsElsewhere", []string{"CI=true", "CANARYD_TEST_LEAVE="}, []string{"--- FAIL: TestHelperIsElsewhere", "needs /usr/lib/cni/no-such-plugin"}},
	} {
		t.Run(c.test+strings.Join(c.env, ","), func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^"+c.test+"$")
			cmd.Env = append(append(os.Environ(), helper+"=1", "GORACE=atexit_sleep_ms=0"), c.env...)
			// Its exit code agrees with its output; only the output shows a skip.
			output, _ := cmd.CombinedOutput()
			for _, want := range c.want {
				if !strings.Contains(string(output), want) {
					t.Errorf("the output lacks %q:\n%s", want, output)
				}
			}
		})
	}
}

func TestPattern(t *testing.T) {
	if got, want := pattern("TestA/b.c#01"), `^TestA$/^b\.c#01$`; got != want {
		t.Errorf("pattern is %q, want %q", got, want)
	}
}

func TestNeedRoot(t *testing.T) {
	Run(t, func(t *testing.T) {
		if netns.Root() {
			NeedRoot(t)
		}
	})
}

func namespaces(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, kind := range []string{"net", "mnt"} {
		link, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, link)
	}
	return all
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
