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

// userlands is hack/userlands.sh's folder of Debian's packages, with a folder for each suite.
const userlands = "/var/cache/canaryd-test/userlands"

// A userland is a root file system, mounted in this process's namespaces. Its changes are
// deleted with them.
type userland struct {
	*testing.T
	root string
}

// enter mounts the suite's userland, with this tree as /src and the built programs as /builds.
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

// command returns a command in the userland.
func (u *userland) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(u.Context(), name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: u.root}
	cmd.Dir = "/"
	// With CI=true a test without its program fails and is not skipped. Random tests have their
	// full length, because there the programs of some releases differ.
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
	// If the binary failed without a failing row, it crashed.
	if failed := bytes.Contains(out, []byte("\n--- FAIL: ")); (err != nil) != failed {
		u.Errorf("%s: %v\n%s", p.pkg, err, out)
	}
	return all
}

// turn waits until the part may run, and returns a function that ends its turn. A part with
// rows runs alone, because a slow machine could heal a flush of many commands in the middle.
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

// TestUserlandsAreThere: without them this package would test nothing.
func TestUserlandsAreThere(t *testing.T) {
	for _, suite := range versions.Suites {
		nstest.NeedFile(t, filepath.Join(userlands, suite.Name, ".unpacked"))
	}
}
