package packaging

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const unitFile = "deploy/systemd/canaryd.service"

// install runs make install, with the program under test instead of the one that make would
// build.
func install(t *testing.T, destdir, prefix string) {
	t.Helper()
	// -o makes make take the files as built. This puts the program where make expects it, in a
	// copy of the sources that install needs.
	dir := t.TempDir()
	for _, name := range []string{"Makefile", "deploy", "docs"} {
		nstest.Command(t, "cp", "-r", "../../"+name, dir)
	}
	nstest.Command(t, "install", "-D", nodetest.Canaryd(), dir+"/bin/canaryd")
	for _, shell := range []string{"bash", "zsh", "fish"} {
		write(t, dir+"/bin/completion/"+shell, nstest.Command(t, nodetest.Canaryd(), "completion", shell))
	}
	nstest.Command(t, "make", "-s", "-C", dir, "-o", "build", "-o", "completion", "install", "DESTDIR="+destdir, "PREFIX="+prefix)
}

// tree lists the files below dir with their modes.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		files = append(files, fmt.Sprintf("%s %s", info.Mode(), strings.TrimPrefix(path, dir)))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestInstall: make installs these files, and uninstall leaves only the file that the operator
// may have edited.
func TestInstall(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"/usr/local", "/opt/canaryd"} {
		t.Run(prefix, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			install(t, root, prefix)
			want := []string{
				"-rw-r--r-- /etc/default/canaryd",
				"-rwxr-xr-x " + prefix + "/bin/canaryd",
				"-rw-r--r-- " + prefix + "/lib/systemd/system/canaryd.service",
				"-rw-r--r-- " + prefix + "/share/bash-completion/completions/canaryd",
				"-rw-r--r-- " + prefix + "/share/canaryd/node-problem-detector/canaryd-check.sh",
				"-rw-r--r-- " + prefix + "/share/canaryd/node-problem-detector/canaryd-daemonset-flushes.json",
				"-rw-r--r-- " + prefix + "/share/canaryd/node-problem-detector/canaryd-daemonset.json",
				"-rw-r--r-- " + prefix + "/share/canaryd/node-problem-detector/canaryd-flushes.json",
				"-rw-r--r-- " + prefix + "/share/canaryd/node-problem-detector/canaryd.json",
				"-rw-r--r-- " + prefix + "/share/fish/vendor_completions.d/canaryd.fish",
				"-rw-r--r-- " + prefix + "/share/man/man8/canaryd.8",
				"-rw-r--r-- " + prefix + "/share/zsh/site-functions/_canaryd",
			}
			if diff := cmp.Diff(want, tree(t, root)); diff != "" {
				t.Errorf("after make install (-want +got):\n%s", diff)
			}
			unit, err := os.ReadFile(root + prefix + "/lib/systemd/system/canaryd.service")
			if err != nil {
				t.Fatal(err)
			}
			if line := "\nExecStart=" + prefix + "/bin/canaryd run"; !strings.Contains(string(unit), line) {
				t.Errorf("the unit has no line %q", line)
			}
			plugin, err := os.ReadFile(root + prefix + "/share/canaryd/node-problem-detector/canaryd.json")
			if err != nil {
				t.Fatal(err)
			}
			if path := `"path": "` + prefix + `/bin/canaryd"`; !strings.Contains(string(plugin), path) {
				t.Errorf("node-problem-detector's plugin has no %s:\n%s", path, plugin)
			}

			defaults := root + "/etc/default/canaryd"
			if err := os.WriteFile(defaults, []byte("CANARYD_FLAGS=--mode=observe\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			install(t, root, prefix)
			if text, err := os.ReadFile(defaults); err != nil || string(text) != "CANARYD_FLAGS=--mode=observe\n" {
				t.Errorf("a second install made of the operator's defaults: %q, %v", text, err)
			}
			nstest.Command(t, "make", "-s", "-C", "../..", "uninstall", "DESTDIR="+root, "PREFIX="+prefix)
			if diff := cmp.Diff(want[:1], tree(t, root)); diff != "" {
				t.Errorf("after make uninstall (-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnitIsSound: systemd-analyze has no complaint about the unit.
func TestUnitIsSound(t *testing.T) {
	t.Parallel()
	nstest.NeedProgram(t, "systemd-analyze")
	root := t.TempDir()
	distribution(t, root)
	install(t, root, "/usr")
	if out := verify(t, root, "canaryd.service"); out != "" {
		t.Errorf("systemd-analyze verify: %s", out)
	}
}

// TestScore: the unit exposes no more than 3.0 of 10.
func TestScore(t *testing.T) {
	t.Parallel()
	nstest.NeedProgram(t, "systemd-analyze")
	// The threshold is in tenths.
	cmd := exec.CommandContext(t.Context(), "systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=30", "../../"+unitFile)
	out, err := cmd.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	t.Log(lines[len(lines)-1])
	if err != nil {
		t.Errorf("%v:\n%s", err, out)
	}
}

// distribution writes the units of a distribution's boot to root, as far as their order matters
// to a firewall. The targets follow the manuals of systemd.special and bootup, and the flushers
// their own units.
func distribution(t *testing.T, root string, boots ...string) {
	t.Helper()
	for name, text := range map[string]string{
		"sysinit.target":     "[Unit]\nDefaultDependencies=no\nWants=local-fs.target nftables.service\nAfter=local-fs.target\n",
		"basic.target":       "[Unit]\nDefaultDependencies=no\nRequires=sysinit.target\nAfter=sysinit.target\n",
		"local-fs.target":    "[Unit]\nDefaultDependencies=no\n",
		"shutdown.target":    "[Unit]\nDefaultDependencies=no\n",
		"network-pre.target": "[Unit]\n",
		"network.target":     "[Unit]\nAfter=network-pre.target\n",
		"multi-user.target":  "[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=canaryd.service " + strings.Join(boots, " ") + "\n",
		// Firewalls precede the network, and two of them are very early.
		"nftables.service":  early("Wants=network-pre.target\nBefore=network-pre.target"),
		"ufw.service":       early("Wants=network-pre.target\nBefore=network-pre.target\nAfter=local-fs.target"),
		"firewalld.service": service("Wants=network-pre.target\nBefore=network-pre.target"),
		"docker.service":    service("After=network.target firewalld.service"),
		// The configuration of a cloud's machine needs the network before sysinit is done.
		"networkd.service":   early("After=network-pre.target\nBefore=network.target"),
		"cloud-init.service": early("After=networkd.service\nBefore=sysinit.target"),
	} {
		write(t, filepath.Join(root, "usr/lib/systemd/system", name), text)
	}
	write(t, filepath.Join(root, "usr/bin/true"), "#!/bin/sh\n")
	if err := os.Chmod(filepath.Join(root, "usr/bin/true"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func service(unit string) string {
	return "[Unit]\n" + unit + "\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/true\n"
}

func early(unit string) string { return service("DefaultDependencies=no\n" + unit) }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// verify returns systemd-analyze's complaints about a unit below root.
func verify(t *testing.T, root, unit string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "systemd-analyze", "verify", "--root="+root, "--man=no", unit)
	out, err := cmd.CombinedOutput()
	if err != nil && len(out) == 0 {
		return err.Error()
	}
	return string(out)
}

// TestBootOrder: canaryd precedes the flushers at boot. That closes no circle, not even with
// the earliest possible firewall.
func TestBootOrder(t *testing.T) {
	t.Parallel()
	nstest.NeedProgram(t, "systemd-analyze")
	for name, boots := range map[string][]string{
		"a server":          {"firewalld.service", "docker.service", "networkd.service"},
		"a cloud's machine": {"ufw.service", "docker.service", "networkd.service", "cloud-init.service"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			distribution(t, root, boots...)
			install(t, root, "/usr")
			if out := verify(t, root, "multi-user.target"); out != "" {
				t.Errorf("systemd-analyze verify: %s", out)
			}

			// As an ordinary service it would close a circle. If verify did not report that,
			// the test above would prove nothing.
			path := filepath.Join(root, "usr/lib/systemd/system/canaryd.service")
			unit := strings.Replace(source(t, unitFile), "DefaultDependencies=no\n", "", 1)
			write(t, path, strings.Replace(unit, "/usr/local/bin", "/usr/bin", 1))
			if name == "a cloud's machine" && !strings.Contains(verify(t, root, "multi-user.target"), "ordering cycle") {
				t.Error("an ordinary service would be ordered in a circle, and systemd-analyze verify does not say so")
			}
		})
	}
}
