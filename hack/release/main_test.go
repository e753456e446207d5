package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
)

// sample makes a release of the present sources and a root file system of three files. This
// test's own program takes the place of canaryd's.
func sample(t *testing.T) release {
	t.Helper()
	r := release{
		version: "1.2.3-dev+abcdef0", commit: "abcdef0", when: time.Unix(1700000000, 0).UTC(),
		root: "../..", work: t.TempDir(), out: t.TempDir(), archs: []string{"amd64", "arm64"},
	}
	self, err := os.Executable()
	must(t, err)
	for _, arch := range r.archs {
		root := r.rootfs(arch)
		must(t, os.MkdirAll(root+"/var/lib/dpkg/status.d", 0o755))
		must(t, os.MkdirAll(root+"/usr/bin", 0o700))
		must(t, os.MkdirAll(root+"/tmp", 0o755))
		must(t, os.Chmod(root+"/tmp", 0o777|fs.ModeSticky))
		must(t, os.WriteFile(root+"/usr/bin/canaryd", []byte(arch), 0o700))
		must(t, os.Symlink("canaryd", root+"/usr/bin/alias"))
		must(t, os.WriteFile(root+"/var/lib/dpkg/status.d/iptables", []byte("Package: iptables\nVersion: 1:1.8.9-2+b1\nArchitecture: "+arch+"\nDescription: rules\n Version: 9\n"), 0o640))
		text, err := os.ReadFile(self)
		must(t, err)
		must(t, os.WriteFile(r.program(arch), text, 0o755))
		must(t, os.WriteFile(r.plugin(arch), text, 0o755))
	}
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestImage: the archive is a layout that a registry takes, for both architectures.
func TestImage(t *testing.T) {
	r := sample(t)
	must(t, r.make())
	dir := t.TempDir()
	unpack(t, r.file("_image.tar"), dir)
	index, err := layout.ImageIndexFromPath(dir)
	must(t, err)
	must(t, validate.Index(index))
	top, err := index.IndexManifest()
	must(t, err)
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations["io.containerd.image.name"] != "localhost/canaryd:1.2.3-dev-abcdef0" {
		t.Fatalf("the archive holds %+v", top.Manifests)
	}
	inside, err := index.ImageIndex(top.Manifests[0].Digest)
	must(t, err)
	manifest, err := inside.IndexManifest()
	must(t, err)
	for i, arch := range r.archs {
		image, err := inside.Image(manifest.Manifests[i].Digest)
		must(t, err)
		config, err := image.ConfigFile()
		must(t, err)
		if config.Architecture != arch || !config.Created.Equal(r.when) || config.Config.Entrypoint[0] != "/usr/bin/canaryd" {
			t.Errorf("the image for %s says %+v", arch, config)
		}
		layers, err := image.Layers()
		must(t, err)
		files, err := layers[0].Uncompressed()
		must(t, err)
		modes := map[string]int64{}
		for archive := tar.NewReader(files); ; {
			header, err := archive.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(t, err)
			if modes[header.Name] = header.Mode; header.Uid != 0 || header.Gid != 0 || !header.ModTime.Equal(r.when) {
				t.Errorf("%+v", header)
			}
		}
		if modes["tmp/"] != 0o1777 || modes["usr/bin/"] != 0o755 || modes["usr/bin/canaryd"] != 0o755 || modes["var/lib/dpkg/status.d/iptables"] != 0o644 {
			t.Errorf("modes: %v", modes)
		}
	}
}

func unpack(t *testing.T, archive, dir string) {
	t.Helper()
	text, err := os.ReadFile(archive)
	must(t, err)
	for r := tar.NewReader(bytes.NewReader(text)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		must(t, err)
		path := filepath.Join(dir, header.Name)
		if header.Typeflag == tar.TypeDir {
			must(t, os.MkdirAll(path, 0o755))
			continue
		}
		must(t, toFile(path, func(w io.Writer) error { _, err := io.Copy(w, r); return err }))
	}
}

// TestBills: the bills are SPDX; each name belongs to one package, and related packages exist.
func TestBills(t *testing.T) {
	r := sample(t)
	must(t, r.make())
	for file, want := range map[string][]string{
		r.program("arm64") + ".spdx.json": {"pkg:golang/stdlib@", "pkg:golang/github.com/google/go-containerregistry@v", "pkg:golang/github.com/canaryd/canaryd@v1.2.3-dev+abcdef0"},
		r.plugin("amd64") + ".spdx.json":  {"pkg:golang/stdlib@", "pkg:golang/github.com/canaryd/canaryd@v1.2.3-dev+abcdef0#cmd/kubectl-canaryd"},
		r.file("_image_arm64.spdx.json"):  {"pkg:golang/stdlib@", "pkg:deb/debian/iptables@1%3A1.8.9-2%2Bb1?arch=arm64", "pkg:oci/canaryd@sha256%3A"},
	} {
		text, err := os.ReadFile(file)
		must(t, err)
		document, err := spdxjson.Read(bytes.NewReader(text))
		must(t, err)
		known := map[common.ElementID]bool{"DOCUMENT": true}
		var purls []string
		for _, p := range document.Packages {
			if known[p.PackageSPDXIdentifier] {
				t.Errorf("%s: two packages are called %s", file, p.PackageSPDXIdentifier)
			}
			known[p.PackageSPDXIdentifier] = true
			purls = append(purls, p.PackageExternalReferences[0].Locator)
		}
		related := map[common.ElementID]bool{"DOCUMENT": true}
		for _, relation := range document.Relationships {
			if !known[relation.RefA.ElementRefID] || !known[relation.RefB.ElementRefID] {
				t.Errorf("%s: %v names no package", file, relation)
			}
			related[relation.RefB.ElementRefID] = true
		}
		if len(related) != len(known) {
			t.Errorf("%s: %d packages, %d are related to something", file, len(known), len(related))
		}
		for _, purl := range want {
			if !strings.Contains(strings.Join(purls, "\n"), purl) {
				t.Errorf("%s has no %s", file, purl)
			}
		}
	}
}

// TestSums: the sums cover all files, including the plugin's.
func TestSums(t *testing.T) {
	r := sample(t)
	must(t, r.make())
	text, err := os.ReadFile(filepath.Join(r.out, "SHA256SUMS"))
	must(t, err)
	entries, err := os.ReadDir(r.out)
	must(t, err)
	for _, entry := range entries {
		if name := entry.Name(); strings.Contains(string(text), "  "+name+"\n") == (name == "SHA256SUMS") {
			t.Errorf("%s: whether it is in SHA256SUMS is wrong:\n%s", name, text)
		}
	}
}

// TestContainerfileRefuses: a setting that would be lost on the way into the image is an error.
func TestContainerfileRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"FROM debian\nCMD [\"run\"]\n":                              "not made from scratch",
		"\nFROM scratch\nCOPY a /\n":                                "no ENTRYPOINT",
		"\nFROM scratch\nENTRYPOINT [\"/a\"]\nVOLUME /var\n":        "VOLUME /var: the instruction is not known here",
		"\nFROM scratch\nENTRYPOINT /a\n":                           "ENTRYPOINT /a",
		"\nFROM scratch\nLABEL \\\n  a=b\nENTRYPOINT [\"/a\"]\n":    "no label",
		"FROM scratch AS one\n\nFROM debian\nENTRYPOINT [\"/a\"]\n": "not made from scratch",
	} {
		if _, err := imageConfig(text, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
