package main

import (
	"encoding/json"
	"slices"
	"testing"
)

// TestEachCommandSpeaksJSON: each command that prints an answer takes -o json. The exceptions
// are run, and commands whose output is a file for another program.
func TestEachCommandSpeaksJSON(t *testing.T) {
	for _, cmd := range commands() {
		want := !slices.Contains([]string{"run", "render", "completion", "man"}, cmd.name)
		if got := slices.Contains(cmd.flags, "output"); got != want {
			t.Errorf("canaryd %s takes --output: %t, want %t", cmd.name, got, want)
		}
	}
}

// TestVersionAsJSON: the JSON of version has the words of its text.
func TestVersionAsJSON(t *testing.T) {
	code, stdout, stderr := call(t, "version", "-o", "json")
	var answer map[string]string
	if err := json.Unmarshal([]byte(stdout), &answer); err != nil || code != 0 || answer["version"] == "" || answer["go"] == "" {
		t.Errorf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
}
