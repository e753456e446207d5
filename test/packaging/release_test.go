//go:build release

package packaging

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// unpacked is hack/install-deps.sh's folder with the parts of a release, and containerd.
const unpacked = "/var/cache/canaryd-test/release"

// releaseFiles are all files of a release 0.0.1, apart from its sums.
var releaseFiles = []string{
	"canaryd-0.0.1.tgz",
	"canaryd_0.0.1_amd64.deb", "canaryd_0.0.1_amd64.rpm", "canaryd_0.0.1_arm64.deb", "canaryd_0.0.1_arm64.rpm",
	"canaryd_0.0.1_image.tar", "canaryd_0.0.1_image_amd64.spdx.json", "canaryd_0.0.1_image_arm64.spdx.json",
	"canaryd_0.0.1_linux_amd64", "canaryd_0.0.1_linux_amd64.spdx.json",
	"canaryd_0.0.1_linux_arm64", "canaryd_0.0.1_linux_arm64.spdx.json",
	"canaryd_0.0.1_manifests.tar.gz",
	"kubectl-canaryd_0.0.1_linux_amd64", "kubectl-canaryd_0.0.1_linux_amd64.spdx.json",
	"kubectl-canaryd_0.0.1_linux_arm64", "kubectl-canaryd_0.0.1_linux_arm64.spdx.json",
}

// releaseOf makes a release of the sources in a folder, under an umask and in a time zone.
func releaseOf(t *testing.T, sources, umask, zone string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "release")
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "umask "+umask+" && exec hack/release.sh \"$@\"", "sh",
		out, "0.0.1", "0123456789ab", "1700000000", "registry.example/canaryd")
	cmd.Dir = sources
	cmd.Env = append(os.Environ(), "CANARYD_DEBIAN_ROOTS="+unpacked+"/debian", "TZ="+zone)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("hack/release.sh: %v\n%s", err, text)
	}
	return out
}

// TestRelease: a release is made twice, from two checkouts, with the same bytes. It has all
// files that docs/release.md lists, and one of Debian's engines runs its image.
func TestRelease(t *testing.T) {
	nstest.NeedRoot(t)
	nstest.NeedProgram(t, "dpkg-deb", "rpmbuild", "readelf", "git", "sha256sum")
	nstest.NeedFile(t, unpacked+"/.unpacked")
	dir := releaseOf(t, "../..", "022", "UTC")
	again := releaseOf(t, checkout(t), "077", "Asia/Tokyo")

	sums := read(t, dir, "SHA256SUMS")
	if diff := cmp.Diff(sums, read(t, again, "SHA256SUMS")); diff != "" {
		t.Errorf("made again, the release is another one (-first +second):\n%s", diff)
	}
	var listed []string
	for line := range strings.Lines(sums) {
		listed = append(listed, strings.Fields(line)[1])
	}
	if diff := cmp.Diff(releaseFiles, listed); diff != "" {
		t.Errorf("SHA256SUMS lists (-want +got):\n%s", diff)
	}
	document := source(t, "docs/release.md")
	for _, file := range append([]string{"SHA256SUMS"}, releaseFiles...) {
		name := strings.NewReplacer("0.0.1", "VERSION", "amd64", "ARCH", "arm64", "ARCH").Replace(file)
		if !strings.Contains(document, "`"+name+"`") {
			t.Errorf("docs/release.md does not list %s", name)
		}
	}
	t.Run("programs", func(t *testing.T) { wantPrograms(t, dir) })
	t.Run("image", func(t *testing.T) { wantImage(t, dir) })
	if out := nstest.Command(t, "sh", "-c", "cd \"$0\" && sha256sum --check SHA256SUMS", dir); strings.Count(out, ": OK\n") != len(releaseFiles) {
		t.Errorf("sha256sum finds:\n%s", out)
	}
	t.Run("engine", func(t *testing.T) { wantRuns(t, dir) })
}

// mostBytes bounds the program: a kubelet executes it for each probe of a pod, and each node of a
// fleet downloads it. docs/release.md has the flags of go build that keep it so small.
const mostBytes = 16_000_000

