// Sized prints a pattern for go test -run. It matches the tests of the folders that have
// another size in make test-large, or run only there. It also matches all tests of the folders
// after -whole.
//
//	sized FOLDER... [-whole FOLDER...]
package main

import (
	"fmt"
	"go/ast"
	"os"
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/testkit/callers"
)

func main() {
	pattern, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "sized:", err)
		os.Exit(1)
	}
	fmt.Println(pattern)
}

func run(args []string) (string, error) {
	var all []string
	whole := false
	for _, arg := range args {
		if arg == "-whole" {
			whole = true
			continue
		}
		folder, err := callers.Parse(arg)
		if err != nil {
			return "", err
		}
		if whole {
			all = append(all, folder.Tests()...)
			continue
		}
		for test := range folder.Reaching(size) {
			all = append(all, test)
		}
	}
	slices.Sort(all)
	return "^(" + strings.Join(slices.Compact(all), "|") + ")$", nil
}

// size marks the calls with which a test checks whether it is a large one.
func size(n ast.Node) string {
	call, is := n.(*ast.CallExpr)
	if !is {
		return ""
	}
	s, is := call.Fun.(*ast.SelectorExpr)
	if !is {
		if i, generic := call.Fun.(*ast.IndexExpr); generic {
			s, is = i.X.(*ast.SelectorExpr)
		}
	}
	if !is || !slices.Contains([]string{"Large", "Size", "IsLarge"}, s.Sel.Name) {
		return ""
	}
	if of, is := s.X.(*ast.Ident); !is || of.Name != "testkit" {
		return ""
	}
	return s.Sel.Name
}
