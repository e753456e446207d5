package packaging

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
)

// TestSandbox: canaryd runs under its unit, with all of its limits. It is ready once its
// canaries exist, heals, is restarted when it hangs, and stops.
func TestSandbox(t *testing.T) {
	nodetest.OnBoth(t, func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.installed("--backend=" + string(n.Programs.With) + " --protect='kube,cni'")
		m.must("systemctl", "start", "canaryd.service")
		if len(n.Marks()) == 0 {
			n.Error("canaryd was called ready before it had planted a canary")
		}
		if got := m.show("StatusText"); !strings.HasPrefix(got, "Healthy: ") {
			n.Errorf("the status is %q, want it to begin with Healthy:", got)
		}
		m.confined()

		n.Flush()
		n.Healed(1)
		n.Same("protected rules", before, n.Protected())
		n.Until("the status to tell of the flush", func() error {
			if got := m.show("StatusText"); !strings.Contains(got, "last flush at ") || !strings.HasSuffix(got, ", proved") {
				return fmt.Errorf("it is %q", got)
			}
			return nil
		})

		m.must("systemctl", "stop", "canaryd.service")
		if got := m.show("Result"); got != "success" {
			n.Errorf("the result after a stop is %s, want success", got)
		}
		// The next start restores rules that were lost while it was stopped, because the folder
		// of the state is kept.
		n.Flush()
		m.must("systemctl", "start", "canaryd.service")
		n.Until("the rules to be back", func() error {
			if diff := cmp.Diff(before, n.Protected()); diff != "" {
				return fmt.Errorf("-want +got: %s", diff)
			}
			return nil
		})
	})
}

// confined fails the test unless the kernel limits the daemon as the unit says.
func (m *machine) confined() {
	m.Helper()
	dir := fmt.Sprintf("/proc/%d/", m.process())
	text, err := os.ReadFile(dir + "status")
	m.Must(err)
	const netAdminAndRaw = "0000000000003000" // bits 12 and 13, capabilities(7)
	want := map[string]string{
		"NoNewPrivs": "1", "Seccomp": "2", "CapBnd": netAdminAndRaw, "CapPrm": netAdminAndRaw, "CapEff": netAdminAndRaw,
		"CapAmb": "0000000000000000", "CapInh": "0000000000000000", "Umask": "0077",
	}
	got := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if _, asked := want[name]; asked {
			got[name] = strings.TrimSpace(value)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		m.Errorf("/proc/PID/status (-want +got):\n%s", diff)
	}

	mounts, err := os.ReadFile(dir + "mounts")
	m.Must(err)
	var writable []string
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if slices.Contains(strings.Split(f[3], ","), "rw") && f[2] != "proc" {
			writable = append(writable, f[1])
		}
	}
	for _, place := range writable {
		if !slices.ContainsFunc([]string{"/run", "/tmp", "/var/tmp", "/var/lib/canaryd", "/dev"}, func(allowed string) bool {
			return place == allowed || strings.HasPrefix(place, allowed+"/")
		}) {
			m.Errorf("%s may be written to", place)
		}
	}
	devices, err := filepath.Glob(dir + "root/dev/*")
	m.Must(err)
	for _, d := range devices {
		if slices.Contains([]string{"mem", "kmsg", "vda", "sda", "kvm"}, filepath.Base(d)) {
			m.Errorf("the device %s is there", d)
		}
	}
	if len(m.log.String()) > 0 {
		for line := range strings.Lines(m.log.String()) {
			if strings.Contains(line, "canaryd.service") && strings.Contains(line, "ignoring") {
				m.Errorf("systemd did not do all that the unit says: %s", line)
			}
		}
	}
}

// TestWatchdog: systemd kills a hanging canaryd and starts it again, and that guards as before.
func TestWatchdog(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.installed("--backend=nft")
		m.must("systemctl", "start", "canaryd.service")
		// The unit's own watchdog is too long for a test.
		if got := m.show("WatchdogUSec"); got != "30s" {
			n.Errorf("the unit's watchdog waits %s, want 30s", got)
		}
		write(t, "/run/systemd/system/canaryd.service.d/watchdog.conf", "[Service]\nWatchdogSec=3s\nTimeoutAbortSec=1s\n")
		m.must("systemctl", "daemon-reload")
		m.must("systemctl", "restart", "canaryd.service")
		first := m.show("MainPID")
		testkit.Pass(m, 5*time.Second, "that the watchdog, which waits shorter, ends it")
		if got := m.show("NRestarts"); got != "0" {
			t.Fatalf("canaryd was restarted %s times although its loop turns", got)
		}
		m.must("kill", "-STOP", first)
		n.Flush()
		n.Until("another canaryd", func() error {
			if now := m.show("MainPID"); now == first || now == "0" {
				return fmt.Errorf("the main process is %s", now)
			}
			return nodetest.Ready()
		})
		n.Same("protected rules", before, n.Protected())
		if got := m.show("NRestarts"); got != "1" {
			n.Errorf("%s restarts, want 1", got)
		}
	})
}

// TestFlushersRestart: canaryd starts before the services that flush at boot. It keeps running
// while they restart, and restores the rules that they flush.
func TestFlushersRestart(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.installed("--backend=nft")
		flushers := []string{"firewalld.service", "ufw.service", "nftables.service", "docker.service"}
		for _, name := range flushers {
			write(t, "/run/systemd/system/"+name, "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"+
				"ExecStart=/usr/sbin/iptables-nft -t nat -F\nExecStop=/usr/sbin/iptables-nft -t filter -F\n")
		}
		write(t, "/run/systemd/system/boot.target", "[Unit]\nDefaultDependencies=no\nWants=canaryd.service "+strings.Join(flushers, " ")+"\n")
		m.must("systemctl", "daemon-reload")
		m.must("systemctl", "start", "boot.target")
		pid, ready := m.show("MainPID"), m.show("ActiveEnterTimestampMonotonic")
		n.Until("the flushers", func() error {
			for _, name := range flushers {
				began := strings.TrimSpace(m.must("systemctl", "show", "--value", "-p", "ExecMainStartTimestampMonotonic", name))
				if began == "0" {
					return fmt.Errorf("%s has not begun", name)
				}
				if len(began) < len(ready) || len(began) == len(ready) && began < ready {
					n.Errorf("%s began at %s, before canaryd was ready at %s", name, began, ready)
				}
			}
			return nil
		})
		for i, name := range flushers {
			m.must("systemctl", "restart", name)
			n.Until("the rules to be back after a restart of "+name, func() error {
				if diff := cmp.Diff(before, n.Protected()); diff != "" || len(n.Status().Flushes) < i+1 {
					return fmt.Errorf("%d flushes (-want +got): %s", len(n.Status().Flushes), diff)
				}
				return nodetest.Ready()
			})
		}
		if got := m.show("MainPID"); got != pid {
			n.Errorf("the main process was %s and is %s after restarts of others", pid, got)
		}
	})
}
