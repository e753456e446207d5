package flushers

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
)

// rowsDir is the environment variable with the folder in which the processes in the namespaces
// leave their rows of the matrix.
const rowsDir = "CANARYD_TEST_ROWS"

const (
	page  = "../../docs/measured.md"
	begin = "<!-- matrix: make flushers writes it -->\n"
	end   = "<!-- end of the matrix -->\n"
)

var update = flag.Bool("update", false, "write the matrix into docs/measured.md")

// A row has the measurements of a step on one backend.
type row struct {
	Flusher, Step, Backend string
	Records                []scenario.Record
}

// prepared runs the tests and prints the matrix.
func prepared(m *testing.M) int {
	if os.Getenv(rowsDir) != "" {
		return nodetest.Main(m)
	}
	dir, err := os.MkdirTemp("", "canaryd-rows")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Setenv(rowsDir, dir); err != nil {
		panic(err)
	}
	code := nodetest.Main(m)
	matrix, complete, err := matrix(dir)
	if err != nil {
		panic(err)
	}
	fmt.Print(matrix) // go test prints it with -v
	if *update && code == 0 && complete {
		if err := publish(matrix); err != nil {
			panic(err)
		}
	}
	return code
}

// handOver leaves rows for the process outside the namespaces.
func handOver(m *machine, rows []row) {
	m.Helper()
	text, err := json.Marshal(rows)
	m.Must(err)
	m.Must(os.WriteFile(filepath.Join(os.Getenv(rowsDir), strings.ReplaceAll(m.Name(), "/", "_")+".json"), text, 0o600))
}

// matrix renders the rows in a folder, and reports whether they are complete.
func matrix(dir string) (text string, complete bool, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return "", false, err
	}
	cells := map[string]string{}
	key := func(flusher, step, backend string) string { return flusher + "\n" + step + "\n" + backend }
	for _, file := range files {
		var rows []row
		read, err := os.ReadFile(file)
		if err != nil {
			return "", false, err
		}
		if err := json.Unmarshal(read, &rows); err != nil {
			return "", false, fmt.Errorf("%s: %w", file, err)
		}
		for _, r := range rows {
			cells[key(r.Flusher, r.Step, r.Backend)] = cell(r.Records)
		}
	}
	var b strings.Builder
	b.WriteString("| who | does | on iptables-nft | on iptables-legacy |\n|---|---|---|---|\n")
	complete = true
	for _, f := range flushers() {
		for _, s := range f.steps {
			fmt.Fprintf(&b, "| %s | %s |", f.name, s.name)
			for _, backend := range both {
				c, ok := cells[key(f.name, s.name, string(backend))]
				if !ok {
					c, complete = "not run", false
				}
				fmt.Fprintf(&b, " %s |", c)
			}
			b.WriteString("\n")
		}
	}
	return b.String(), complete, nil
}

// cell returns the number of flushes of a step, the number of lost rules, and the worst times
// in ms: noticed and back.
func cell(records []scenario.Record) string {
	if len(records) == 0 {
		return "none"
	}
	var noticed, absent float64
	var lost int
	for _, r := range records {
		noticed, absent = max(noticed, r.NoticedSeconds), max(absent, r.AbsentSeconds)
		lost += r.Lost.Rules
	}
	flushes := fmt.Sprint(len(records))
	if families := hit(records); len(families) == 1 {
		flushes += fmt.Sprintf(" of %s", families[0])
	}
	return fmt.Sprintf("%s, %d, %d/%d", flushes, lost, milliseconds(noticed), milliseconds(absent))
}

func milliseconds(seconds float64) int64 {
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond).Milliseconds()
}

// publish writes the matrix into the page.
func publish(matrix string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(text), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no matrix", page)
	}
	return os.WriteFile(page, []byte(head+begin+matrix+end+tail), 0o644)
}

// TestPage checks that the page names every flusher and every step. Its numbers are those of
// one run.
func TestPage(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), begin)
	told, _, _ := strings.Cut(rest, end)
	var want, got []string
	for _, f := range flushers() {
		for _, s := range f.steps {
			want = append(want, f.name+" | "+s.name)
		}
	}
	for i, line := range slices.Collect(strings.Lines(told)) {
		if cells := strings.Split(line, "|"); i > 1 && len(cells) > 3 {
			got = append(got, strings.TrimSpace(cells[1])+" | "+strings.TrimSpace(cells[2]))
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s is not about these flushers; run make flushers (-want +got):\n%s", page, diff)
	}
}
