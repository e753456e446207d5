package daemon

import (
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
)

// A lostTable is what a native table ought to hold, and what stood when it was found lost; nil:
// nothing.
type lostTable struct{ want, now *native.Table }

// nativeDiff says in words what tables lost, and what stood in its place, as long as there is room.
// It is made when the tables are back.
func nativeDiff(lost []lostTable) (all []api.TableDiff) {
	left := diffRoom()
	for _, l := range lost {
		w := diffWriter{diff: api.TableDiff{Family: l.want.ID.Family, Table: l.want.ID.Name, Lines: []string{}}, room: left}
		gone, instead := native.Difference(l.want, l.now)
		w.lines("-", gone)
		w.lines("+", instead)
		left = w.room
		all = append(all, w.diff)
	}
	return all
}
