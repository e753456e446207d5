// Package versions lists the differences between the tried versions of iptables and nft. These
// are differences that tests must know, and tests that fail with some versions. All of them are
// in differences.go. test/versions runs the tests with each version.
//
// A test calls [Difference.Here] to learn whether the programs of this machine differ.
// [FailureOf] returns the reason of a test that fails in a [Suite], a release of Debian.
package versions

import (
	"cmp"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// A Difference is a behaviour of the programs up to one version.
type Difference struct {
	UpTo   string // the last version of iptables with it
	Reason string
}

// Here reports whether the iptables-nft of this machine has it. Without iptables-nft it is
// false.
func (d Difference) Here() bool {
	here := installed()
	return here != "" && compare(here, d.UpTo) <= 0
}

// A Failure is a test that fails with the programs of some releases of Debian.
type Failure struct {
	Suites []string
	Test   string // package and test
	Says   string // a part of the test's output
	Reason string
}

// On reports whether the test fails in that suite.
func (f Failure) On(suite string) bool { return slices.Contains(f.Suites, suite) }

// FailureOf returns the known failure of a test in a suite, if there is one.
func FailureOf(suite, test string) (Failure, bool) {
	i := slices.IndexFunc(Failures, func(f Failure) bool { return f.On(suite) && f.Test == test })
	if i < 0 {
		return Failure{}, false
	}
	return Failures[i], true
}

// installed returns the version of iptables-nft; empty if there is none.
var installed = sync.OnceValue(func() string {
	for _, name := range []string{"iptables-nft", "/usr/sbin/iptables-nft"} {
		if out, err := exec.Command(name, "--version").Output(); err == nil {
			return Number(string(out))
		}
	}
	return ""
})

var number = regexp.MustCompile(`[0-9]+(\.[0-9]+)+`)

// Number returns the version in a program's output; empty if there is none.
func Number(text string) string { return number.FindString(text) }

// compare compares two versions as numbers.
func compare(a, b string) int {
	numbers := func(text string) (all []int) {
		for word := range strings.SplitSeq(text, ".") {
			n, _ := strconv.Atoi(word) // Number takes nothing but numbers
			all = append(all, n)
		}
		return all
	}
	return slices.CompareFunc(numbers(a), numbers(b), cmp.Compare)
}
