package main

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A kind is a kind of reader of sentences: each kind has ceilings of its own.
type kind string

const (
	comments  kind = "comments"
	documents kind = "documents"
	help      kind = "help, errors" // the strings of cmd, and the texts of errors
	logLines  kind = "log lines"
)

var kinds = []kind{comments, documents, help, logLines}

// A sentence has its words with one space between them, and the line in the file of each word.
// The last sentence of a paragraph may have no period.
type sentence struct {
	kind  kind
	file  string
	text  string
	lines []int
}

// lineOf returns the line of the word at an offset of the text.
func (s sentence) lineOf(offset int) int {
	return s.lines[strings.Count(s.text[:offset], " ")]
}

var (
	codeSpan = regexp.MustCompile("`[^`]*`")
	link     = regexp.MustCompile(`\]\([^)\s]*\)`)
	tag      = regexp.MustCompile(`</?[a-zA-Z][^>]*>`)
	closing  = `"')]*_`
)

// abbreviations have a period that ends no sentence.
var abbreviations = []string{"e.g.", "i.e.", "cf.", "vs.", "etc.", "..."}

// split returns the sentences of a paragraph that begins at a line. A code span counts as one
// word, and a link as its text.
func split(k kind, file string, number int, paragraph string) []sentence {
	paragraph = codeSpan.ReplaceAllStringFunc(paragraph, func(code string) string {
		return "CODE" + strings.Repeat("\n", strings.Count(code, "\n"))
	})
	paragraph = tag.ReplaceAllString(link.ReplaceAllString(paragraph, "]"), "")
	var found []sentence
	s := sentence{kind: k, file: file}
	end := func() {
		if s.text != "" {
			found = append(found, s)
		}
		s = sentence{kind: k, file: file}
	}
	for i, line := range strings.Split(paragraph, "\n") {
		for _, w := range strings.Fields(line) {
			if s.text != "" {
				s.text += " "
			}
			s.text, s.lines = s.text+w, append(s.lines, number+i)
			if bare := strings.TrimRight(w, closing); strings.ContainsAny(bare[max(0, len(bare)-1):], ".!?") && !slices.Contains(abbreviations, bare) {
				end()
			}
		}
	}
	end()
	return found
}

// A block collects the lines of one paragraph.
type block struct {
	kind  kind
	file  string
	first int
	lines []string
	done  []sentence
}

func (b *block) add(number int, line string) {
	if len(b.lines) == 0 {
		b.first = number
	}
	b.lines = append(b.lines, line)
}

func (b *block) end() {
	b.done = append(b.done, split(b.kind, b.file, b.first, strings.Join(b.lines, "\n"))...)
	b.lines = nil
}

// alone adds a paragraph of one line.
func (b *block) alone(number int, line string) {
	b.end()
	b.add(number, line)
	b.end()
}

// released matches the heading of the first released version in CHANGELOG.md, whose words are
// history.
var released = regexp.MustCompile(`^## \[\d`)

// sentencesOfMarkdown omits code, and parts of a document that a program writes. Such a part
// begins with an HTML comment that names the command, and ends with an end comment.
func sentencesOfMarkdown(name, text string) []sentence {
	b := &block{kind: documents, file: name}
	lines := strings.Split(text, "\n")
	fenced := false
	for i := 0; i < len(lines); i++ {
		line := strings.TrimSpace(lines[i])
		if strings.HasPrefix(line, "```") {
			b.end()
			fenced = !fenced
			continue
		}
		if fenced {
			continue
		}
		if name == "CHANGELOG.md" && released.MatchString(line) {
			break
		}
		switch m := item.FindString(lines[i]); {
		case strings.HasPrefix(line, "<!--"):
			b.end()
			if strings.Contains(line, "go test ") || strings.Contains(line, "make ") {
				i = endOfGenerated(lines, i)
			}
		case line == "":
			b.end()
		case strings.HasPrefix(line, "|"):
			for cell := range strings.SplitSeq(strings.ReplaceAll(line, `\|`, " "), "|") {
				b.alone(i+1, cell)
			}
		case strings.HasPrefix(line, "#"):
			b.alone(i+1, strings.TrimLeft(line, "# "))
		case m != "":
			b.end()
			b.add(i+1, lines[i][len(m):])
		case strings.HasPrefix(lines[i], "    ") && len(b.lines) == 0 && !item.MatchString(line):
			// code that is indented
		default:
			b.add(i+1, strings.TrimPrefix(line, "> "))
		}
	}
	b.end()
	return b.done
}

// endOfGenerated returns the line that ends the generated text after a line, or that line
// itself if there is none.
func endOfGenerated(lines []string, begin int) int {
	for i := begin + 1; i < len(lines); i++ {
		if strings.HasPrefix(lines[i], "<!--") {
			if strings.HasPrefix(lines[i], "<!-- end") {
				return i
			}
			break
		}
	}
	return begin
}

// A goFile is a parsed file of Go.
type goFile struct {
	name  string
	files *token.FileSet
	*ast.File
}

func parseGo(name string, text []byte) (goFile, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, text, parser.ParseComments|parser.SkipObjectResolution)
	return goFile{name, files, file}, err
}

// program reports whether people read a file's strings; they do not read those of tests.
func (f goFile) program() bool {
	return !strings.HasSuffix(f.name, "_test.go") && !strings.HasPrefix(f.name, "test/") && !strings.HasPrefix(f.name, "hack/") && !strings.Contains(f.name, "testkit/")
}

