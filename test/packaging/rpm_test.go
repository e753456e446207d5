package packaging

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

func rpm(t *testing.T, version string) string {
	t.Helper()
	nstest.NeedProgram(t, "rpmbuild", "rpm")
	return pack(t, "rpm", version)
}

// TestWhatIsInTheRPM: files, modes, owners, and which file is the operator's (c) and not
// overwritten (n). A commit is older than every release.
func TestWhatIsInTheRPM(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		query := func(path, format string) string {
			n.Helper()
			return nstest.Command(t, "rpm", "-qp", "--queryformat", format, path)
		}
		path := rpm(t, "1.2.3-dev+abcdef0")
		want := strings.Join([]string{
			"-rw-r--r-- root root /etc/default/canaryd cn",
			"-rwxr-xr-x root root /usr/bin/canaryd ",
			"-rw-r--r-- root root /usr/lib/systemd/system/canaryd.service ",
			"-rw-r--r-- root root /usr/share/bash-completion/completions/canaryd ",
			"drwxr-xr-x root root /usr/share/canaryd ",
			"drwxr-xr-x root root /usr/share/canaryd/node-problem-detector ",
			"-rw-r--r-- root root /usr/share/canaryd/node-problem-detector/canaryd-check.sh ",
			"-rw-r--r-- root root /usr/share/canaryd/node-problem-detector/canaryd-daemonset-flushes.json ",
			"-rw-r--r-- root root /usr/share/canaryd/node-problem-detector/canaryd-daemonset.json ",
			"-rw-r--r-- root root /usr/share/canaryd/node-problem-detector/canaryd-flushes.json ",
			"-rw-r--r-- root root /usr/share/canaryd/node-problem-detector/canaryd.json ",
			"-rw-r--r-- root root /usr/share/fish/vendor_completions.d/canaryd.fish ",
			"-rw-r--r-- root root /usr/share/man/man8/canaryd.8 d",
			"-rw-r--r-- root root /usr/share/zsh/site-functions/_canaryd ",
			"",
		}, "\n")
		got := query(path, `[%{FILEMODES:perms} %{FILEUSERNAME} %{FILEGROUPNAME} %{FILENAMES} %{FILEFLAGS:fflags}\n]`)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
		if got := query(path, "%{NAME} %{VERSION}-%{RELEASE} %{BUILDHOST}"); got != "canaryd 1.2.3~dev+abcdef0-1 canaryd" {
			t.Errorf("the package is %q", got)
		}
		// sh runs the scripts, however the sections between them are commented.
		if scripts := nstest.Command(t, "rpm", "-qp", "--scripts", path); strings.Count(scripts, "(using /bin/sh)") != 3 || strings.Contains(scripts, "%") {
			t.Errorf("scripts:\n%s", scripts)
		}
	})
}

// TestRPM: it is installed, upgraded while canaryd guards, and removed. The operator's files,
// enabled and disabled states stay.
func TestRPM(t *testing.T) {
	nodetest.On(t, "nft", func(n *nodetest.Node) {
		n.Load()
		before := n.Protected()
		m := boot(n)
		m.mayStart()
		// The needed programs are here, but this machine's rpm knows no package.
		rpmDo := func(args ...string) {
			n.Helper()
			m.must("rpm", append([]string{"--force-debian", "--nodeps"}, args...)...)
		}
		states := func(what, want string) {
			n.Helper()
			if got := m.show("ActiveState") + " " + m.show("UnitFileState"); got != want {
				t.Errorf("%s canaryd is %s, want %s", what, got, want)
			}
		}
		first, second := rpm(t, "1.0.0"), rpm(t, "1.0.1")

		write(t, m.root()+"/etc/systemd/system-preset/10-test.preset", "enable canaryd.service\n")
		rpmDo("-i", first)
		states("after the installation, where a preset enables it,", "inactive enabled")
		if got := m.must("rpm", "-q", "canaryd"); !strings.HasPrefix(got, "canaryd-1.0.0-1.") {
			t.Errorf("rpm says %q", got)
		}
		m.must("systemctl", "start", "canaryd.service")
		m.guards("after the installation", before)

		m.upgrades(before, func() { rpmDo("-U", second) })
		states("after the upgrade", "active enabled")

		rpmDo("-e", "canaryd")
		m.wantRemoved(before)
		m.wantFlags("after the removal", "/etc/default/canaryd.rpmsave")

		write(t, m.root()+"/etc/systemd/system-preset/10-test.preset", "disable canaryd.service\n")
		rpmDo("-i", first)
		states("where a preset disables it", "inactive disabled")
		rpmDo("-U", second)
		states("where the operator has not started it, after an upgrade", "inactive disabled")
	})
}
