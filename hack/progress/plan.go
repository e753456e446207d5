package main

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// A plan counts the packages that have tests, and their tests. Subtests are not counted,
// because they are known only when they run. A number is 0 if it is unknown.
type plan struct{ packages, tests int }

func (p *plan) add(other plan) {
	p.packages += other.packages
	p.tests += other.tests
}

// valued are the flags of go test that may have their value in the next argument.
var valued = []string{"C", "tags", "run", "skip", "count", "timeout", "p", "parallel", "cpu", "bench", "shuffle", "vet", "exec", "mod", "modfile"}

// planned counts the tests of a run. If a pattern chooses tests, their number is unknown. If go
// list fails, so will go test, with the reason.
func planned(args []string) plan {
	list := []string{"list", "-e", "-json=Dir,TestGoFiles,XTestGoFiles"}
	chosen := false
	var packages []string
	for i := 0; i < len(args); i++ {
		name, isFlag := strings.CutPrefix(args[i], "-")
		name, value, hasValue := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		if !isFlag {
			packages = append(packages, args[i])
			continue
		}
		if slices.Contains(valued, name) && !hasValue && i+1 < len(args) {
			i++
			value = args[i]
		}
		switch name {
		case "C":
			list = slices.Insert(list, 1, "-C", value)
		case "tags":
			list = append(list, "-tags="+value)
		case "race":
			list = append(list, "-race")
		case "run", "skip":
			chosen = true
		}
	}
	out, err := exec.Command("go", append(list, packages...)...).Output()
	if err != nil {
		return plan{}
	}
	var p plan
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var listed struct {
			Dir                       string
			TestGoFiles, XTestGoFiles []string
		}
		if err := dec.Decode(&listed); err == io.EOF {
			break
		} else if err != nil {
			return plan{}
		}
		files := slices.Concat(listed.TestGoFiles, listed.XTestGoFiles)
		if len(files) > 0 {
			p.packages++
		}
		for _, file := range files {
			text, err := os.ReadFile(filepath.Join(listed.Dir, file))
			if err != nil {
				return plan{}
			}
			p.tests += tests(text)
		}
	}
	if chosen {
		p.tests = 0
	}
	return p
}

var testFunction = regexp.MustCompile(`(?m)^func (?:Test|Fuzz)(?:[^a-z(][^(]*)?\(\w+ \*testing\.[TF]\)`)

func tests(file []byte) int { return len(testFunction.FindAllIndex(file, -1)) }

// counted reports whether planned counts an event's test.
func counted(test string) bool {
	return !strings.Contains(test, "/") && (strings.HasPrefix(test, "Test") || strings.HasPrefix(test, "Fuzz"))
}
