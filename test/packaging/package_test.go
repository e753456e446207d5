package packaging

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// pack makes a package, a deb or an rpm, of the program under test.
func pack(t *testing.T, kind, version string) string {
	t.Helper()
	tree := t.TempDir()
	install(t, tree, "/usr")
	// The machine also has this path, because both share /run.
	path := filepath.Join("/run", "canaryd_"+version+"."+kind)
	nstest.Command(t, "../../hack/"+kind+".sh", tree, version, runtime.GOARCH, path)
	return path
}

func deb(t *testing.T, version string) string {
	t.Helper()
	nstest.NeedProgram(t, "dpkg-deb", "dpkg")
	return pack(t, "deb", version)
}

// root returns the folder of the machine's files.
func (m *machine) root() string { return fmt.Sprintf("/proc/%d/root", m.pid) }

func (m *machine) exists(path string) bool {
	_, err := os.Lstat(m.root() + path)
	return err == nil
}

// mayStart lets packages start services, which is often forbidden where tests run.
func (m *machine) mayStart() {
	m.Helper()
	if err := os.Remove(m.root() + "/usr/sbin/policy-rc.d"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.Fatal(err)
	}
}

// guards flushes everything, and waits for the protected rules.
func (m *machine) guards(when string, protected []string) {
	m.Helper()
	m.Flush()
	m.Healed(1)
	// On a busy machine canaryd sees a flush of six commands as several flushes.
	m.Until("the protected rules to be as before "+when, func() error {
		if diff := cmp.Diff(protected, m.Protected()); diff != "" {
			return errors.New("(-want +got):\n" + diff)
		}
		return nil
	})
}

// operatorsFlags is the operator's text in the file of flags.
const operatorsFlags = "CANARYD_FLAGS=--backend=nft\n"

// wantFlags wants the operator's flags in a file of the machine's.
func (m *machine) wantFlags(when, path string) {
	m.Helper()
	if text, err := os.ReadFile(m.root() + path); err != nil || string(text) != operatorsFlags {
		m.Errorf("%s the operator's flags are %q, %v", when, text, err)
	}
}

// upgrades installs another version of the package. That must restart canaryd, and leave the
// operator's flags alone.
func (m *machine) upgrades(protected []string, upgrade func()) {
	m.Helper()
	write(m.T, m.root()+"/etc/default/canaryd", operatorsFlags)
	first := m.show("MainPID")
	upgrade()
	if got := m.show("MainPID"); got == first || m.show("ActiveState") != "active" {
		m.Errorf("the upgrade did not restart canaryd: process %s, %s", got, m.show("ActiveState"))
	}
	m.wantFlags("after the upgrade", "/etc/default/canaryd")
	m.guards("after the upgrade", protected)
}

// wantRemoved wants nothing of the package left but the operator's own files.
func (m *machine) wantRemoved(protected []string) {
	m.Helper()
	if code, _, _ := m.run("systemctl", "is-active", "--quiet", "canaryd.service"); code == 0 {
		m.Error("canaryd runs although its package was removed")
	}
	m.Same("canaries after the removal", nil, m.Marks())
	m.Same("protected rules after the removal", protected, m.Protected())
	for _, gone := range []string{"/usr/bin/canaryd", "/usr/lib/systemd/system/canaryd.service", "/etc/systemd/system/multi-user.target.wants/canaryd.service"} {
		if m.exists(gone) {
			m.Errorf("%s is there after the removal", gone)
		}
	}
	if !m.exists("/var/lib/canaryd") {
		m.Error("the removal took what canaryd knew")
	}
}

// TestDebianPackage: it is installed and started, upgraded while canaryd guards, removed, and
// purged. Only the purge deletes the operator's flags.
func TestDebianPackage(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.mayStart()
		// Without other packages' triggers, because the index of all manual pages takes a
		// minute.
		dpkg := func(args ...string) {
			n.Helper()
			m.must("dpkg", append([]string{"--no-triggers", "--force-unsafe-io"}, args...)...)
		}

		dpkg("-i", deb(t, "1.0.0"))
		if got := m.show("ActiveState"); got != "active" {
			t.Fatalf("after the installation canaryd is %s", got)
		}
		if got := m.must("systemctl", "is-enabled", "canaryd.service"); got != "enabled\n" {
			t.Errorf("after the installation canaryd is %s", got)
		}
		if got := m.must("dpkg-query", "-W", "-f", "${Version} ${Status}", "canaryd"); got != "1.0.0 install ok installed" {
			t.Errorf("dpkg says %q", got)
		}
		m.guards("after the installation", before)

		m.upgrades(before, func() { dpkg("-i", deb(t, "1.0.1")) })
		dpkg("-r", "canaryd")
		m.wantRemoved(before)
		m.wantFlags("after the removal", "/etc/default/canaryd")

		dpkg("-i", "/run/canaryd_1.0.1.deb")
		if got := m.show("ActiveState") + " " + m.show("UnitFileState"); got != "active enabled" {
			t.Errorf("installed again after a removal canaryd is %s", got)
		}
		m.must("systemctl", "disable", "--now", "canaryd.service")
		dpkg("-i", "/run/canaryd_1.0.1.deb")
		if got := m.show("ActiveState") + " " + m.show("UnitFileState"); got != "inactive disabled" {
			t.Errorf("disabled by the operator, after an upgrade canaryd is %s", got)
		}

		// canaryd is stopped, and its canaries are left.
		if len(m.Marks()) == 0 {
			t.Fatal("a stopped canaryd leaves no canary: the test shows nothing")
		}
		dpkg("-P", "canaryd")
		m.Same("canaries after the purge of a stopped canaryd", nil, m.Marks())
		if _, out, _ := m.run("nft", "list", "tables"); strings.Contains(out, "canaryd") {
			t.Errorf("tables after the purge:\n%s", out)
		}
		if m.exists("/etc/default/canaryd") || m.exists("/var/lib/canaryd") {
			t.Error("flags or state are there after a purge")
		}
		if _, out, _ := m.run("dpkg-query", "-W", "-f", "${Status}", "canaryd"); strings.Contains(out, "installed") && !strings.Contains(out, "not-installed") {
			t.Errorf("dpkg says %q after a purge", out)
		}

		// If an operator wrote the flags before the installation, dpkg shows no question.
		const observe = "CANARYD_FLAGS=--mode=observe\n"
		write(m.T, m.root()+"/etc/default/canaryd", observe)
		dpkg("-i", "/run/canaryd_1.0.1.deb")
		if text, err := os.ReadFile(m.root() + "/etc/default/canaryd"); err != nil || string(text) != observe {
			t.Errorf("after the installation the flags are %q, %v", text, err)
		}
		if out := m.must("canaryd", "status"); !strings.Contains(out, "mode observe") {
			t.Errorf("it was installed to observe:\n%s", out)
		}
	})
}
