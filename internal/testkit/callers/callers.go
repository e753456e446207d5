// Package callers finds the tests of a folder that reach a call, such as testkit.Size, or
// another piece of code.
package callers

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"strings"
)

// A Folder has the functions and package variables that the test files of a folder declare, by
// name. Methods of the same name are one entry, so that a search through them may find too
// much, but never too little.
type Folder struct {
	Files    []*ast.File
	declared map[string][]ast.Node
}

// Parse reads the test files of a folder. A folder without any is no error.
func Parse(folder string) (Folder, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		return Folder{}, err
	}
	f := Folder{declared: map[string][]ast.Node{}}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return Folder{}, fmt.Errorf("parse %s: %w", path, err)
		}
		f.Files = append(f.Files, file)
		for _, decl := range file.Decls {
			f.add(decl)
		}
	}
	return f, nil
}

func (f Folder) add(decl ast.Decl) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if decl.Body != nil {
			f.declared[decl.Name.Name] = append(f.declared[decl.Name.Name], decl.Body)
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			values, is := spec.(*ast.ValueSpec)
			if !is {
				continue
			}
			for _, name := range values.Names {
				for _, value := range values.Values {
					f.declared[name.Name] = append(f.declared[name.Name], value)
				}
			}
		}
	}
}

// Tests returns the names of the test functions.
func (f Folder) Tests() []string {
	var all []string
	for name := range f.declared {
		if isTest(name) {
			all = append(all, name)
		}
	}
	return all
}

func isTest(name string) bool { return strings.HasPrefix(name, "Test") && name != "TestMain" }

// Reaching returns the tests that reach code for which mark returns a text, with that text. The
// code may be in the test itself or in other declarations of the folder. An empty text is no
// mark.
func (f Folder) Reaching(mark func(ast.Node) string) map[string]string {
	marks := map[string]string{}
	f.each(func(name string, n ast.Node) {
		if n == nil {
			return // the end of a node's children
		}
		if text := mark(n); text != "" {
			marks[name] = text
		}
	})
	for before := -1; before != len(marks); {
		before = len(marks)
		f.each(func(name string, n ast.Node) {
			if id, is := n.(*ast.Ident); is && marks[id.Name] != "" && marks[name] == "" {
				marks[name] = marks[id.Name]
			}
		})
	}
	maps.DeleteFunc(marks, func(name, _ string) bool { return !isTest(name) })
	return marks
}

func (f Folder) each(visit func(name string, n ast.Node)) {
	for name, nodes := range f.declared {
		for _, node := range nodes {
			ast.Inspect(node, func(n ast.Node) bool { visit(name, n); return true })
		}
	}
}

// Starts marks code that starts a goroutine: the statement go, the method Go of a group, and
// the functions AfterFunc of time and context.
func Starts(n ast.Node) string {
	switch n := n.(type) {
	case *ast.GoStmt:
		return "go"
	case *ast.CallExpr:
		if s, is := n.Fun.(*ast.SelectorExpr); is && (s.Sel.Name == "Go" || s.Sel.Name == "AfterFunc") {
			return s.Sel.Name
		}
	}
	return ""
}
