// Meeting prints a pattern for go test -run. It matches the tests of the folders that start
// goroutines, directly or in a function of the folder's tests. It also matches the tests that
// -and names.
//
// A goroutine that the code under test starts does not count, because nearly each test of
// pkg/iptables executes a program, and a goroutine feeds it. Parallel tests do not count
// either, because each has a kernel of its own.
//
//	meeting FOLDER... [-and TEST...]
package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/callers"
)

func main() {
	pattern, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "meeting:", err)
		os.Exit(1)
	}
	fmt.Println(pattern)
}

func run(args []string) (string, error) {
	folders, named := args, []string(nil)
	if at := slices.Index(args, "-and"); at >= 0 {
		folders, named = args[:at], args[at+1:]
	}
	chosen, known := map[string]bool{}, map[string]bool{}
	for _, path := range folders {
		folder, err := callers.Parse(path)
		if err != nil {
			return "", err
		}
		starting := folder.Reaching(callers.Starts)
		if len(starting) == 0 {
			return "", fmt.Errorf("no test of %s starts a goroutine", path)
		}
		for test := range starting {
			chosen[test] = true
		}
		for _, test := range folder.Tests() {
			known[test] = true
		}
	}
	for _, test := range named {
		if !known[test] {
			return "", fmt.Errorf("there is no %s", test)
		}
		chosen[test] = true
	}
	return "^(" + strings.Join(slices.Sorted(maps.Keys(chosen)), "|") + ")$", nil
}
