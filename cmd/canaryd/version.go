package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
)

// release is the number of this release, or of the next one. Its only source is this file: the
// Makefile and a test of all other places read it, too.
//
//go:embed VERSION
var release string

// The linker sets linkedVersion and linkedCommit if make builds the program.
var linkedVersion, linkedCommit string

// A build identifies the running program.
type build struct{ version, commit string }

// built returns the version and the commit of this program.
func built() build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return buildOf(strings.TrimSpace(release), build{linkedVersion, linkedCommit}, info)
}

// ofProxy finds the commit in the version that Go gives to a commit without a tag.
var ofProxy = regexp.MustCompile(`-(?:0\.)?\d{14}-([0-9a-f]{12})`)

// buildOf returns the linker's values, or else Go's record (info). release is the number of the
// release under way: only its tag has that number. Any other commit is a version before it.
func buildOf(release string, linked build, info *debug.BuildInfo) build {
	if linked.version != "" {
		return linked
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(len(s.Value), 12)]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ".dirty"
		}
	}
	if m := ofProxy.FindStringSubmatch(info.Main.Version); m != nil && revision == "" {
		revision = m[1]
	}
	b := build{version: release + "-dev", commit: "unknown"}
	if revision != "" {
		b = build{version: release + "-dev+" + revision + dirty, commit: revision}
	}
	if info.Main.Version == "v"+release {
		b.version = release
	}
	return b
}

// runVersion prints the version, the commit, and the version of Go.
func runVersion(_ context.Context, o *options, to streams) (int, error) {
	b := built()
	answer := struct {
		Version string `json:"version"`
		Commit  string `json:"commit"`
		Go      string `json:"go"`
	}{b.version, b.commit, runtime.Version()}
	return exitOK, show(to.out, o.output, answer, func(w io.Writer) {
		fmt.Fprintf(w, "canaryd %s, commit %s, %s\n", answer.Version, answer.Commit, answer.Go)
	})
}
