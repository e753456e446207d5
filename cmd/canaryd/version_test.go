package main

import (
	"regexp"
	"runtime/debug"
	"testing"
)

func TestVersion(t *testing.T) {
	defer func(v, c string) { linkedVersion, linkedCommit = v, c }(linkedVersion, linkedCommit)
	linkedVersion, linkedCommit = "1.2.3", "0123456789ab"
	code, stdout, stderr := call(t, "version")
	if c, out, errs := call(t, "--version"); c != code || out != stdout || errs != stderr {
		t.Errorf("--version: exit code %d, %q, %q; want what version prints", c, out, errs)
	}
	if want := regexp.MustCompile(`^canaryd 1\.2\.3, commit 0123456789ab, go1\.\S+\n$`); code != exitOK || stderr != "" || !want.MatchString(stdout) {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
}

// TestVersionOfABuild: only a build of the tag, by make or by Go, has the release's number.
func TestVersionOfABuild(t *testing.T) {
	of := func(version string, settings ...debug.BuildSetting) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Version: version}, Settings: settings}
	}
	commit := debug.BuildSetting{Key: "vcs.revision", Value: "0123456789abcdef0123456789abcdef01234567"}
	modified := debug.BuildSetting{Key: "vcs.modified", Value: "true"}
	clean := debug.BuildSetting{Key: "vcs.modified", Value: "false"}
	for _, c := range []struct {
		name   string
		linked build
		info   *debug.BuildInfo
		want   build
	}{
		{"make", build{"0.1.0", "0123456789ab"}, of("v9.9.9", commit, modified), build{"0.1.0", "0123456789ab"}},
		{"go build, of a commit", build{}, of("v0.0.0-20260102030405-0123456789ab", commit, clean), build{"0.1.0-dev+0123456789ab", "0123456789ab"}},
		{"go build, of a changed commit", build{}, of("v0.0.0-20260102030405-0123456789ab+dirty", commit, modified), build{"0.1.0-dev+0123456789ab.dirty", "0123456789ab"}},
		{"go build, of the tag", build{}, of("v0.1.0", commit, clean), build{"0.1.0", "0123456789ab"}},
		{"go build, of the tag and changes", build{}, of("v0.1.0+dirty", commit, modified), build{"0.1.0-dev+0123456789ab.dirty", "0123456789ab"}},
		{"go build, without git", build{}, of("(devel)"), build{"0.1.0-dev", "unknown"}},
		{"go install, of the tag", build{}, of("v0.1.0"), build{"0.1.0", "unknown"}},
		{"go install, of another tag", build{}, of("v0.0.9"), build{"0.1.0-dev", "unknown"}},
		{"go install, of a commit", build{}, of("v0.1.1-0.20260102030405-0123456789ab"), build{"0.1.0-dev+0123456789ab", "0123456789ab"}},
		{"nothing is known", build{}, of(""), build{"0.1.0-dev", "unknown"}},
	} {
		if got := buildOf("0.1.0", c.linked, c.info); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}
