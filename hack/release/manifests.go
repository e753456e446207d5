package main

import (
	"bytes"
	"io"
	"path"
	"regexp"
	"strings"
)

// unnamed is the image in the sources' manifests, which the operator replaces.
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

// chartVersion matches the two lines of a chart with its version and its program's.
var chartVersion = regexp.MustCompile(`(?m)^(v|appV)ersion: .*\n`)

// writeChart writes the Helm chart, with the version and the image's digest in it.
func (r release) writeChart(file, digest string) error {
	edit := func(name string, text []byte) []byte {
		switch name {
		case "canaryd/Chart.yaml":
			return chartVersion.ReplaceAll(text, []byte("${1}ersion: \""+r.version+"\"\n"))
		case "canaryd/values.yaml":
			replace := strings.NewReplacer("repository: \"\"\n", "repository: \""+r.repository+"\"\n", "digest: \"\"\n", "digest: \""+digest+"\"\n")
			return []byte(replace.Replace(string(text)))
		default:
			return text
		}
	}
	return toFile(file, func(out io.Writer) error {
		return writeTarGz(out, r.when, edit, func(w treeWriter) error {
			return w.add(r.source("deploy/helm/canaryd"), "canaryd", true)
		})
	})
}
