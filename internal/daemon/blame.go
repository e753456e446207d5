package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// inquire asks what is known now.
func (d *Daemon) inquire(ctx context.Context) culprit.Inquiry {
	q := culprit.Inquiry{Canary: d.cfg.Canary, Writers: d.cfg.Writers, Own: d.cfg.Kernel.Own, Legacy: d.cfg.Kernel.Info().Backend == iptables.Legacy}
	if !q.Legacy {
		q.Takings = d.cfg.Kernel.Takings(ctx)
	}
	return q
}

// charge makes up what is asked about one table.
func (d *Daemon) charge(st *state, id rules.TableID, finding canary.Finding, upto uint64) culprit.Charge {
	fs, mark := st.families[id.Family], st.marks.current[id]
	c := culprit.Charge{ID: id, Finding: finding, Canary: d.cfg.Canary, Nonces: []canary.Nonce{mark.Nonce},
		Intact: uint32(fs.looked.intact), Sound: uint32(fs.examined.sound), Upto: uint32(upto)}
	if ts := st.table(id); !ts.unmarked(id.Name) { // no write proves that anything of it is in force
		c.InForce = uint32(ts.inForce)
	}
	if c.InForce != 0 {
		c.Intact, c.Sound = culprit.Later(c.Intact, c.InForce), culprit.Later(c.Sound, c.InForce)
	}
	if mark.Tried != nil {
		c.Nonces = append(c.Nonces, mark.Tried.Nonce)
	}
	return c
}

// blame names the likely culprits, as far as they are known before the loss is read under
// guard. It runs after the wait for the flusher, because a commit is visible to a probe a moment
// before the watcher has read its message. recordLosses finds out what the record says in the
// end.
func (d *Daemon) blame(ctx context.Context, st *state, l *loss) {
	q := d.inquire(ctx)
	q.Purge = st.purges.Current(time.Now())
	l.record.Culprits, l.record.CulpritsMissed, l.record.CulpritsLikely = nil, false, false
	for id, ts := range st.tables() {
		if finding := st.suspected(l, id, ts.verdict); finding.Verdict.Loss() {
			by, missed := q.Answer(d.charge(st, id, finding, uint64(q.Newest(l.heard))))
			flushes.Accuse(&l.record, by)
			l.record.CulpritsMissed = l.record.CulpritsMissed || missed
		}
	}
	q.AddWriters(&l.record, l.bounds(), l.hit)
	flushes.SettleCulprit(&l.record)
}

// suspected returns what is known to be lost of a table: what a read found, or else what a
// probe of its marks showed.
func (st *state) suspected(l *loss, id rules.TableID, v canary.Verdict) canary.Finding {
	finding := l.memory.Finding(id)
	if finding.Verdict.Loss() || !v.Loss() {
		return finding
	}
	finding = canary.Finding{Verdict: v, MarkLost: v != canary.JumpsMissing && v != canary.Drifted}
	if v == canary.JumpsMissing {
		finding.Witnesses = st.marks.current[id].Witnessed
	}
	return finding
}
