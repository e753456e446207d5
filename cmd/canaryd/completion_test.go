package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

// script writes the completion for a shell into a file.
func script(t *testing.T, shell string) string {
	t.Helper()
	code, stdout, stderr := call(t, "completion", shell)
	if code != exitOK || stderr != "" {
		t.Fatalf("exit code %d, %q", code, stderr)
	}
	path := filepath.Join(t.TempDir(), "_canaryd")
	if err := os.WriteFile(path, []byte(stdout), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func commandNames() []string {
	var names []string
	for _, s := range suggestions() {
		names = append(names, s.command.name)
	}
	slices.Sort(names)
	return names
}

// completions are command lines with an incomplete last word, and the words that a shell with
// the script offers.
func completions() map[string][]string {
	return map[string][]string{
		"canaryd ":                 commandNames(),
		"canaryd re":               {"render", "restore", "resume"},
		"canaryd completion ":      {"bash", "fish", "zsh"},
		"canaryd status ":          nil,
		"canaryd status --so":      {"--socket"},
		"canaryd check --ba":       {"--backend"},
		"canaryd pause --":         {"--for", "--help", "--output", "--socket", "--v", "--why"},
		"canaryd check --mode":     nil, // a flag of run
		"canaryd check --backend ": {"auto", "legacy", "nft"},
		"canaryd check -o ":        {"json", "line", "table"},
		"canaryd status -o ":       {"json", "table"},
		"canaryd run --mode h":     {"heal"},
		"canaryd pause --for ":     nil,
		"canaryd pause --why ":     nil,
	}
}

// TestBash calls the function as bash does when TAB is pressed.
func TestBash(t *testing.T) {
	nstest.NeedProgram(t, "bash")
	path := script(t, "bash")
	nstest.Command(t, "bash", "-n", path)
	lines := completions()
	// Bash reads = as a separate word.
	lines["canaryd --mo"] = []string{"--mode"}
	lines["canaryd --mode = "] = []string{"heal", "observe"}
	lines["canaryd --mode = o"] = []string{"observe"}
	lines["canaryd check --backend = n"] = []string{"nft"}
	for line, want := range lines {
		words := strings.Split(line, " ")
		if strings.HasSuffix(line, "= ") {
			words = words[:len(words)-1] // nothing is typed after the sign
		}
		ask := fmt.Sprintf("source %s; COMP_WORDS=(%s); COMP_CWORD=%d; _canaryd; printf '%%s\\n' \"${COMPREPLY[@]}\"", path, quoteAll(words), len(words)-1)
		got := strings.Fields(nstest.Command(t, "bash", "--norc", "-c", ask))
		slices.Sort(got)
		if diff := cmp.Diff(want, got, emptyIsNil); diff != "" {
			t.Errorf("%q (-want +got):\n%s", line, diff)
		}
	}
}

var emptyIsNil = cmp.Transformer("nil", func(list []string) string { return strings.Join(list, " ") })

func quoteAll(words []string) string {
	var b strings.Builder
	for _, w := range words {
		fmt.Fprintf(&b, "'%s' ", w)
	}
	return b.String()
}

// TestBashPaths: where a file is expected, files are offered.
func TestBashPaths(t *testing.T) {
	nstest.NeedProgram(t, "bash")
	path := script(t, "bash")
	ask := fmt.Sprintf("source %s; COMP_WORDS=(canaryd run --manifest %s/_); COMP_CWORD=3; _canaryd; echo \"${COMPREPLY[@]}\"", path, filepath.Dir(path))
	if got := strings.TrimSpace(nstest.Command(t, "bash", "--norc", "-c", ask)); got != path {
		t.Errorf("got %q, want %q", got, path)
	}
}

// TestFish uses fish's own command for completions.
func TestFish(t *testing.T) {
	nstest.NeedProgram(t, "fish")
	path := script(t, "fish")
	nstest.Command(t, "fish", "--no-execute", path)
	lines := completions()
	delete(lines, "canaryd check --mode") // fish offers similar words
	lines["canaryd pause --"] = []string{"--for", "--output", "--socket", "--v", "--why"}
	lines["canaryd run --mode=o"] = []string{"--mode=observe"}
	for line, want := range lines {
		var got []string
		for answer := range strings.Lines(nstest.Command(t, "fish", "--no-config", "-c", fmt.Sprintf("source %s; complete -C '%s'", path, line))) {
			word, _, _ := strings.Cut(strings.TrimSpace(answer), "\t")
			got = append(got, word)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got, emptyIsNil); diff != "" {
			t.Errorf("%q (-want +got):\n%s", line, diff)
		}
	}
}

// TestZsh: zsh accepts the script, from a file of its own and from a folder of fpath. Only a
// terminal would show its completions.
func TestZsh(t *testing.T) {
	nstest.NeedProgram(t, "zsh")
	path := script(t, "zsh")
	nstest.Command(t, "zsh", "-n", path)
	for _, way := range []string{
		"autoload -U compinit; compinit -D -u; source " + path,
		"fpath=(" + filepath.Dir(path) + " $fpath); autoload -U compinit; compinit -D -u",
	} {
		if got := nstest.Command(t, "zsh", "-f", "-c", way+"; print $_comps[canaryd]"); got != "_canaryd\n" {
			t.Errorf("after %s canaryd is completed by %q, want _canaryd", way, got)
		}
	}
}

func TestCompletionOfAnUnknownShell(t *testing.T) {
	for args, want := range map[string]string{
		"completion tcsh":     `there is no completion for "tcsh": want bash or zsh or fish`,
		"completion bash zsh": `"zsh" is one word too many (see canaryd completion --help)`,
	} {
		code, stdout, stderr := call(t, strings.Fields(args)...)
		if code != exitError || stdout != "" || stderr != "canaryd: "+want+"\n" {
			t.Errorf("%s: exit code %d, %q, %q; want 2 and %q", args, code, stdout, stderr, want)
		}
	}
}
