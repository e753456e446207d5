package main

import (
	"fmt"
	"strings"
)

// draw returns a drawing of all imports. Each room that has a package gets a line, from the
// roof to the ground, and a column. A dot means that the room of the column imports the room of
// the line. A room's line and column meet at a corner. Names of rooms lack "internal/".
func draw(packages []Package) string {
	imports := make([]map[int]bool, len(rooms))
	for _, p := range packages {
		here := room(strings.TrimPrefix(p.ImportPath, module))
		if here < 0 {
			continue
		}
		if imports[here] == nil {
			imports[here] = map[int]bool{}
		}
		for _, imported := range p.Imports {
			if ours, isOurs := strings.CutPrefix(imported, module); isOurs && room(ours) >= 0 {
				imports[here][room(ours)] = true
			}
		}
	}
	var built []int
	for i := range rooms {
		if imports[i] != nil {
			built = append(built, i)
		}
	}
	var out strings.Builder
	for _, line := range built {
		row := fmt.Sprintf("%-14s", strings.TrimPrefix(rooms[line], "internal/"))
		for _, column := range built {
			switch {
			case column == line:
				row += " ┐"
			case imports[column][line]:
				row += " ●"
			case column < line:
				row += " ·"
			default:
				row += "  "
			}
		}
		out.WriteString(strings.TrimRight(row, " ") + "\n")
	}
	return out.String()
}
