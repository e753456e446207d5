package kernels

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/testlog"
)

// limit is the time for the tests of one machine, by its own clock. On two busy processors they
// need three minutes.
const limit = 20 * time.Minute

// A machine is a kernel with a root file system in memory.
type machine struct {
	kernel
	root string // archive of the root
}

// qemu returns the program that emulates the kernel's processor.
func (k kernel) qemu() string {
	if k.Arch == "arm64" {
		return "qemu-system-aarch64"
	}
	return "qemu-system-x86_64"
}

// assemble builds the machine's root: the suite's programs, the kernel's modules, canaryd, and
// this package's tests as /init.
func assemble(t *testing.T, k kernel, built string) machine {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	own := filepath.Join(built, k.Arch)
	build(t, k.Arch, own, "build", "../../cmd/canaryd", "canaryd")
	if k.Arch == "amd64" {
		build(t, "386", own, "build", "../../cmd/canaryd", filepath.Base(of386))
	}
	build(t, k.Arch, own, "test", ".", "init")
	file, err := os.Create(filepath.Join(t.TempDir(), "root.cpio"))
	must(err)
	defer file.Close()
	archive := newArchive(file)
	for _, folder := range []string{k.userland(""), k.file("root"), own} {
		must(archive.addFolder(folder))
	}
	must(archive.close())
	return machine{k, file.Name()}
}

// build builds canaryd or a test binary for the architecture, unless it exists. It needs no
// library, because no userland has those of another.
func build(t *testing.T, arch, folder, how, pkg, name string) {
	t.Helper()
	to := filepath.Join(folder, name)
	if _, err := os.Stat(to); err == nil {
		return
	}
	words := []string{how, "-trimpath", "-o", to}
	if how == "test" {
		words = append(words, "-c")
	}
	cmd := exec.Command("go", append(words, pkg)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH="+arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// arguments returns qemu's arguments. The only device is a serial line for the tests' output.
// The kernel itself prints only its end.
func (m machine) arguments() []string {
	// In qemu 7.2 the instruction cmpxchg16b sometimes leaves wrong flags, and Linux 6.12 stops
	// with a double fault. Kernels work without the instruction.
	console, model := "ttyS0", []string{"-machine", "pc", "-cpu", "max,-cx16,-la57"}
	if m.Arch == "arm64" {
		console, model = "ttyAMA0", []string{"-machine", "virt", "-cpu", "cortex-a72"}
	}
	var patterns []string
	for _, story := range m.stories() {
		name, _, _ := strings.Cut(story, "/")
		patterns = append(patterns, name)
	}
	words := []string{
		"console=" + console, "quiet", "loglevel=1", "panic=-1", "mitigations=off", "random.trust_cpu=on", "rdinit=/init",
		nodetest.With("/canaryd"),
		"--", "-test.v", "-test.parallel=1", "-test.count=1", "-test.timeout=" + limit.String(), "-test.run=^(" + strings.Join(patterns, "|") + ")$",
	}
	return append(model, "-accel", "tcg", "-m", "2048", "-nodefaults", "-display", "none", "-no-reboot", "-serial", "stdio",
		"-kernel", m.file("vmlinuz"), "-initrd", m.root, "-append", strings.Join(words, " "))
}

// run runs the machine to its end, and returns its output.
func (m machine) run(t *testing.T) string {
	t.Helper()
	var out testlog.Log
	cmd := exec.CommandContext(t.Context(), m.qemu(), m.arguments()...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatalf("%s: %v", m.qemu(), err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	testkit.Until(t, "the machine to end", func() error {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("%s: %v\n%s", m.qemu(), err, out.String())
			}
			return nil
		default:
			return fmt.Errorf("it runs, and has printed\n%s", out.String())
		}
	})
	return strings.ReplaceAll(out.String(), "\r", "")
}
