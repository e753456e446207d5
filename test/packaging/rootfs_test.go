package packaging

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const containerfile = "deploy/image/Containerfile"

func source(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// instructions returns the Containerfile's instructions, one a line.
func instructions(t *testing.T) []string {
	t.Helper()
	text := regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(source(t, containerfile), "")
	return strings.Split(regexp.MustCompile(`\\\n\s*`).ReplaceAllString(text, ""), "\n")
}

// instruction returns the text of the last instruction of that name, which belongs to the last
// stage.
func instruction(t *testing.T, name string) string {
	t.Helper()
	var last string
	for _, line := range instructions(t) {
		if rest, found := strings.CutPrefix(line, name+" "); found {
			last = rest
		}
	}
	if last == "" {
		t.Fatalf("%s has no %s", containerfile, name)
	}
	return last
}

// words returns the words of an instruction in list form.
func words(t *testing.T, name string) []string {
	t.Helper()
	var list []string
	if err := json.Unmarshal([]byte(instruction(t, name)), &list); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return list
}

// rootfs assembles the image's root file system as the Containerfile does.
func rootfs(t *testing.T) string { return rootfsFor(t, "nft legacy") }

// rootfsFor is rootfs of an image for these backends.
func rootfsFor(t *testing.T, backends string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "rootfs")
	nstest.Command(t, "env", "BACKENDS="+backends, "../../hack/image-rootfs.sh", nodetest.Canaryd(), dir)
	return dir
}

// TestContainerfile: it copies existing files, runs the script of these tests, and starts the
// program that the script put into the image.
func TestContainerfile(t *testing.T) {
	t.Parallel()
	all := strings.Join(instructions(t), "\n")
	for _, copied := range regexp.MustCompile(`(?m)^COPY ([a-z]\S*) (\S+)$`).FindAllStringSubmatch(all, -1) {
		// The script expects the list in its neighbourhood.
		if want := "/src/" + filepath.Dir(copied[1]) + "/"; copied[2] != want {
			t.Errorf("%s is copied to %s, want %s", copied[1], copied[2], want)
		}
		source(t, copied[1])
	}
	if !strings.Contains(all, "\nRUN /src/hack/image-rootfs.sh /src/bin/canaryd /rootfs\n") || !strings.Contains(all, "\nCOPY --from=root /rootfs /\n") {
		t.Error("the image is not what hack/image-rootfs.sh assembles")
	}
	stages := regexp.MustCompile(`(?m)^FROM (.*)$`).FindAllStringSubmatch(all, -1)
	if last := stages[len(stages)-1][1]; last != "scratch" {
		t.Errorf("the image is made on %s, want scratch", last)
	}
	for _, label := range []string{"title", "description", "source", "documentation", "licenses", "version", "revision"} {
		if !strings.Contains(instruction(t, "LABEL"), "org.opencontainers.image."+label+"=") {
			t.Errorf("the label %s is missing", label)
		}
	}
	if args := words(t, "CMD"); len(args) != 1 || args[0] != "run" {
		t.Errorf("without arguments it runs %q", args)
	}
	// The base image must have go.mod's version of Go.
	version := regexp.MustCompile(`(?m)^go (1\.\d+)`).FindStringSubmatch(source(t, "go.mod"))[1]
	if !strings.Contains(all, "ARG GO="+version+"\n") {
		t.Errorf("%s does not take Go %s", containerfile, version)
	}
}

// TestRootFS: the image has no shell, no set-uid file, no leftover of a temporary folder, and
// little else.
func TestRootFS(t *testing.T) {
	t.Parallel()
	root := rootfs(t)
	if _, err := os.Stat(root + words(t, "ENTRYPOINT")[0]); err != nil {
		t.Error(err)
	}
	var size int64
	var programs []string
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		inside := strings.TrimPrefix(path, root)
		if info.Mode()&(fs.ModeSetuid|fs.ModeSetgid) != 0 {
			t.Errorf("%s is %s", inside, info.Mode())
		}
		if e.Type().IsRegular() {
			size += info.Size()
			if filepath.Base(filepath.Dir(inside)) == "bin" || filepath.Base(filepath.Dir(inside)) == "sbin" {
				programs = append(programs, inside)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "/usr/bin/canaryd /usr/sbin/ipset /usr/sbin/xtables-legacy-multi /usr/sbin/xtables-nft-multi"
	if got := strings.Join(programs, " "); got != want {
		t.Errorf("programs: %s, want %s", got, want)
	}
	const mebibyte = 1 << 20
	t.Logf("%.1f MiB", float64(size)/mebibyte)
	if size > 50*mebibyte {
		t.Errorf("the image is %d MiB large", size/mebibyte)
	}
	for _, of := range []string{"iptables", "ipset", "libc6"} {
		for _, file := range []string{"/var/lib/dpkg/status.d/" + of, "/usr/share/doc/" + of + "/copyright"} {
			if info, err := os.Stat(root + file); err != nil || info.Size() == 0 {
				t.Errorf("%s is not in the image: %v", file, err)
			}
		}
	}
}

// TestExtensions: every match and target of the image can be loaded there, so no library is
// missing.
func TestExtensions(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedRoot(t)
		root := rootfs(t)
		files, err := filepath.Glob(root + "/usr/lib/*/xtables/lib*.so")
		if err != nil || len(files) < 50 {
			t.Fatalf("%d extensions, %v", len(files), err)
		}
		inImage := func(name string, args ...string) (string, error) {
			cmd := exec.CommandContext(t.Context(), name, args...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
			cmd.Dir = "/"
			out, err := cmd.CombinedOutput()
			return string(bytes.TrimSpace(out)), err
		}
		for _, file := range files {
			family, name, _ := strings.Cut(strings.TrimSuffix(filepath.Base(file), ".so"), "_")
			program := map[string]string{"libxt": "iptables-legacy", "libipt": "iptables-legacy", "libip6t": "ip6tables-legacy"}[family]
			// "standard" is ACCEPT and its like.
			option := "-m"
			if name == strings.ToUpper(name) || name == "standard" {
				option = "-j"
			}
			if out, err := inImage("/usr/sbin/"+program, option, name, "-h"); err != nil {
				t.Errorf("%s %s %s -h: %v: %s", program, option, name, err, out)
			}
		}
		// A missing extension is an error, or the loop above would prove nothing.
		if out, err := inImage("/usr/sbin/iptables-legacy", "-m", "nosuchmatch", "-h"); err == nil {
			t.Errorf("a match that is not there is explained: %s", out)
		}
		for program, says := range map[string]string{"iptables-nft": "nf_tables", "ip6tables-legacy": "legacy", "ipset": "ipset v"} {
			if out, err := inImage("/usr/sbin/"+program, "--version"); err != nil || !strings.Contains(out, says) {
				t.Errorf("%s --version: %v: %s", program, err, out)
			}
		}
	})
}

// TestRootFSRefuses: hack/image-rootfs.sh refuses an image without a listed file.
func TestRootFSRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"hack/image-rootfs.sh", "deploy/image/files"} {
		text := source(t, name)
		if name == "deploy/image/files" {
			text += "/usr/sbin/no-such-program\n"
		}
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), dir+"/hack/image-rootfs.sh", nodetest.Canaryd(), dir+"/rootfs").CombinedOutput()
	if want := fmt.Sprintf("image-rootfs: %s is not here", "/usr/sbin/no-such-program"); err == nil || !strings.Contains(string(out), want) {
		t.Errorf("%v: %s, want %q", err, out, want)
	}
}
