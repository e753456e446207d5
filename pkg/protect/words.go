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

// Split returns the words of a value of --protect, which Join writes. The error says that it
// is not valid CSV.
func Split(value string) ([]string, error) {
	words, err := csv.NewReader(strings.NewReader(value)).Read()
	if err != nil {
		return nil, fmt.Errorf("%q is no list of words: %w", value, err)
	}
	return words, nil
}

// An OwnWord is a word of --protect that is no preset, with a Selector of that word alone.
type OwnWord struct {
	Word string
	Selector
}

// OwnWords returns the globs and the words rule: and nft: of a list that NewSelector
// accepts, in the list's order. The daemon warns of those that name nothing on the node.
func OwnWords(list []string) (words []OwnWord) {
	for _, word := range list {
		word = strings.TrimSpace(word)
		if word == Auto || strings.HasPrefix(word, leaveOut) && !strings.Contains(word, " ") || len(rowsOf(word, list)) > 0 {
			continue
		}
		if s, err := NewSelector([]string{word}); err == nil {
			words = append(words, OwnWord{word, s})
		}
	}
	return words
}
