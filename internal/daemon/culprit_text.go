package daemon

import (
	"fmt"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
)

// culpritsText names the culprits for the log.
func culpritsText(f api.Flush) string {
	if f.Drill != "" {
		return f.ByText()
	}
	list := f.Takers()
	var words []string
	for _, c := range list[:min(len(list), api.CulpritsNamed)] {
		words = append(words, culpritText(c))
	}
	if len(words) == 0 {
		return "unknown"
	}
	text := strings.Join(words, ", ")
	if more := len(list) - len(words); more > 0 {
		text += fmt.Sprintf(" (+%d)", more)
	}
	return text
}
