package web

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestWarningsLinkToSections: the runbook has a section for each alert that a warning names.
func TestWarningsLinkToSections(t *testing.T) {
	document, err := os.ReadFile("../../docs/troubleshoot.md")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("page_*.go")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, alert := range regexp.MustCompile(`Alert: "(\w+)"`).FindAllStringSubmatch(string(text), -1) {
			found++
			if !strings.Contains(string(document), "\n### "+alert[1]+"\n") {
				t.Errorf("%s: the runbook has no section %s", file, alert[1])
			}
		}
	}
	if found < 10 {
		t.Errorf("warnings name %d alerts", found)
	}
}
