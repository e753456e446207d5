package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCheck(t *testing.T) {
	wide := strings.Repeat("word ", 20) + "beyond"
	for _, c := range []struct {
		name, file, text string
		want             []string
	}{
		{"plain words", "a.go", "package a\n\n// F asks the kernel.\nfunc F() {}\n", nil},
		{"a retired word in a comment", "a.go", "package a\n\n// F is told by nobody.\nfunc F() {}\n", []string{
			`a.go:3: "nobody" is retired: write what acts: the kernel, kube-proxy, another process, no process`,
			`a.go:3: "told" is retired: write logged, recorded, reported, known; says, shows`,
		}},
		{"in a string of several lines", "a.go", "package a\n\nconst x = `one\nwritten anew`\n", []string{`a.go:4: "anew" is retired: write again`}},
		{"in a name it stays", "a.go", "package a\n\nvar told, beside int\n", nil},
		{"as a part of another word", "a.md", "besides, retold, nobody's", []string{`a.md:1: "nobody" is retired: write what acts: the kernel, kube-proxy, another process, no process`}},
		{"a wide comment", "a.go", "package a\n\n// " + wide + "\nfunc F() {}\n", []string{"a.go:3: the comment is 109 columns wide, more than 100"}},
		{"a tab counts four", "a.go", "package a\n\nfunc F() {\n\t// " + strings.Repeat("word ", 18) + "wider\n}\n", []string{"a.go:4: the comment is 102 columns wide, more than 100"}},
		{"behind code it may be wide", "a.go", "package a\n\nvar x = 1 // " + wide + "\n", nil},
		{"wide prose", "a.md", wide, []string{"a.md:1: 106 columns, more than 100: go run ./hack/prose -w a.md"}},
		{"wide tables and code", "a.md", "| " + wide + " |\n```text\n" + wide + " told\n```\n", nil},
		{"the history keeps its words", "CHANGELOG.md", "- hooks_missing was told anew", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(c.want, check(c.file, []byte(c.text))); d != "" {
				t.Errorf("findings (-want +got):\n%s", d)
			}
		})
	}
}

func TestWrap(t *testing.T) {
	long := strings.TrimSpace(strings.Repeat("word ", 25))
	first, rest := strings.TrimSpace(strings.Repeat("word ", 20)), "word word word word word"
	for _, c := range []struct{ name, text, want string }{
		{"a paragraph", long, first + "\n" + rest},
		{"lines are joined", "one\ntwo\n\nthree", "one\ntwo\n\nthree"},
		{"short lines are joined", "one two\nthree four\n", "one two three four\n"},
		{"an item", "- " + long + "\n- two words", "- " + strings.TrimSpace(strings.Repeat("word ", 19)) + "\n  word " + rest + "\n- two words"},
		{"items of one word", "- two words\n- one\n- two", "- two words\n- one\n- two"},
		{"an item of several lines", "1. one two\n   three four\n", "1. one two three four\n"},
		{"headings, tables, code and HTML", "# " + long + "\n| " + long + " |\n\n```sh\n" + long + "\n```\n<p>" + long + "</p>\n", ""},
		{"code that is indented", "    " + long + "\n", ""},
		{"code with bullets", "Such as:\n\n    images:\n      - one word\n      - two\n    kind: X\n", ""},
		{"code is not broken", strings.TrimSpace(strings.Repeat("word ", 19)) + " `iptables -t\nnat -F` it", strings.TrimSpace(strings.Repeat("word ", 19)) + "\n`iptables -t nat -F` it"},
		{"a line break", "one two  \nthree four", "one two  \nthree four"},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := c.want
			if want == "" {
				want = c.text
			}
			got := wrap(c.text)
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("wrapped (-want +got):\n%s", d)
			}
			if again := wrap(got); again != got {
				t.Errorf("wrapping twice differs (-once +twice):\n%s", cmp.Diff(got, again))
			}
		})
	}
}
