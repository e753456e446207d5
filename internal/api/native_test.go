package api_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/api"
)

// TestTableCell: a name that a terminal would show like another is quoted, and no name makes a
// column wider than the terminal.
func TestTableCell(t *testing.T) {
	for name, want := range map[string]string{
		"ip kube-proxy":                    "ip kube-proxy",
		"inet a/b_c.d":                     "inet a/b_c.d",
		"inet fw ":                         `inet "fw "`,
		"inet ip kube-proxy":               `inet "ip kube-proxy"`,
		"inet fw\u00a0":                    `inet "fw\u00a0"`,
		"inet \u202ewf":                    `inet "\u202ewf"`,
		"inet a\nip kube-proxy":            `inet "a\nip kube-proxy"`,
		"inet \xff":                        `inet "\xff"`,
		`inet "fw"`:                        `inet "\"fw\""`,
		"inet " + strings.Repeat("x", 255): "inet " + strings.Repeat("x", 48) + "...",
	} {
		if got := api.TableCell(name); got != want {
			t.Errorf("%q is shown as %s, want %s", name, got, want)
		}
	}
}
