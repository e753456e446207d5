package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestDocuments: the plugin accepts each of its command lines in a document, and each of its
// commands is in a document.
func TestDocuments(t *testing.T) {
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	line := regexp.MustCompile("kubectl canaryd ([a-z]+[^`\n|]*)")
	for _, file := range append(files, "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range line.FindAllStringSubmatch(string(text), -1) {
			words := strings.Fields(found[1])
			i := slices.IndexFunc(commands(), func(c command) bool { return c.name == words[0] })
			if i < 0 {
				t.Errorf("%s: there is no command %q", file, words[0])
				continue
			}
			o := options{}
			flags := o.flagSet(commands()[i])
			err := flags.Parse(words[1:])
			if err == nil {
				err = o.complete(flags)
			}
			if err != nil {
				t.Errorf("%s: kubectl canaryd %s: %v", file, found[1], err)
			}
			seen[words[0]] = true
		}
	}
	for _, c := range commands() {
		if !seen[c.name] && c.name != "version" {
			t.Errorf("no document names kubectl canaryd %s", c.name)
		}
	}
}
