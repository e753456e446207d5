package protect

import (
	"encoding/csv"
	"fmt"
	"strings"
)

// Join returns words of --protect as one value of the flag. It puts commas between them, and
// double quotes around words with a comma or a double quote (RFC 4180).
func Join(words []string) string {
	var b strings.Builder
	w := csv.NewWriter(&b)
	_ = w.Write(words) // to memory
	w.Flush()
	return strings.TrimSuffix(b.String(), "\n")
}

// Split returns the words of a value of --protect.
func Split(value string) ([]string, error) {
	words, err := csv.NewReader(strings.NewReader(value)).Read()
	if err != nil {
		return nil, fmt.Errorf("%q is no list of words: %w", value, err)
	}
	return words, nil
}
