package terminal

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// A Screen is a terminal that shows colours. Any other writer gets the same text without them.
type Screen struct{ io.Writer }

// OnScreen returns file as a Screen if it is a terminal and NO_COLOR is not set
// (https://no-color.org), else as it is: without colours. getenv is os.Getenv.
func OnScreen(file *os.File, getenv func(string) string) io.Writer {
	if getenv("NO_COLOR") != "" || !Is(file, getenv) {
		return file
	}
	return Screen{file}
}

// Is reports whether file is a terminal that can move its cursor.
func Is(file *os.File, getenv func(string) string) bool {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil && getenv("TERM") != "dumb" && getenv("TERM") != ""
}

// A Colour is the number of a terminal's colour.
type Colour int

// The colours.
const (
	Normal Colour = 0
	Bold   Colour = 1
	Red    Colour = 31
	Green  Colour = 32
	Yellow Colour = 33
)

// Paint returns text in a colour if w is a Screen.
func Paint(w io.Writer, c Colour, text string) string {
	if _, ok := w.(Screen); !ok || c == Normal || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", c, text)
}

// TextFor returns the text that write writes, so that it can be shown in one write. It has
// colours if w is a Screen.
func TextFor(w io.Writer, write func(w io.Writer)) string {
	var text strings.Builder
	if _, colours := w.(Screen); colours {
		write(Screen{&text})
	} else {
		write(&text)
	}
	return text.String()
}

// Table writes rows in columns; the first row is the heading. colourOf returns the colour of a cell
// below a heading.
func Table(w io.Writer, rows [][]string, colourOf func(heading, cell string) Colour) {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var table strings.Builder
	for n, row := range rows {
		gap := 0 // before the next cell; none after the last one
		for i, cell := range row {
			if cell != "" {
				c := Bold
				if n > 0 {
					c = colourOf(rows[0][i], cell)
				}
				table.WriteString(strings.Repeat(" ", gap) + Paint(w, c, cell))
				gap = 0
			}
			gap += width[i] - utf8.RuneCountInString(cell) + 2
		}
		table.WriteByte('\n')
	}
	fmt.Fprint(w, table.String())
}

// JSON writes a value as indented JSON that is safe on a terminal.
func JSON(w io.Writer, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	_, err = w.Write(append(PlainJSON(text), '\n'))
	return err
}
