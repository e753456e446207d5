package main

import (
	"bytes"
	"io"
	"path"
	"regexp"
	"strings"
)

// unnamed is the image in the sources' manifests, where the operator's own belongs.
const unnamed = "canaryd/NAME-YOUR-OWN-IMAGE"

// writeManifests writes deploy's files for a cluster, with the image's digest.
func (r release) writeManifests(file, digest string) error {
	name := unnamed
	if r.repository != "" {
		name = r.repository
	}
	before, after := []byte("image: "+unnamed+"\n"), []byte("image: "+name+"@"+digest+"\n")
	edit := func(_ string, text []byte) []byte { return bytes.ReplaceAll(text, before, after) }
	return toFile(file, func(out io.Writer) error {
		return writeTarGz(out, r.when, edit, func(w treeWriter) error {
			for _, folder := range []string{"grafana", "kubernetes", "node-problem-detector", "prometheus"} {
				if err := w.add(r.source("deploy/"+folder), path.Join("canaryd-"+r.version, folder), false); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// writeChart writes the Helm chart, with the version and the image's digest in it.
func (r release) writeChart(file, digest string) error {
	edit := func(name string, text []byte) []byte {
		var replace *strings.Replacer
		switch name {
		case "canaryd/Chart.yaml":
			replace = strings.NewReplacer("\nversion: 0.0.0\n", "\nversion: "+semantic(r.version)+"\n", "appVersion: 0.0.0\n", "appVersion: \""+r.version+"\"\n")
		case "canaryd/values.yaml":
			replace = strings.NewReplacer("repository: \"\"\n", "repository: \""+r.repository+"\"\n", "digest: \"\"\n", "digest: \""+digest+"\"\n")
		default:
			return text
		}
		return []byte(replace.Replace(string(text)))
	}
	return toFile(file, func(out io.Writer) error {
		return writeTarGz(out, r.when, edit, func(w treeWriter) error {
			return w.add(r.source("deploy/helm/canaryd"), "canaryd", true)
		})
	})
}

var (
	released    = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)(?:-(.*))?$`)
	notSemantic = regexp.MustCompile(`[^0-9A-Za-z]+`)
)

// semantic returns a version that Helm takes, of what git describe says: that of a tag, the same
// with what came after it as build metadata, or that of a commit, before every release.
func semantic(version string) string {
	m := released.FindStringSubmatch(version)
	switch {
	case m == nil:
		return "0.0.0-g" + strings.Trim(notSemantic.ReplaceAllString(version, "."), ".")
	case m[2] == "":
		return m[1]
	default:
		return m[1] + "+" + notSemantic.ReplaceAllString(m[2], ".")
	}
}
