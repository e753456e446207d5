package daemon

import (
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A standing is what a read showed of a table in which nothing was lost.
type standing struct {
	table  *rules.Table // nil: nothing was read yet, or there is no such table
	digest uint64
}

// setStanding takes up what a read showed of a table in which nothing is lost.
func (ts *tableState) setStanding(table *rules.Table, digest uint64) {
	if !ts.verdict.Loss() && ts.verdict != canary.Unknown && digest != 0 {
		ts.standing = standing{table, digest}
	}
}

// unprotectedGone counts the rules that --protect does not name and that went in the same
// flush. That is not known where the table was not read as it was right before, or where
// another process wrote to it as well. What was taken while all marks stand is no flush: rules
// of others are not near it.
func (d *Daemon) unprotectedGone(st *state, id rules.TableID, h flushes.Hit, q culprit.Inquiry) (gone int, unsure bool) {
	if !h.TookMarks() {
		return 0, false
	}
	intact, before := st.families[id.Family].looked.intact, st.table(id).standing
	// A look in the middle of the flush finds those tables intact that the flusher comes to later.
	asOf := before.digest == intact || !q.Legacy && q.Takings.Reach(uint32(before.digest))
	if before.table == nil || !asOf || q.OthersWrote(id, uint32(before.digest), uint32(h.Seen), h.By) {
		return 0, true
	}
	return d.protection(st).OthersIn(before.table, st.want()[id], canary.IsMark).Gone(h.Table), false
}
