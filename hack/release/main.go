// Release adds the remaining files of a release to built programs and assembled root file
// systems. These are the image, manifests and a Helm chart with its digest, bills of materials,
// and the sums of all files. hack/release.sh runs it; docs/release.md describes the results.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// A release has the inputs and outputs of one release.
type release struct {
	version, commit string
	// repository is the place from which the image will be pulled. If it is empty, operators
	// name their own.
	repository string
	when       time.Time
	// root has the sources, work has a folder for each architecture, and out takes the files.
	root, work, out string
	archs           []string
}

func main() {
	var r release
	var epoch int64
	flag.StringVar(&r.version, "version", "", "what is released")
	flag.StringVar(&r.commit, "commit", "", "what it is made of")
	flag.StringVar(&r.repository, "repository", "", "the image's name without a tag")
	flag.Int64Var(&epoch, "epoch", 0, "when all was made, in seconds since 1970")
	flag.StringVar(&r.root, "root", ".", "folder with the sources")
	flag.StringVar(&r.work, "work", "", "folder with ARCHITECTURE/rootfs")
	flag.StringVar(&r.out, "out", "", "folder that has programs and packages already")
	flag.Parse()
	if !versions.MatchString(r.version) {
		fmt.Fprintf(os.Stderr, "release: %q is no version of the form 0.1.0 or 0.1.0-dev+COMMIT\n", r.version)
		os.Exit(2)
	}
	r.when, r.archs = time.Unix(epoch, 0).UTC(), []string{"amd64", "arm64"}
	if err := r.make(); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// versions is the form of the version, by semver.org; Helm accepts no other.
var versions = regexp.MustCompile(`^\d+\.\d+\.\d+(-[0-9A-Za-z.]+)?(\+[0-9A-Za-z.]+)?$`)

func (r release) source(path string) string { return filepath.Join(r.root, path) }

func (r release) rootfs(arch string) string { return filepath.Join(r.work, arch, "rootfs") }

func (r release) program(arch string) string { return r.file("_linux_" + arch) }

// plugin returns the path of the plugin of kubectl.
func (r release) plugin(arch string) string {
	return filepath.Join(r.out, "kubectl-canaryd_"+r.version+"_linux_"+arch)
}

// file returns the path of a file of the release, by the part after the version in its name.
func (r release) file(rest string) string {
	return filepath.Join(r.out, "canaryd_"+r.version+rest)
}

// imageName returns the image's name in the archive, for engines that load it.
func (r release) imageName() string {
	if r.repository == "" {
		return "localhost/canaryd"
	}
	return r.repository
}

// tag returns the image's tag, which may not contain a "+".
func (r release) tag() string { return strings.ReplaceAll(r.version, "+", "-") }

func (r release) make() error {
	index, err := r.writeImage(r.file("_image.tar"))
	if err != nil {
		return fmt.Errorf("making the image: %w", err)
	}
	digest, err := index.Digest()
	if err != nil {
		return err
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		if err := r.writeBills(d); err != nil {
			return fmt.Errorf("writing bills of materials: %w", err)
		}
	}
	if err := r.writeManifests(r.file("_manifests.tar.gz"), digest.String()); err != nil {
		return fmt.Errorf("writing manifests: %w", err)
	}
	if err := r.writeChart(filepath.Join(r.out, "canaryd-"+r.version+".tgz"), digest.String()); err != nil {
		return fmt.Errorf("writing the chart: %w", err)
	}
	return r.writeSums()
}

func (r release) writeBills(image v1.Descriptor) error {
	arch := image.Platform.Architecture
	for name, file := range map[string]string{"canaryd": r.program(arch), "kubectl-canaryd": r.plugin(arch)} {
		if err := r.writeProgramBill(file+".spdx.json", name, file); err != nil {
			return err
		}
	}
	return r.writeImageBill(r.file("_image_"+arch+".spdx.json"), arch, image.Digest.String())
}

// writeSums writes SHA256SUMS, the file that is signed.
func (r release) writeSums() error {
	var files []string
	for _, pattern := range []string{"canaryd*", "kubectl-canaryd*"} {
		found, err := filepath.Glob(filepath.Join(r.out, pattern))
		if err != nil {
			return err
		}
		files = append(files, found...)
	}
	slices.Sort(files)
	return toFile(filepath.Join(r.out, "SHA256SUMS"), func(out io.Writer) error {
		for _, file := range files {
			digest, err := sum(file)
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintf(out, "%s  %s\n", digest, filepath.Base(file)); err != nil {
				return err
			}
		}
		return nil
	})
}
