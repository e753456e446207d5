package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// writeImage writes the image of all architectures as an OCI layout in a tar archive, which
// engines load and tools push. It returns the index, by whose digest a registry knows the
// image.
func (r release) writeImage(path string) (v1.ImageIndex, error) {
	text, err := os.ReadFile(r.source("deploy/image/Containerfile"))
	if err != nil {
		return nil, err
	}
	config, err := imageConfig(string(text), map[string]string{"VERSION": r.version, "COMMIT": r.commit})
	if err != nil {
		return nil, fmt.Errorf("reading the Containerfile: %w", err)
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, arch := range r.archs {
		image, err := r.image(arch, config)
		if err != nil {
			return nil, fmt.Errorf("the image for %s: %w", arch, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add:        image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	return index, r.writeLayout(path, index)
}

// image makes the image of one architecture: one layer, the root file system.
func (r release) image(arch string, config v1.Config) (v1.Image, error) {
	var layer bytes.Buffer
	err := writeTarGz(&layer, r.when, nil, func(w treeWriter) error { return w.add(r.rootfs(arch), "", false) })
	if err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil }
	compressed, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.ConfigFile(image, &v1.ConfigFile{
		OS: "linux", Architecture: arch, Created: v1.Time{Time: r.when}, Config: config,
		RootFS: v1.RootFS{Type: "layers"},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(image, mutate.Addendum{
		Layer: compressed, MediaType: types.OCILayer,
		History: v1.History{Created: v1.Time{Time: r.when}, CreatedBy: "hack/image-rootfs.sh"},
	})
}

// writeLayout writes the layout and puts it into an archive. Engines read the image's name from
// annotations: containerd from its own, others from the specification's.
func (r release) writeLayout(path string, index v1.ImageIndex) error {
	work, err := os.MkdirTemp("", "canaryd-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	dir := filepath.Join(work, "layout")
	to, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	named := layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": r.tag(),
		"io.containerd.image.name":          r.imageName() + ":" + r.tag(),
	})
	if err := to.AppendIndex(index, named); err != nil {
		return err
	}
	return toFile(path, func(out io.Writer) error {
		return writeTar(out, r.when, nil, func(w treeWriter) error { return w.add(dir, "", false) })
	})
}
