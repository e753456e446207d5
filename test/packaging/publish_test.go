package packaging

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// where returns the names of hack/release/where.
func where(t *testing.T) map[string]string {
	t.Helper()
	names := map[string]string{}
	for line := range strings.Lines(source(t, "hack/release/where")) {
		if name, value, is := strings.Cut(strings.TrimSpace(line), " "); is && name != "#" {
			names[name] = value
		}
	}
	return names
}

// checkout copies the sources as in another clone: elsewhere, younger, and with the modes of
// its umask.
func checkout(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	nstest.Command(t, "sh", "-ec", `umask 027
cd ../..
git ls-files --cached --others --exclude-standard -z | tar -c --null --ignore-failed-read -T - | tar -x --no-same-permissions -m -C "$0"`, dir)
	return dir
}

// read returns a file's text.
func read(t *testing.T, dir, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestWhere: one command changes canaryd's home in all files that name it.
func TestWhere(t *testing.T) {
	nstest.NeedProgram(t, "git")
	dir := checkout(t)
	run := func(words ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), words[0], words[1:]...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", cmd, err, out)
		}
		return string(out)
	}
	run("git", "init", "--quiet")
	run("git", "add", "--all")
	others := map[string]string{
		"repository": "https://github.com/acme/firewall-canary", "image": "registry.example/acme/canaryd",
		"charts": "registry.example/acme/charts", "mail": "canaryd@acme.example",
	}
	for name, old := range where(t) {
		run("hack/where.sh", name, others[name])
		if got := strings.TrimSpace(run("hack/where.sh", name)); got != others[name] {
			t.Errorf("%s is %s", name, got)
		}
		if left, err := exec.CommandContext(t.Context(), "git", "-C", dir, "grep", "-nF", old, "--", ":!CHANGELOG.md", ":!*/testdata/*").Output(); err == nil {
			t.Errorf("%s is left:\n%s", old, left)
		}
	}
	for file, name := range map[string]string{
		"README.md": "repository", "deploy/helm/canaryd/Chart.yaml": "repository", "deploy/image/Containerfile": "repository",
		"deploy/kubernetes/overlays/prometheus-operator/prometheusrule.yaml": "repository", "deploy/grafana/canaryd.json": "repository",
		"deploy/deb/control": "mail", "docs/release.md": "mail",
	} {
		if !strings.Contains(read(t, dir, file), others[name]) {
			t.Errorf("%s does not name %s", file, others[name])
		}
	}
	cmd := exec.CommandContext(t.Context(), "hack/where.sh", "image", "a|b; rm")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("an address with a space is taken:\n%s", out)
	}
}

// TestPublish: hack/publish.sh makes programs upload a complete release, and no other.
func TestPublish(t *testing.T) {
	nstest.NeedProgram(t, "sha256sum", "tar", "awk")
	const digest = "254eddf15d9534e3b20c55469077aa2f24f167aa4b897a36381d3e251e4829c2" // of "image\n"
	names := where(t)
	complete := []string{
		"skopeo copy --all --preserve-digests oci-archive:RELEASE/canaryd_0.1.0_image.tar docker://" + names["image"] + ":0.1.0",
		"skopeo inspect --raw docker://" + names["image"] + ":0.1.0",
		"helm push RELEASE/canaryd-0.1.0.tgz oci://" + names["charts"],
		"gh release view v0.1.0 --repo " + names["repository"] + " --json isDraft --jq .isDraft",
		"gh release create v0.1.0 --repo " + names["repository"] + " --verify-tag --title canaryd 0.1.0 --notes-file NOTES " +
			"RELEASE/SHA256SUMS RELEASE/canaryd-0.1.0.tgz RELEASE/canaryd_0.1.0_image.tar RELEASE/canaryd_0.1.0_manifests.tar.gz",
	}
	for _, tt := range []struct {
		name, version, change string
		want                  []string
		says                  string
	}{
		{"a release", "0.1.0", "true", complete, ""},
		{"a commit that is none", "0.1.0-dev+0123456789ab", "true", nil, "is no release"},
		{"a version without notes", "0.1.9", "true", nil, "CHANGELOG.md has no section 0.1.9"},
		{"a file that was changed", "0.1.0", "echo x >>canaryd-0.1.0.tgz", nil, "canaryd-0.1.0.tgz"},
		{"a file that is missing", "0.1.0", "rm canaryd-0.1.0.tgz", nil, "canaryd-0.1.0.tgz"},
		{"manifests of another image", "0.1.0", "manifests 0000; sums", complete[:2], "the manifests do not name"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, err := filepath.EvalSymlinks(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			release, log := filepath.Join(dir, "release"), filepath.Join(dir, "log")
			for _, program := range []string{"skopeo", "helm", "gh"} {
				script := "#!/bin/sh\necho \"" + program + " $*\" >>" + log + "\nif [ \"$2\" = --raw ]; then echo image; fi\n" +
					"for word; do case $word in /*/tmp.*) cp \"$word\" " + dir + "/notes ;; esac; done\n"
				write(t, filepath.Join(dir, "bin", program), script)
				if err := os.Chmod(filepath.Join(dir, "bin", program), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			write(t, filepath.Join(release, "canaryd-0.1.0.tgz"), "chart")
			write(t, filepath.Join(release, "canaryd_0.1.0_image.tar"), "image")
			cmd := exec.CommandContext(t.Context(), "bash", "-ec", `
manifests() {
	mkdir -p ../canaryd-0.1.0/kubernetes/base
	echo "image: $IMAGE@sha256:$1" >../canaryd-0.1.0/kubernetes/base/daemonset.yaml
	tar -czf canaryd_0.1.0_manifests.tar.gz -C .. canaryd-0.1.0
}
sums() { sha256sum canaryd* >SHA256SUMS; }
manifests `+digest+`; sums; `+tt.change)
			cmd.Dir, cmd.Env = release, append(os.Environ(), "IMAGE="+names["image"])
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			cmd = exec.CommandContext(t.Context(), "../../hack/publish.sh", release, tt.version)
			cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"), "GITHUB_OUTPUT="+filepath.Join(dir, "output"))
			out, err := cmd.CombinedOutput()
			if (err == nil) != (tt.says == "") || !strings.Contains(string(out), tt.says) {
				t.Errorf("%v, want %q in:\n%s", err, tt.says, out)
			}
			var got []string
			if text, err := os.ReadFile(log); err == nil {
				for line := range strings.Lines(strings.ReplaceAll(string(text), release, "RELEASE")) {
					if before, after, is := strings.Cut(strings.TrimSpace(line), "--notes-file "); is {
						_, files, _ := strings.Cut(after, " ")
						line = before + "--notes-file NOTES " + files
					}
					got = append(got, strings.TrimSpace(line))
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("asked for (-want +got):\n%s", diff)
			}
			if tt.says != "" {
				return
			}
			if notes := read(t, dir, "notes"); strings.Contains(notes, "## [") || len(notes) < 100 {
				t.Errorf("the notes are:\n%s", notes)
			}
			if got, want := read(t, dir, "output"), "image="+names["image"]+"\ndigest=sha256:"+digest+"\n"; got != want {
				t.Errorf("a later step is told %q, want %q", got, want)
			}
		})
	}
}
