package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
)

const manualFile = "../../docs/canaryd.8"

// TestManual: docs/canaryd.8 is the output of canaryd man.
func TestManual(t *testing.T) {
	code, stdout, stderr := call(t, "man")
	if code != exitOK || stderr != "" {
		t.Fatalf("exit code %d, %q", code, stderr)
	}
	if *update {
		if err := os.WriteFile(manualFile, []byte(stdout), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(manualFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), stdout); diff != "" {
		t.Errorf("docs/canaryd.8 (-want +got; go test ./cmd/canaryd -update writes it anew):\n%s", diff)
	}
}

// TestManualIsWellFormed: mandoc's worst complaint is that a line is long.
func TestManualIsWellFormed(t *testing.T) {
	nstest.NeedProgram(t, "mandoc")
	if out, err := exec.CommandContext(t.Context(), "mandoc", "-Tlint", "-Wwarning", manualFile).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
	// mandoc can find a mistake: an unknown macro.
	wrong := filepath.Join(t.TempDir(), "canaryd.8")
	if err := os.WriteFile(wrong, []byte(manual()+".NOSUCH\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(t.Context(), "mandoc", "-Tlint", "-Wwarning", wrong).Run(); err == nil {
		t.Error("mandoc finds nothing wrong with a macro that there is not")
	}
}

// TestManualIsComplete: the readable page has every command and every flag with its meaning.
func TestManualIsComplete(t *testing.T) {
	nstest.NeedProgram(t, "mandoc")
	page := strings.Join(strings.Fields(nstest.Command(t, "mandoc", "-Tascii", "-Owidth=200", manualFile)), " ")
	for bold := strings.Index(page, "\b"); bold > 0; bold = strings.Index(page, "\b") {
		page = page[:bold-1] + page[bold+1:] // overstruck, like bold letters on printers
	}
	flags := 0
	for _, s := range suggestions() {
		if !strings.Contains(page, "canaryd "+s.command.name) {
			t.Errorf("the manual lacks canaryd %s", s.command.name)
		}
		for _, f := range s.flags {
			value, usage := pflag.UnquoteUsage(f)
			want := strings.TrimSpace("--"+f.Name+" "+value) + " " + strings.Join(strings.Fields(usage), " ")
			if !strings.Contains(page, want) {
				t.Errorf("the manual lacks %q", want)
			}
			flags++
		}
	}
	if flags < 60 {
		t.Errorf("%d flags of all commands were looked for, want more", flags)
	}
}
