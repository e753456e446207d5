package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// TestVersionIsSaidOnce: all places with the version follow cmd/canaryd/VERSION.
func TestVersionIsSaidOnce(t *testing.T) {
	version := strings.TrimSpace(source(t, "cmd/canaryd/VERSION"))
	if !regexp.MustCompile(`^\d+\.\d+\.\d+$`).MatchString(version) {
		t.Fatalf("cmd/canaryd/VERSION has %q", version)
	}
	for path, first := range map[string]*regexp.Regexp{
		"CHANGELOG.md":                   regexp.MustCompile(`(?m)^## \[(\d[^\]]*)\]`),
		"deploy/helm/canaryd/Chart.yaml": regexp.MustCompile(`(?m)^version: (\S+)-dev\n`),
		"docs/fleet.md":                  regexp.MustCompile(`(?m)^\| (\d+\.\d+\.\d+) \|`),
	} {
		found := first.FindStringSubmatch(source(t, path))
		if found == nil || found[1] != version {
			t.Errorf("%s says %q, cmd/canaryd/VERSION %s", path, found, version)
		}
	}
	named := regexp.MustCompile(`(?:\?ref=v|newTag: |/canaryd:|image\.tag=)(\d+\.\d+\.\d+)`)
	for _, path := range []string{"README.md", "docs/install.md", "deploy/image/README.md", "deploy/kubernetes/README.md", "deploy/helm/canaryd/README.md"} {
		all := named.FindAllStringSubmatch(source(t, path), -1)
		for _, found := range all {
			if found[1] != version {
				t.Errorf("%s names %s, cmd/canaryd/VERSION %s", path, found[0], version)
			}
		}
		if len(all) == 0 {
			t.Errorf("%s names no version", path)
		}
	}
	if chart := source(t, "deploy/helm/canaryd/Chart.yaml"); !strings.Contains(chart, "\nappVersion: "+version+"-dev\n") {
		t.Errorf("the chart has another appVersion than %s-dev:\n%s", version, chart)
	}
}

