package daemon

import (
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// room is how much more a diff may hold.
type room struct{ lines, bytes int }

// diffRoom is that of all tables of one flush together; one table takes half of
// it at most.
func diffRoom() room { return room{lines: 500, bytes: 64 << 10} }

// diffOf returns what is lost of one table as lines, as long as there is room; jumps first.
func diffOf(id rules.TableID, lost reload.Lost, left *room) api.TableDiff {
	half := diffRoom()
	w := newDiffWriter(id, room{min(left.lines, half.lines/2), min(left.bytes, half.bytes/2)})
	before := w.room
	for _, h := range lost.Jumps {
		w.add("-", h.String())
	}
	for _, c := range lost.Chains {
		w.chain(c)
	}
	left.lines -= before.lines - w.room.lines
	left.bytes -= before.bytes - w.room.bytes
	return w.diff
}

// A diffWriter writes lines until its room is used up, and counts the others.
type diffWriter struct {
	diff api.TableDiff
	room room
}

func newDiffWriter(id tableid.TableID, left room) diffWriter {
	return diffWriter{api.TableDiff{Family: id.Family, Table: id.Name, Lines: []string{}}, left}
}

func newNativeDiffWriter(id tableid.TableID, left room) diffWriter {
	w := newDiffWriter(id, left)
	w.diff.Native = true
	return w
}

func (w *diffWriter) chain(c reload.LostChain) {
	if !c.Stands {
		w.add("-", ":"+c.Name+" - [0:0]")
	}
	gone, instead := c.Apart()
	if len(gone)+len(instead) == 0 {
		gone, instead = c.Was, c.Is // the same rules in another order
	}
	w.rules("-", c.Name, gone)
	w.rules("+", c.Name, instead)
}

func (w *diffWriter) rules(sign, chain string, list []rules.Rule) {
	addAll(w, sign, list, func(r rules.Rule) string { return rules.Jump{Chain: chain, Rule: r}.String() })
}

func (w *diffWriter) lines(sign string, list []native.Line) {
	addAll(w, sign, list, func(l native.Line) string { return l.Text })
}

// addAll writes a line for each of a list. It makes no text of those that do not fit.
func addAll[T any](w *diffWriter, sign string, list []T, text func(T) string) {
	for i, x := range list {
		if w.full() {
			w.diff.More += len(list) - i
			return
		}
		w.add(sign, text(x))
	}
}

// add writes a line or, from the first that does not fit, counts it.
func (w *diffWriter) add(sign, text string) {
	if w.full() || len(text) >= w.room.bytes {
		w.room = room{}
		w.diff.More++
		return
	}
	w.room.lines--
	w.room.bytes -= len(sign) + len(text)
	w.diff.Lines = append(w.diff.Lines, sign+text)
}

func (w *diffWriter) full() bool { return w.room.lines <= 0 || w.room.bytes <= 0 }

// A lostTable is what a native table ought to hold, and what stood when it was found lost; nil:
// nothing.
type lostTable struct{ want, now *native.Table }

// nativeDiff says in words what tables lost, and what stood in its place, as long as there is room.
// It is made when the tables are back.
func nativeDiff(lost []lostTable) (all []api.TableDiff) {
	left := diffRoom()
	for _, l := range lost {
		w := newNativeDiffWriter(l.want.ID, left)
		gone, instead := native.Difference(l.want, l.now)
		w.lines("-", gone)
		w.lines("+", instead)
		left = w.room
		all = append(all, w.diff)
	}
	return all
}
