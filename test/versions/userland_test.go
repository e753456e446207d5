package versions

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/outcome"
	"github.com/canaryd/canaryd/internal/testkit/versions"
)

// userlands is where hack/userlands.sh unpacked Debian's packages, a folder for each suite.
const userlands = "/var/cache/canaryd-test/userlands"

// A userland is a root file system, mounted in the namespaces that this process is in. What
// is written to it goes with them.
type userland struct {
	*testing.T
	root string
}

// enter mounts the suite's userland, with this tree as /src and what was built as /builds.
func enter(t *testing.T, suite string) *userland {
	t.Helper()
	u := &userland{T: t, root: "/run/userland/root"}
	for _, dir := range []string{"upper", "work", "root"} {
		u.must(os.MkdirAll(filepath.Join("/run/userland", dir), 0o755))
	}
	layers := "lowerdir=" + filepath.Join(userlands, suite) + ",upperdir=/run/userland/upper,workdir=/run/userland/work"
	u.must(unix.Mount("overlay", u.root, "overlay", 0, layers))
	sources, err := filepath.Abs("../..")
	u.must(err)
	for _, m := range []struct{ from, to string }{
		{"/proc", "/proc"}, {"/sys", "/sys"}, {"/dev", "/dev"}, {sources, "/src"}, {os.Getenv(builds), "/builds"},
	} {
		u.must(unix.Mount(m.from, u.root+m.to, "", unix.MS_BIND|unix.MS_REC, ""))
	}
	u.must(unix.Mount("", u.root+"/src", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	return u
}

func (u *userland) must(err error) {
	u.Helper()
	if err != nil {
		u.Fatal(err)
	}
}

// command returns a command of the userland's.
func (u *userland) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(u.Context(), name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: u.root}
	cmd.Dir = "/"
	// With CI=true a test that lacks a program fails instead of being skipped. Random tests run at
	// their full length, which is where the programs of some releases differ.
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "LC_ALL=C.UTF-8", "CI=true", "CANARYD_TEST_LARGE=1", nodetest.With("/builds/canaryd")}
	return cmd
}

// programs returns the versions of iptables, nft and ipset.
func (u *userland) programs() string {
	u.Helper()
	var all []string
	for _, program := range []string{"iptables-nft", "nft", "ipset"} {
		out, err := u.command("/usr/sbin/"+program, "--version").Output()
		u.must(err)
		version := versions.Number(string(out))
		if version == "" {
			u.Fatalf("%s --version printed %q", program, out)
		}
		all = append(all, strings.TrimSuffix(program, "-nft")+" "+version)
	}
	return strings.Join(all, ", ")
}

// run runs a part's tests, and returns an outcome for each row.
func (u *userland) run(p part) []outcome.Outcome {
	u.Helper()
	defer u.turn(p)()
	cmd := u.command("/builds/"+p.binary(), "-test.v", "-test.count=1", "-test.run="+p.tests, "-test.skip="+p.skip, "-test.timeout="+limit.String())
	cmd.Dir = "/src/" + p.pkg
	out, err := cmd.CombinedOutput()
	all := outcome.Of(string(out), p.rows)
	for i := range all {
		all[i].Name = p.pkg + " " + all[i].Name
	}
	if len(all) == 0 {
		u.Fatalf("%s ran no test: %v\n%s", p.pkg, err, out)
	}
	// Where the binary fails and none of its rows did, it crashed.
	if failed := bytes.Contains(out, []byte("\n--- FAIL: ")); (err != nil) != failed {
		u.Errorf("%s: %v\n%s", p.pkg, err, out)
	}
	return all
}

// turn waits until the part may run, and returns what ends its turn. A part with rows has the
// machine for itself: a flush of many commands must not be healed in the middle for want of time.
func (u *userland) turn(p part) (end func()) {
	u.Helper()
	file, err := os.Create(filepath.Join(os.Getenv(builds), "turn"))
	u.must(err)
	how := unix.LOCK_SH
	if p.rows {
		how = unix.LOCK_EX
	}
	for err = unix.EINTR; err == unix.EINTR; { // Go's own signals
		err = unix.Flock(int(file.Fd()), how)
	}
	u.must(err)
	return func() { u.must(file.Close()) }
}

// TestUserlandsAreThere: without them nothing of this package is tried.
func TestUserlandsAreThere(t *testing.T) {
	for _, suite := range versions.Suites {
		nstest.NeedFile(t, filepath.Join(userlands, suite.Name, ".unpacked"))
	}
}
