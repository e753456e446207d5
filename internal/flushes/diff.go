package flushes

import (
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// Room is the space left in a diff.
type Room struct{ Lines, Bytes int }

// DiffRoom is the space for all tables of one flush together. One table takes at most half of
// it.
func DiffRoom() Room { return Room{Lines: 500, Bytes: 64 << 10} }

// DiffOf returns the lost rules of one table as lines, jumps first, as long as there is room in
// left, which it reduces. One table gets at most half of a record's room.
func DiffOf(id rules.TableID, lost reload.Lost, left *Room) api.TableDiff {
	half := DiffRoom()
	w := NewDiffWriter(id, Room{min(left.Lines, half.Lines/2), min(left.Bytes, half.Bytes/2)})
	before := w.Room
	for _, h := range lost.Jumps {
		w.Add("-", h.String())
	}
	for _, c := range lost.Chains {
		w.chain(c)
	}
	left.Lines -= before.Lines - w.Room.Lines
	left.Bytes -= before.Bytes - w.Room.Bytes
	return w.Diff
}

// A DiffWriter writes lines until its room is used up, and counts the rest.
type DiffWriter struct {
	Diff api.TableDiff
	Room Room
}

func NewDiffWriter(id tableid.TableID, left Room) DiffWriter {
	return DiffWriter{api.TableDiff{Family: id.Family, Table: id.Name, Lines: []string{}}, left}
}

// NewNativeDiffWriter returns a DiffWriter for a native table; left bounds its lines.
func NewNativeDiffWriter(id tableid.TableID, left Room) DiffWriter {
	w := NewDiffWriter(id, left)
	w.Diff.Native = true
	return w
}

// chain writes the lost rules of a chain, and the rules in their place. A chain that was
// deleted begins with a line of its own.
func (w *DiffWriter) chain(c reload.LostChain) {
	if !c.Stands {
		w.Add("-", ":"+c.Name+" - [0:0]")
	}
	gone, instead := c.Apart()
	if len(gone)+len(instead) == 0 {
		gone, instead = c.Was, c.Is // the order of the same rules changed
	}
	w.Rules("-", c.Name, gone)
	w.Rules("+", c.Name, instead)
}

func (w *DiffWriter) Rules(sign, chain string, list []rules.Rule) {
	AddAll(w, sign, list, func(r rules.Rule) string { return rules.Jump{Chain: chain, Rule: r}.String() })
}

func (w *DiffWriter) Lines(sign string, list []native.Line) {
	AddAll(w, sign, list, func(l native.Line) string { return l.Text })
}

// AddAll writes a line for each item of a list. It makes no text of items that do not fit: More
// counts them.
func AddAll[T any](w *DiffWriter, sign string, list []T, text func(T) string) {
	for i, x := range list {
		if w.full() {
			w.Diff.More += len(list) - i
			return
		}
		w.Add(sign, text(x))
	}
}

// Add writes a line. From the first line that does not fit, it only counts.
func (w *DiffWriter) Add(sign, text string) {
	if w.full() || len(text) >= w.Room.Bytes {
		w.Room = Room{}
		w.Diff.More++
		return
	}
	w.Room.Lines--
	w.Room.Bytes -= len(sign) + len(text)
	w.Diff.Lines = append(w.Diff.Lines, sign+text)
}

func (w *DiffWriter) full() bool { return w.Room.Lines <= 0 || w.Room.Bytes <= 0 }

// A LostTable is the expected content of a native table, and its content when it was found
// lost; nil means that no table existed.
type LostTable struct{ Want, Now *native.Table }

// NativeDiff describes the lost content of tables, and the content in its place, as long as there
// is room in left, which it reduces. It takes time, and so is called when the journal needs it.
func NativeDiff(lost []LostTable, left *Room) (all []api.TableDiff) {
	for _, l := range lost {
		w := NewNativeDiffWriter(l.Want.ID, *left)
		gone, instead := native.Difference(l.Want, l.Now)
		w.Lines("-", gone)
		w.Lines("+", instead)
		*left = w.Room
		all = append(all, w.Diff)
	}
	return all
}
