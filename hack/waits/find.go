package main

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
)

// A wait is a place in a test that measures time.
type wait struct{ where, why string }

// waits returns the waits of a file, and the functions in may that measure time in it.
func waits(set *token.FileSet, file *ast.File, folder string) (found []wait, used []string) {
	add := func(n ast.Node, why string) { found = append(found, wait{set.Position(n.Pos()).String(), why}) }
	var walk func(n ast.Node, loop bool)
	walk = func(n ast.Node, loop bool) {
		ast.Inspect(n, func(inner ast.Node) bool {
			switch e := inner.(type) {
			case *ast.FuncDecl:
				if name := folder + "." + function(e); may[name] != "" && inner != n {
					before := len(found)
					walk(inner, false)
					if len(found) > before {
						used = append(used, name)
					}
					found = found[:before]
					return false
				}
			case *ast.ForStmt, *ast.RangeStmt:
				if inner != n {
					walk(inner, true)
					return false
				}
			case *ast.CallExpr:
				name := called(e)
				switch {
				case name == "synctest.Test":
					return false
				case slices.Contains([]string{"time.Sleep", "time.After", "time.AfterFunc", "time.NewTimer"}, name):
					add(e, name)
				case strings.HasPrefix(name, "context.WithTimeout") || strings.HasPrefix(name, "context.WithDeadline"):
					add(e, name)
				}
			case *ast.BinaryExpr:
				if loop && (e.Op == token.LSS || e.Op == token.GTR || e.Op == token.LEQ || e.Op == token.GEQ) && (since(e.X) || since(e.Y)) {
					add(e, "a loop with an end in time")
				}
			case *ast.SelectorExpr:
				if call, is := e.X.(*ast.CallExpr); loop && is && called(call) == "time.Now" && (e.Sel.Name == "Before" || e.Sel.Name == "After") {
					add(e, "a loop with an end in time")
				}
			}
			return true
		})
	}
	walk(file, false)
	return found, used
}

// function returns the name of a function, or of a method with its type.
func function(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	receiver := f.Recv.List[0].Type
	if pointer, is := receiver.(*ast.StarExpr); is {
		receiver = pointer.X
	}
	if name, is := receiver.(*ast.Ident); is {
		return name.Name + "." + f.Name.Name
	}
	return f.Name.Name
}

// called returns the package and name of a called function.
func called(call *ast.CallExpr) string {
	if s, is := call.Fun.(*ast.SelectorExpr); is {
		if p, is := s.X.(*ast.Ident); is {
			return p.Name + "." + s.Sel.Name
		}
	}
	return ""
}

// since reports whether an expression is time.Since or time.Until.
func since(e ast.Expr) bool {
	call, is := e.(*ast.CallExpr)
	return is && (called(call) == "time.Since" || called(call) == "time.Until")
}
