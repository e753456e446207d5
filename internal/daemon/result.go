package daemon

import (
	"context"
	"time"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/metrics"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// applyResult takes the result of a write and its proof for one family into the state, after
// replays, planting, renewals and removals. Without a digest another process wrote meanwhile,
// and an examination follows.
func (d *Daemon) applyResult(ctx context.Context, st *state, f rules.Family, fr reload.FamilyResult) {
	fs, now := st.families[f], time.Now()
	fs.examined.since = pace.Earliest(now, fs.examined.dirty)
	if fr.Digest != 0 {
		fs.examined.digest, fs.examined.at = fr.Digest, now
	}
	st.memory.ScheduleFree(now)
	fs.proxy.saw(fr.ProxyCanaryStands(), fr.ProxyKnown(), now)
	st.addMade(f, fr)
	for _, t := range protect.Tables() {
		if tr, ok := fr.Tables[t]; ok {
			d.takeWritten(ctx, st, f.Table(t), tr, fr.Digest, now)
			if fr.Digest != 0 && tr.Read {
				fs.tables[t].setSettled(culprit.Read{Digest: fr.Digest, At: now.Add(-fr.Took)})
			}
		}
	}
	if fr.Digest != 0 {
		d.lookAtUnguarded(st, f, fr.OnDemand, now)
		fs.looked.unseen = time.Time{}
		fs.setKnown(now)
		fs.setSound(fr.Digest)
	} else {
		fs.markDirty(now)
	}
	fs.openWindow(fr, now)
	d.examineAfter(st, f, fr, now)
	if st.decision.waitsIn(f) { // the read was not compared with the decision's rules
		fs.examined.plan(now)
	}
	st.disk.marksChanged(now)
}

// openWindow notes that the read after a write showed the rules in force: a loss from now on
// began after it. If another process wrote meanwhile, the read judged only the written rules.
func (fs *familyState) openWindow(fr reload.FamilyResult, now time.Time) {
	if fs.probeResult() != metrics.ProbeIntact || fs.anyTable(func(ts *tableState) bool { return ts.jumpsMissing > 0 }) {
		return
	}
	for t, ts := range fs.tables {
		switch tr := fr.Tables[t]; {
		case fr.Digest != 0:
			ts.inForce = fr.Digest
		case tr.Proved:
			ts.inForce = fr.Proof
		}
	}
	if fr.Digest == 0 && !fr.Outcome.Done() {
		return
	}
	fs.written = fr.Written
	if fs.written.IsZero() { // nothing was lost
		fs.written = now.Add(-fr.Took)
	}
	fs.looked.unasked, fs.looked.unseen = notBefore(fs.looked.unasked, fs.written), notBefore(fs.looked.unseen, fs.written)
}

// notBefore returns at, unless it is before first; zero stays zero. A hint before a write or
// look says nothing about later losses.
func notBefore(at, first time.Time) time.Time {
	if at.IsZero() {
		return at
	}
	return pace.Latest(at, first)
}

// takeWritten takes the result of a write and its proof for one table into the state. The
// digest is that of the proof; 0: another process wrote meanwhile.
func (d *Daemon) takeWritten(ctx context.Context, st *state, id rules.TableID, tr reload.TableResult, digest uint64, now time.Time) {
	fs, ts := st.families[id.Family], st.table(id)
	judged := d.take(st, tableFinding{id: id, source: readInFull, finding: tr.Finding, mark: tr.Mark, absent: tr.Absent,
		table: tr.Table, section: tr.Section, read: tr.Read, proved: tr.Proved})
	known := st.generation.learned.Knows(id.Family, id.Name)
	if tr.Proved {
		ts.addPlaced(tr.Placed, now)
	}
	if tr.LostBeforeProof != nil && !known {
		d.learn(ctx, st, id, *tr.LostBeforeProof, canary.Finding{Verdict: canary.Intact}, now)
		fs.examined.plan(now)
		return
	}
	if (tr.Proved || tr.Landed) && tr.Replayed { // else the missing rules would not be known
		st.mean(id, tr, now)
		d.setQuarantine(ctx, st, id, tr.Quarantined, nil, quarantine.Replay)
	}
	if !tr.Read || !judged {
		return
	}
	// If another process wrote meanwhile, finding and section come from different reads. A jump
	// that was deleted in between gets its grace from the examination that follows.
	if (digest != 0 || !known) && !ts.verdict.Loss() && ts.verdict != canary.Unknown {
		if id.Name == rules.Nat {
			d.followWritten(ctx, st, id, tr.Section, now)
		}
		d.learn(ctx, st, id, tr.Section, tr.Finding, now)
	}
	ts.setStanding(tr.Table, digest)
}

// mean learns the rules that a replay wrote on purpose in place of learned ones (tr.Meant):
// they ought to be in force from now on.
func (st *state) mean(id rules.TableID, tr reload.TableResult, now time.Time) {
	_, meant := tr.Meant.Split(st.declared.now.Claims) // declared rules are not learned
	if len(meant.Chains)+len(meant.Jumps) == 0 || !st.generation.learned.Knows(id.Family, id.Name) {
		return
	}
	before, next := st.generation.learned.Generation[id], st.generation.learned.Mean(id, meant, tr.Quarantined)
	if before.Equal(next.Generation[id]) {
		return
	}
	st.accept(id, before, next.Generation[id], now)
	st.generation.made = reload.MadeByOwners
	st.relearn(next, now, st.families[id.Family])
}

// examineAfter plans an examination of changes that the reads around a write were the first to
// show. A look that finds the digest of such a read takes it for examined. A jump that was
// deleted by name waits for its grace. A loss that a renewal found under intact marks has no
// replay yet.
func (d *Daemon) examineAfter(st *state, f rules.Family, fr reload.FamilyResult, now time.Time) {
	fs := st.families[f]
	for t, tr := range fr.Tables {
		ts := fs.tables[t]
		if !ts.learningStopped {
			d.planGraces(st, f.Table(t), tr.Finding)
		}
		if st.loss == nil && ts.verdict.Loss() && !ts.learningStopped {
			fs.examined.plan(now)
		}
	}
}
