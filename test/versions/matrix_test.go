package versions

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/versions"
)

// limit is the time for one part in one userland. The longest part takes two minutes next to
// another one, and ten on a busy machine.
const limit = 25 * time.Minute

// A column has the results of the tests in one userland.
type column struct {
	Suite, Programs string
	Cells           map[string]string
}

// handOver leaves the column for the process outside the namespaces.
func (c column) handOver(t *testing.T) {
	t.Helper()
	text, err := json.Marshal(c)
	if err == nil {
		err = os.WriteFile(filepath.Join(os.Getenv(builds), c.Suite+".json"), text, 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}

// matrix renders the columns in a folder, and the reasons for known failures.
func matrix(dir string) (string, error) {
	var columns []column
	rows := map[string]bool{}
	for _, suite := range versions.Suites {
		c := column{Suite: suite.Name}
		text, err := os.ReadFile(filepath.Join(dir, suite.Name+".json"))
		if os.IsNotExist(err) {
			continue // its test has the reason
		}
		if err == nil {
			err = json.Unmarshal(text, &c)
		}
		if err != nil {
			return "", err
		}
		columns = append(columns, c)
		for name := range c.Cells {
			rows[name] = true
		}
	}
	if len(columns) == 0 {
		return "", nil
	}
	var b strings.Builder
	for _, c := range columns {
		fmt.Fprintf(&b, "%-9s %s\n", c.Suite, c.Programs)
	}
	fmt.Fprintf(&b, "\n%-90s", "test")
	for _, c := range columns {
		fmt.Fprintf(&b, " %-9s", c.Suite)
	}
	b.WriteString("\n")
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		fmt.Fprintf(&b, "%-90s", name)
		for _, c := range columns {
			cell := c.Cells[name]
			if cell == "" {
				cell = "not run"
			}
			fmt.Fprintf(&b, " %-9s", cell)
		}
		b.WriteString("\n")
	}
	b.WriteString("\nknown: it fails there, and is expected to:\n")
	for _, f := range versions.Failures {
		fmt.Fprintf(&b, "%s on %s: %s\n", f.Test, strings.Join(f.Suites, ", "), f.Reason)
	}
	return b.String(), nil
}
