package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// program makes the tests' own binary the program, so that none is linked for each test.
const program = "CANARYD_SOAK_PROGRAM"

func TestMain(m *testing.M) {
	for _, part := range []string{program, nodeMarker, clientMarker, viewMarker} {
		if _, is := os.LookupEnv(part); is {
			_ = os.Unsetenv(program) // its nodes and clients have parts of their own
			main()
		}
	}
	os.Exit(nodetest.Main(m))
}

// TestSoak runs the program like make soak, for 20 s and with fewer connections. It checks no
// times. The program fails by itself for a wrong translation, or for rules that are not back.
func TestSoak(t *testing.T) {
	t.Parallel()
	for _, r := range soak(t, "", "-for=20s", "-rate=100") {
		if r.Flushes < 2 || r.Changes == 0 { // some 6 on an idle machine
			t.Errorf("%s: %d flushes and %d changes of services; that is few for any machine", r.Backend, r.Flushes, r.Changes)
		}
		if r.Services.Failed+r.HostPorts.Failed == 0 {
			t.Errorf("%s: no connection failed in %d flushes: they did nothing", r.Backend, r.Flushes)
		}
	}
}

// TestMonitor: the monitor, with which canaryd is compared, restores services after a flush
// that it notices, and never host ports. No other program repairs them before two polls are
// over.
func TestMonitor(t *testing.T) {
	t.Parallel()
	for _, r := range soak(t, "", "-healers=monitor", "-for=20s", "-services=10", "-rate=100", "-poll=2s", "-kinds=flush-delete-all,flush-nat") {
		if len(r.Services.Gaps) == 0 {
			t.Errorf("%s: the monitor never brought the services back", r.Backend)
		}
		if r.HostPorts.Open == 0 || len(r.HostPorts.Gaps) > 0 {
			t.Errorf("%s: host ports were healed %d times, and not %d times; the monitor never heals them", r.Backend, len(r.HostPorts.Gaps), r.HostPorts.Open)
		}
	}
}

// TestOldRulesAreFoundOut: the program fails if a healer brings back outdated rules of
// services.
func TestOldRulesAreFoundOut(t *testing.T) {
	t.Parallel()
	for _, r := range soak(t, "reached pods of other services", "-healers=stale", "-for=10s", "-services=4", "-rate=100", "-kinds=flush-nat") {
		if r.Wrong == 0 || r.err() == nil {
			t.Errorf("%s: no wrong translation was found", r.Backend)
		}
	}
}

// soak runs the program and returns its results on both backends. It must fail with those
// words; without any it must not.
func soak(t *testing.T, failure string, flags ...string) []result {
	t.Helper()
	var results []result
	// It runs in a namespace, so that it is skipped, or fails, if there are none.
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "ip", "nft", "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy")
		out := filepath.Join(t.TempDir(), "soak.json")
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", append([]string{"-canaryd=" + nodetest.Canaryd(), "-json=" + out}, flags...)...)
		cmd.Env = append(os.Environ(), program+"=1")
		said, err := cmd.CombinedOutput()
		t.Logf("\n%s", said)
		if (err != nil) != (failure != "") || !strings.Contains(string(said), failure) {
			t.Fatalf("the program ended with %v, want a failure that says %q", err, failure)
		}
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, &results); err != nil || len(results) != 2 {
			t.Fatalf("%d results, %v", len(results), err)
		}
	})
	return results
}
