package interleavings

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A taking is a commit by a flusher or a stranger that deleted marks, protected rules or jumps. Or
// it is the end of the grace of an owner that deleted a rule, and left the chain behind it.
type taking struct {
	table rules.TableID
	at    time.Time
	left  string // that chain
}

// noteTaking records a deletion in a chain, made by neither canaryd nor an owner.
func (l *ledger) noteTaking(p place, old, now []rules.Rule) {
	ours := l.protects(p.chain) || p.chain == canary.DefaultChain
	took := ours && old != nil && now == nil || slices.ContainsFunc(lacking(old, now), func(r rules.Rule) bool {
		return ours || l.protects(r.Target) || canary.IsMark(r)
	})
	if took {
		l.takings = append(l.takings, taking{p.family.Table(p.table), time.Now(), ""})
	}
}

// noteHalf records that the owner of the host ports has deleted a rule, and its chain not yet.
// After --jump-grace canaryd puts that rule back.
func (l *ledger) noteHalf(p place, old, now []rules.Rule, is *rules.Table) {
	id := p.family.Table(p.table)
	if now == nil {
		l.takings = slices.DeleteFunc(l.takings, func(t taking) bool {
			return t.table == id && t.left == p.chain && t.at.After(time.Now())
		})
	}
	for _, r := range lacking(old, now) {
		if p.chain == hostports && is.Chain(r.Target) != nil {
			l.takings = append(l.takings, taking{id, time.Now().Add(jumpGrace), r.Target})
		}
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