// sentencesOfGo returns the sentences of a Go file's comments, help, errors and log lines, by
// line. names are the variables and constants of its package that hold messages.
func sentencesOfGo(f goFile, names map[string]bool) []sentence {
	if ast.IsGenerated(f.File) {
		return nil
	}
	b := &block{kind: comments, file: f.name}
	for _, group := range f.Comments {
		sentencesOfComment(b, f.files, group)
	}
	if f.program() {
		sentencesOfStrings(b, f, names)
	}
	slices.SortStableFunc(b.done, func(x, y sentence) int { return cmp.Compare(x.lines[0], y.lines[0]) })
	return b.done
}

// sentencesOfComment omits directives, code, and the output of an Example.
func sentencesOfComment(b *block, files *token.FileSet, group *ast.CommentGroup) {
	for _, c := range group.List {
		for i, line := range strings.Split(c.Text, "\n") {
			line, ok := strings.CutPrefix(line, "//")
			if i == 0 && ok && line != "" && line[0] != ' ' && line[0] != '\t' {
				continue // a directive, or a rule of characters
			}
			text := strings.TrimSpace(strings.Trim(line, "/*"))
			switch number := files.Position(c.Pos()).Line + i; {
			case strings.HasPrefix(text, "Output:") || strings.HasPrefix(text, "Unordered output:"):
				b.end()
				return
			case text == "" || strings.HasPrefix(line, "\t"):
				b.end()
			case strings.HasPrefix(line, " # "):
				b.alone(number, strings.TrimLeft(text, "# "))
			case item.MatchString(text):
				b.end()
				b.add(number, item.ReplaceAllString(text, ""))
			default:
				b.add(number, text)
			}
		}
	}
	b.end()
}

// sentencesOfStrings takes the messages of log lines, the texts of errors, and all other strings of
// cmd. A string without a space is no sentence.
func sentencesOfStrings(b *block, f goFile, names map[string]bool) {
	known := map[ast.Expr]kind{}
	ast.Inspect(f.File, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if k, message := messageOf(n); message != nil {
				mark(known, message, k)
			}
		case *ast.ValueSpec:
			for i, name := range n.Names {
				if names[name.Name] && i < len(n.Values) {
					mark(known, n.Values[i], logLines)
				}
			}
		case *ast.AssignStmt:
			for i, to := range n.Lhs {
				if name, ok := to.(*ast.Ident); ok && names[name.Name] && i < len(n.Rhs) {
					mark(known, n.Rhs[i], logLines)
				}
			}
		case *ast.ImportSpec, *ast.Field:
			return false
		case *ast.BinaryExpr, *ast.BasicLit:
			e := n.(ast.Expr)
			text, ok := literal(e)
			if !ok {
				return true
			}
			k := known[e]
			if k == "" && strings.HasPrefix(f.name, "cmd/") {
				k = help
			}
			if k != "" && strings.Contains(strings.TrimSpace(text), " ") {
				sentencesOfString(b, k, f.files.Position(e.Pos()).Line, text, e)
			}
			return false
		}
		return true
	})
}

// sentencesOfString splits a string at its empty lines.
func sentencesOfString(b *block, k kind, number int, text string, e ast.Expr) {
	b.kind = k
	raw, ok := e.(*ast.BasicLit)
	for i, line := range strings.Split(text, "\n") {
		if !ok || raw.Value[0] != '`' {
			i = 0 // its line breaks are no lines of the file
		}
		if strings.TrimSpace(line) == "" {
			b.end()
			continue
		}
		if i == 0 && len(b.lines) > 0 {
			b.alone(number, line)
			continue
		}
		b.add(number+i, line)
	}
	b.end()
}

// mark notes the kind of all strings in an expression.
func mark(known map[ast.Expr]kind, message ast.Expr, k kind) {
	ast.Inspect(message, func(n ast.Node) bool {
		e, ok := n.(ast.Expr)
		if ok && known[e] == "" {
			known[e] = k
		}
		return true
	})
}

// messageOf returns the argument of a call that is a log line or the text of an error, if there
// is one. The methods Info and Error of a log have it in different places.
func messageOf(call *ast.CallExpr) (kind, ast.Expr) {
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", nil
	}
	of, _ := f.X.(*ast.Ident)
	switch {
	case of != nil && (of.Name == "errors" && f.Sel.Name == "New" || of.Name == "fmt" && f.Sel.Name == "Errorf") && len(call.Args) > 0:
		return help, call.Args[0]
	case f.Sel.Name == "Info" && len(call.Args) > 0:
		return logLines, call.Args[0]
	case f.Sel.Name == "Error" && len(call.Args) > 1 && (of == nil || of.Name != "http"):
		return logLines, call.Args[1]
	}
	return "", nil
}

// messageNames adds the names of variables and constants that calls log as their message.
func messageNames(f goFile, names map[string]bool) {
	ast.Inspect(f.File, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			if k, message := messageOf(call); k == logLines {
				if name, ok := message.(*ast.Ident); ok {
					names[name.Name] = true
				}
			}
		}
		return true
	})
}

// literal returns the text of a string, or of strings that are joined.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		text, err := strconv.Unquote(e.Value)
		return text, err == nil
	case *ast.BinaryExpr:
		x, okX := literal(e.X)
		y, okY := literal(e.Y)
		return x + y, okX && okY && e.Op == token.ADD
	}
	return "", false
}
