package measure

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// A Table is a table in Markdown whose source is readable, too.
type Table struct {
	head []string
	rows [][]string
}

// NewTable returns a table with these columns and no rows.
func NewTable(head ...string) *Table { return &Table{head: head} }

// Row adds a row, which has one cell for each column.
func (t *Table) Row(cells ...string) { t.rows = append(t.rows, cells) }

// WriteTo writes the table.
func (t *Table) WriteTo(w io.Writer) (int64, error) {
	widths := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for n, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)))
		}
		b.WriteString("|\n")
		if n == 0 {
			for _, width := range widths {
				b.WriteString("|" + strings.Repeat("-", width+2))
			}
			b.WriteString("|\n")
		}
	}
	n, err := io.WriteString(w, b.String())
	return int64(n), err
}