// wantPrograms wants programs that need no library and are small, and packages of them, for each
// architecture.
func wantPrograms(t *testing.T, dir string) {
	for arch, want := range map[string]struct {
		machine elf.Machine
		rpm     string
	}{"amd64": {elf.EM_X86_64, "x86_64"}, "arm64": {elf.EM_AARCH64, "aarch64"}} {
		for _, name := range []string{"canaryd", "kubectl-canaryd"} {
			path := filepath.Join(dir, name+"_0.0.1_linux_"+arch)
			if info, err := os.Stat(path); err != nil || info.Size() > mostBytes {
				t.Errorf("%s for %s: %v, %d bytes, more than %d", name, arch, err, info.Size(), mostBytes)
			}
			file, err := elf.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			if file.Machine != want.machine || slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
				t.Errorf("%s for %s is for %s, or is not linked statically", name, arch, file.Machine)
			}
			file.Close()
		}
		if got := nstest.Command(t, "dpkg-deb", "-f", filepath.Join(dir, "canaryd_0.0.1_"+arch+".deb"), "Architecture", "Version"); got != "Architecture: "+arch+"\nVersion: 0.0.1\n" {
			t.Errorf("the .deb for %s says %q", arch, got)
		}
		if got := nstest.Command(t, "rpm", "-qp", "--queryformat", "%{ARCH} %{VERSION}", filepath.Join(dir, "canaryd_0.0.1_"+arch+".rpm")); got != want.rpm+" 0.0.1" {
			t.Errorf("the .rpm for %s says %q", arch, got)
		}
	}
	if got := nstest.Command(t, filepath.Join(dir, "canaryd_0.0.1_linux_amd64"), "version"); !strings.HasPrefix(got, "canaryd 0.0.1, commit 0123456789ab, go") {
		t.Errorf("the program says %q", got)
	}
	if got, want := nstest.Command(t, filepath.Join(dir, "kubectl-canaryd_0.0.1_linux_amd64"), "version"), "kubectl-canaryd 0.0.1, commit 0123456789ab\n"; got != want {
		t.Errorf("the plugin says %q, want %q", got, want)
	}
}

// A blob has the used fields of an OCI layout's JSON: an index, a manifest, or a configuration.
type blob struct {
	Manifests []struct {
		Digest   string
		Platform struct{ OS, Architecture string }
	}
	Layers []struct{ Digest string }
	Config json.RawMessage
}

// wantImage wants one layer for each architecture, with the same files, and the settings of the
// Containerfile for its runs.
func wantImage(t *testing.T, dir string) {
	files := inTar(t, strings.NewReader(read(t, dir, "canaryd_0.0.1_image.tar")))
	open := func(text string) (b blob) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), &b); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return b
	}
	byDigest := func(digest string) string { return files["blobs/"+strings.Replace(digest, ":", "/", 1)] }
	index := open(files["index.json"])
	if len(index.Manifests) != 1 {
		t.Fatalf("the archive has %d images", len(index.Manifests))
	}
	names := map[string][]string{}
	for _, m := range open(byDigest(index.Manifests[0].Digest)).Manifests {
		manifest := open(byDigest(m.Digest))
		var ref struct{ Digest string }
		if err := json.Unmarshal(manifest.Config, &ref); err != nil || len(manifest.Layers) != 1 {
			t.Fatalf("%v, %d layers", err, len(manifest.Layers))
		}
		wantConfig(t, open(byDigest(ref.Digest)).Config)
		// tar, because Go with the race detector took 20 s to unpack both.
		for name := range strings.Lines(nstest.CommandInput(t, byDigest(manifest.Layers[0].Digest), "tar", "-tz")) {
			name = strings.NewReplacer("aarch64-linux-gnu", "TRIPLET", "x86_64-linux-gnu", "TRIPLET", "\n", "").Replace(name)
			switch name { // the loader has a folder of its own on amd64 only
			case "lib64/", "lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1":
			default:
				names[m.Platform.Architecture] = append(names[m.Platform.Architecture], name)
			}
		}
		slices.Sort(names[m.Platform.Architecture])
	}
	if diff := cmp.Diff(names["amd64"], names["arm64"]); diff != "" || len(names["amd64"]) < 100 {
		t.Errorf("%d files in the image (-amd64 +arm64):\n%s", len(names["amd64"]), diff)
	}
}