// repository makes a repository with one commit that includes hack/version.sh. It returns its
// folder, and a function that runs a command there.
func repository(t *testing.T) (string, func(name string, args ...string) (string, error)) {
	t.Helper()
	nstest.NeedProgram(t, "git")
	dir := t.TempDir()
	run := func(name string, args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "HOME="+dir,
			"GIT_CEILING_DIRECTORIES="+filepath.Dir(dir),
			"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@canaryd.example", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@canaryd.example")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	write(t, filepath.Join(dir, "hack/version.sh"), source(t, "hack/version.sh"))
	write(t, filepath.Join(dir, "cmd/canaryd/VERSION"), "1.2.3\n")
	write(t, filepath.Join(dir, "README.md"), "one\n")
	for _, args := range [][]string{{"init", "-q"}, {"add", "."}, {"commit", "-qm", "first"}} {
		if out, err := run("git", args...); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	return dir, run
}

// TestVersionOfACheckout: only the release's tag, without changes, has the release's version.
func TestVersionOfACheckout(t *testing.T) {
	dir, run := repository(t)
	commit, err := run("git", "rev-parse", "--short=12", "HEAD")
	if err != nil {
		t.Fatal(commit, err)
	}
	commit = strings.TrimSpace(commit)
	var got []string
	after := func(args ...string) {
		t.Helper()
		if out, err := run(args[0], args[1:]...); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		out, err := run("bash", "hack/version.sh")
		if err != nil {
			t.Errorf("after %v: %v", args, err)
		}
		got = append(got, strings.TrimSpace(out))
	}
	after("true")
	after("git", "tag", "v1.2.2")
	after("git", "tag", "-a", "-m", "the release", "v1.2.3")
	write(t, filepath.Join(dir, "cmd/canaryd/VERSION"), "1.2.4\n")
	after("true")
	write(t, filepath.Join(dir, "cmd/canaryd/VERSION"), "1.2.3\n")
	after("true")
	write(t, filepath.Join(dir, "README.md"), "two\n")
	after("true")
	after("rm", "-r", ".git")
	want := []string{"1.2.3-dev+" + commit, "1.2.3-dev+" + commit, "1.2.3", "1.2.4-dev+" + commit + ".dirty", "1.2.3", "1.2.3-dev+" + commit + ".dirty", "1.2.3-dev"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("versions (-want +got):\n%s", diff)
	}
}

// commandsUnder returns the commands of a document's sections, one a line.
func commandsUnder(document string, headings ...string) []string {
	var all []string
	for _, heading := range headings {
		_, section, _ := strings.Cut(document, "\n## "+heading+"\n")
		section, _, _ = strings.Cut(section, "\n## ")
		for i, block := range strings.Split(section, "```") {
			if lines, is := strings.CutPrefix(block, "sh\n"); is && i%2 == 1 {
				all = append(all, strings.Split(strings.TrimSpace(lines), "\n")...)
			}
		}
	}
	return all
}

// TestSigning runs the commands of docs/release.md for signing and of docs/fleet.md for
// verifying, with a key of its own. They notice another key, a moved tag and a changed file.
func TestSigning(t *testing.T) {
	nstest.NeedProgram(t, "ssh-keygen", "sha256sum")
	document := source(t, "docs/release.md")
	line := regexp.MustCompile(`(?m)^(\S+@\S+ namespaces=\S+ )ssh-ed25519 AAAA\.\.\.$`).FindStringSubmatch(document)
	if line == nil {
		t.Fatal("docs/release.md shows no line of allowed_signers")
	}
	dir, run := repository(t)
	download := filepath.Join(dir, "bin/release")
	write(t, download+"/canaryd_1.2.3_linux_amd64", "program")
	must := func(script string) string {
		t.Helper()
		out, err := run("sh", "-ec", script)
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return out
	}
	must(`ssh-keygen -q -t ed25519 -N '' -f KEY; ssh-keygen -q -t ed25519 -N '' -f OTHER
cd bin/release; sha256sum canaryd* >SHA256SUMS`)
	must(`echo '` + line[1] + `'"$(cat KEY.pub)" | tee allowed_signers >bin/release/allowed_signers`)

	do := func(document, heading string) (string, error) {
		commands := commandsUnder(document, heading)
		if len(commands) == 0 {
			t.Fatalf("there are no commands under %q", heading)
		}
		var log strings.Builder
		for _, command := range commands {
			if command == "make release" { // TestRelease has it
				continue
			}
			if strings.Contains(command, "-Y verify") || strings.HasPrefix(command, "sha256sum") {
				command = "cd bin/release; " + command
			}
			out, err := run("sh", "-ec", strings.ReplaceAll(command, "VERSION", "1.2.3"))
			log.WriteString(out)
			if err != nil {
				return log.String(), err
			}
		}
		return log.String(), nil
	}
	verify := func() (string, error) { return do(source(t, "docs/fleet.md"), "Verify a release") }
	if out, err := do(document, "Signing"); err != nil {
		t.Fatalf("signing: %v\n%s", err, out)
	}
	out, err := verify()
	for _, want := range []string{`Good "git" signature for canaryd@users.noreply.github.com`, `Good "file" signature for canaryd@users.noreply.github.com`, "canaryd_1.2.3_linux_amd64: OK"} {
		if err != nil || !strings.Contains(out, want) {
			t.Fatalf("verifying: %v, want %q of\n%s", err, want, out)
		}
	}
	const before = "git update-ref refs/tags/v1.2.3 refs/tags/kept"
	must("git update-ref refs/tags/kept refs/tags/v1.2.3")
	for name, change := range map[string][2]string{
		"a changed file":            {"echo x >>bin/release/canaryd_1.2.3_linux_amd64", "printf program >bin/release/canaryd_1.2.3_linux_amd64"},
		"sums of another key":       {"cd bin/release; mv SHA256SUMS.sig kept; ssh-keygen -q -Y sign -f ../../OTHER -n file SHA256SUMS", "cd bin/release; mv kept SHA256SUMS.sig"},
		"a tag of another key":      {"git -c gpg.format=ssh -c user.signingKey=OTHER tag --force --sign --message=x v1.2.3 HEAD", before},
		"a tag without a signature": {"git tag --force v1.2.3 HEAD", before},
	} {
		must(change[0])
		if out, err := verify(); err == nil {
			t.Errorf("%s is not noticed:\n%s", name, out)
		}
		must(change[1])
		if out, err := verify(); err != nil {
			t.Fatalf("after %s: %v\n%s", name, err, out)
		}
	}
}
