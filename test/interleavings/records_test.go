package interleavings

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A taking is a commit by a flusher or a stranger that deleted marks, protected rules or jumps.
type taking struct {
	table rules.TableID
	at    time.Time
}

// noteTaking records a deletion in a chain, made by neither canaryd nor an owner.
func (l *ledger) noteTaking(p place, old, now []rules.Rule) {
	ours := l.protects(p.chain) || p.chain == canary.DefaultChain
	took := ours && old != nil && now == nil || slices.ContainsFunc(lacking(old, now), func(r rules.Rule) bool {
		return ours || l.protects(r.Target) || canary.IsMark(r)
	})
	if took {
		l.takings = append(l.takings, taking{p.family.Table(p.table), time.Now()})
	}
}

// judgeRecords requires a taking for each table of each record, after the table's last replay.
// Without a taking the record is of a false flush.
func (l *ledger) judgeRecords(records []api.Flush) {
	replayed := map[rules.TableID]time.Time{}
	for _, r := range slices.Backward(records) { // the newest is the first
		end := r.Time.Add(time.Duration(max(r.AbsentSeconds, r.NoticedSeconds) * float64(time.Second)))
		for _, lost := range r.Lost.Tables {
			id := lost.Family.Table(lost.Table)
			if !slices.ContainsFunc(l.takings, func(t taking) bool {
				return t.table == id && !t.at.Before(replayed[id]) && !t.at.After(end)
			}) {
				l.violation("a record of a flush that was none: %s, %+v", r.Time.Format("04:05.000000"), r)
			}
			replayed[id] = r.Time.Add(time.Duration(r.WrittenSeconds * float64(time.Second)))
		}
	}
}