// wantConfig wants the settings of the Containerfile in an image.
func wantConfig(t *testing.T, text json.RawMessage) {
	t.Helper()
	var got struct {
		User                 string
		Env, Entrypoint, Cmd []string
		Labels               map[string]string
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if got.User != instruction(t, "USER") || strings.Join(got.Env, " ") != instruction(t, "ENV") ||
		!slices.Equal(got.Entrypoint, words(t, "ENTRYPOINT")) || !slices.Equal(got.Cmd, words(t, "CMD")) {
		t.Errorf("the image is run as %+v", got)
	}
	if got.Labels["org.opencontainers.image.version"] != "0.0.1" || got.Labels["org.opencontainers.image.revision"] != "0123456789ab" || len(got.Labels) != 7 {
		t.Errorf("labels: %v", got.Labels)
	}
}

// wantRuns wants containerd to load the image and to run canaryd and iptables in it, and manifests
// and chart to name the loaded image.
func wantRuns(t *testing.T, dir string) {
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
		"sh", "-c", engine, "engine", unpacked+"/engine", t.TempDir(), filepath.Join(dir, "canaryd_0.0.1_image.tar"), "registry.example/canaryd:0.0.1")
	out, err := cmd.CombinedOutput()
	text := string(out)
	for _, want := range []string{"linux/amd64,linux/arm64", "\ncanaryd 0.0.1, commit 0123456789ab, go", "\niptables v1.", "(nf_tables)\n", "(legacy)\n"} {
		if err != nil || !strings.Contains(text, want) {
			t.Fatalf("%v, want %q of\n%s", err, want, text)
		}
	}
	_, digest, _ := strings.Cut(text, "application/vnd.oci.image.index.v1+json ")
	digest, _, _ = strings.Cut(digest, " ")

	files := inTarGz(t, read(t, dir, "canaryd_0.0.1_manifests.tar.gz"))
	var set daemonSet
	if err := yaml.Unmarshal([]byte(files["canaryd-0.0.1/kubernetes/base/daemonset.yaml"]), &set); err != nil {
		t.Fatal(err)
	}
	if got, want := set.Spec.Template.Spec.Containers[0].Image, "registry.example/canaryd@"+digest; got != want {
		t.Errorf("manifests name %s, containerd loaded %s", got, want)
	}
	if !strings.Contains(files["canaryd-0.0.1/kubernetes/sidecar/canaryd.yaml"], "image: registry.example/canaryd@"+digest+"\n") {
		t.Error("the sidecar has another image")
	}
	files = inTarGz(t, read(t, dir, "canaryd-0.0.1.tgz"))
	for file, want := range map[string]string{
		"canaryd/Chart.yaml":                    "\nversion: \"0.0.1\"\nappVersion: \"0.0.1\"\n",
		"canaryd/values.yaml":                   "\n  digest: \"" + digest + "\"\n",
		"canaryd/files/canaryd.rules.yaml":      "alert: CanarydFlush\n",
		"canaryd/files/dashboard.json":          "\"title\"",
		"canaryd/templates/daemonset.yaml":      "kind: DaemonSet",
		"canaryd/templates/_helpers.tpl":        "canaryd.image",
		"canaryd/values.schema.json":            "additionalProperties",
		"canaryd/templates/podmonitor.yaml":     "PodMonitor",
		"canaryd/templates/dashboard.yaml":      "ConfigMap",
		"canaryd/templates/prometheusrule.yaml": "PrometheusRule",
	} {
		if !strings.Contains(files[file], want) {
			t.Errorf("the chart's %s has no %q", file, want)
		}
	}
}

// inTarGz returns the files of an archive by name.
func inTarGz(t *testing.T, archive string) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(strings.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	return inTar(t, zip)
}

func inTar(t *testing.T, archive io.Reader) map[string]string {
	t.Helper()
	all := map[string]string{}
	for r := tar.NewReader(archive); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		var text bytes.Buffer
		if _, err := io.Copy(&text, r); err != nil {
			t.Fatal(err)
		}
		all[header.Name] = text.String()
	}
}

// engine starts a containerd of its own, makes it load an image and runs programs in it.
const engine = `set -eu
PATH=$1/usr/bin:$1/usr/sbin:$PATH dir=$2 archive=$3 image=$4
namespace=canaryd-test-$(basename "$(dirname "$dir")")
cat >"$dir/config.toml" <<END
version = 2
root = "$dir/root"
state = "$dir/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "$dir/socket"
END
containerd -c "$dir/config.toml" >"$dir/log" 2>&1 &
# Control groups are of the machine and stay when containerd is killed.
trap 'test $? = 0 || cat "$dir/log"; find /sys/fs/cgroup -depth -type d -name "$namespace" -exec rmdir {} +' EXIT
for i in $(seq 100); do
	test ! -S "$dir/socket" || break
	sleep 0.1
done
ctr() { command ctr -a "$dir/socket" -n "$namespace" "$@"; }
ctr images import --snapshotter native --platform linux/amd64 "$archive"
ctr images ls
run() { ctr run --rm --read-only --snapshotter native "$image" "$@"; }
run version canaryd version
run nft iptables-nft --version
run legacy ip6tables-legacy --version
`
