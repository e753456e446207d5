package daemon

import (
	"cmp"
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A jump that was deleted by name, and a chain that was emptied, may be the first step of their
// owner's work (canary.Finding.Waiting). The owner has --jump-grace from the deletion on, also
// while other processes write. Meanwhile the node is not healthy, and the status has a record.
// The record is kept only if the rules are still missing at the end.

// A missing is a jump, or the content of a chain, that waits for its owner.
type missing struct {
	jump    rules.Jump
	since   time.Time    // of the commit that took it; else of the first evidence
	inForce time.Time    // when it was last known to be in force; zero: the commit is known
	noticed time.Time    // when a read first lacked it
	by      *api.Culprit // nil: not known
	said    bool         // by the log
}

const (
	// missingSaidAfter is how long something must be missing for a line in the log: the end of a
	// pod takes milliseconds.
	missingSaidAfter = time.Second
	// missingSaidEvery bounds the lines about one table: an owner may delete a jump and insert it
	// again for ever.
	missingSaidEvery = time.Minute
)

// is reports whether h of a finding or a job is this jump, or a rule of this chain.
func (m missing) is(id rules.TableID, h rules.Jump) bool {
	if !rules.Builtin(id.Name, m.jump.Chain) {
		return m.jump.Chain == h.Chain
	}
	return m.jump.Same(h)
}

// in reports whether a finding still lacks it, or cannot say. Otherwise the rules are back, and
// forgetReturned forgets them.
func (m missing) in(id rules.TableID, f canary.Finding) bool {
	is := func(h rules.Jump) bool { return m.is(id, h) }
	return slices.ContainsFunc(f.Waiting, is) || m.lost(id, f) || f.Verdict == canary.Unknown
}

// lost reports whether a finding counts it as lost, because its grace is over or a flush took
// more. countFromDeletion then dates the loss back to its deletion.
func (m missing) lost(id rules.TableID, f canary.Finding) bool {
	return slices.Contains(f.Emptied, m.jump.Chain) || slices.ContainsFunc(f.Jumps, func(h rules.Jump) bool { return m.is(id, h) })
}

// stands reports whether s, the protected part of table id in a read, has the jump, or the chain
// with rules. It is then no longer missing. takeMarks and lackedBy call it after a proved write.
func (m missing) stands(id rules.TableID, s rules.Section) bool {
	if !rules.Builtin(id.Name, m.jump.Chain) {
		c, _ := s.Chain(m.jump.Chain)
		return len(c.Rules) > 0
	}
	return slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool { return m.is(id, h) })
}

// lackedBy counts the jumps and chains of a list that a section does not have. Metrics show
// them as missing after a proved write.
func lackedBy(id rules.TableID, s rules.Section, list []rules.Jump) (n int) {
	for _, h := range list {
		if m := (missing{jump: h}); !m.stands(id, s) {
			n++
		}
	}
	return n
}

// alone returns it as a finding, so that an Inquiry looks for the process that took it alone.
func (m missing) alone(id rules.TableID) canary.Finding {
	if !rules.Builtin(id.Name, m.jump.Chain) {
		return canary.Finding{Verdict: canary.Emptied, Emptied: []string{m.jump.Chain}}
	}
	return canary.Finding{Verdict: canary.JumpsMissing, Jumps: []rules.Jump{m.jump}}
}

// text names it for the log.
func (m missing) text(id rules.TableID) string {
	if !rules.Builtin(id.Name, m.jump.Chain) {
		return "all of " + m.jump.Chain
	}
	return m.jump.Chain + " " + m.jump.Rule.Label()
}

// graceEnds returns when the grace of a missing jump or chain ends. If a pod's chain is kept
// because its file exists (KeptFor), the family must be quiet, too: a slow DEL is not to be
// undone.
func (d *Daemon) graceEnds(st *state, id rules.TableID, m missing) time.Time {
	end := m.since.Add(d.cfg.JumpGrace)
	if !rules.Builtin(id.Name, m.jump.Chain) && st.generation.learned.Shrunk(id.Family, id.Name, m.jump.Chain).IsZero() {
		end = pace.Latest(end, st.families[id.Family].examined.moved.Add(d.cfg.JumpGrace))
	}
	return end
}

// graceOver reports whether a table misses h and the grace of h is over. Reads then count it as
// lost, and replays put it back (Job.Over).
func (d *Daemon) graceOver(st *state, id rules.TableID, h rules.Jump, now time.Time) bool {
	return slices.ContainsFunc(st.table(id).missing, func(m missing) bool { return m.is(id, h) && pace.Due(d.graceEnds(st, id, m), now) })
}

// anyGraceOver reports whether the grace of any missing jump or chain is over. Then judge
// examines a read once more with these rules as lost, and heal notes that the loss has jumps
// that were deleted by name.
func (d *Daemon) anyGraceOver(st *state, now time.Time) bool {
	for id, ts := range st.tables() {
		if slices.ContainsFunc(ts.missing, func(m missing) bool { return pace.Due(d.graceEnds(st, id, m), now) }) {
			return true
		}
	}
	return false
}

// missingKind returns the verdict that a Status shows for a table while its rules wait for
// their owner.
func (ts *tableState) missingKind(id rules.TableID) canary.Verdict {
	if slices.ContainsFunc(ts.missing, func(m missing) bool { return !rules.Builtin(id.Name, m.jump.Chain) }) {
		return canary.Emptied
	}
	return canary.JumpsMissing
}

// forgetReturned forgets the jumps and chains that a read shows again, and returns them:
// followMissing logs their return.
func (ts *tableState) forgetReturned(id rules.TableID, f canary.Finding) (back []missing) {
	if len(ts.missing) == 0 {
		return nil
	}
	var still []missing
	for _, m := range ts.missing {
		if m.in(id, f) {
			still = append(still, m)
		} else {
			back = append(back, m)
		}
	}
	ts.missing = still
	return back
}

// planGraces plans an examination of the rules that wait in a finding when their grace is over.
// It is due at once if their deletion was not looked up yet.
func (d *Daemon) planGraces(st *state, id rules.TableID, f canary.Finding) {
	fs, ts := st.families[id.Family], st.table(id)
	for _, h := range f.Waiting {
		at := time.Now()
		if i := slices.IndexFunc(ts.missing, func(m missing) bool { return m.is(id, h) }); i >= 0 {
			m := ts.missing[i]
			at = d.graceEnds(st, id, m)
			if sayAt := m.since.Add(missingSaidAfter); !m.said && sayAt.After(fs.examined.readEnd) {
				at = pace.Earliest(at, sayAt)
			}
			at = pace.Latest(at, fs.examined.readEnd.Add(captureMost))
		}
		fs.examined.plan(at)
	}
}

// followMissing notes the rules that an examination (x, by judge) found missing and that their
// owner may have deleted: since when, and by which process. It logs rules that are missing for
// longer than missingSaidAfter.
func (d *Daemon) followMissing(ctx context.Context, st *state, id rules.TableID, x reload.Examined, now time.Time) {
	fs, ts := st.families[id.Family], st.table(id)
	log := klog.FromContext(ctx).WithValues("family", id.Family, "table", id.Name)
	if back := ts.forgetReturned(id, x.Finding); slices.ContainsFunc(back, func(m missing) bool { return m.said }) {
		severity.Notices(log).Info("Rules that were deleted by name are back, or their owner deleted the rest", "rules", missingTexts(id, back))
	}
	if len(x.Finding.Waiting) == 0 {
		return
	}
	q := d.inquire(ctx)
	for _, h := range x.Finding.Waiting {
		i := slices.IndexFunc(ts.missing, func(m missing) bool { return m.is(id, h) })
		known := i >= 0
		if !known {
			i = len(ts.missing)
			ts.missing = append(ts.missing, missing{jump: h, since: fs.examined.since, noticed: time.Now(), inForce: cmp.Or(fs.known.at, st.absence.lastRun)})
		}
		m := &ts.missing[i]
		c := d.charge(st, id, m.alone(id), x.Seen)
		if w, found := q.LastTaker(c); found {
			by := api.CulpritOf(w)
			first := m.by == nil
			m.since, m.inForce, m.by = w.Time, time.Time{}, &by
			switch late := m.noticed.Before(m.since); {
			case late && first: // the commit was heard of after the read that missed the rule
				m.since = m.noticed
			case late: // it came back and was deleted again between two reads
				m.noticed = time.Now()
			}
		} else if !known {
			m.by = q.Taker(c, m.since)
		}
	}
	by := "unknown"
	var list []missing
	for i := range ts.missing {
		m := &ts.missing[i]
		if m.said || now.Sub(m.since) < missingSaidAfter || now.Sub(ts.missingSaid) < missingSaidEvery {
			continue
		}
		m.said = true
		if list = append(list, *m); m.by != nil {
			by = flushes.CulpritText(*m.by)
		}
	}
	if len(list) == 0 {
		return
	}
	ts.missingSaid = now
	severity.Warnings(log).Info("Rules were deleted by name; their owner has --jump-grace to write them again or to delete the rest, and then canaryd puts them back",
		"rules", missingTexts(id, list), "by", by, "grace", d.cfg.JumpGrace)
}

// missingTexts names the first of these rules for one line of the log.
func missingTexts(id rules.TableID, list []missing) (texts []string) {
	for _, m := range list[:min(len(list), flushes.NamesKept)] {
		texts = append(texts, m.text(id))
	}
	return texts
}

// countFromDeletion dates a loss that was opened just now back to the deletion of its rules,
// whose grace is over. It leaves a loss of marks as it is.
func (d *Daemon) countFromDeletion(st *state, id rules.TableID, f canary.Finding) {
	l := st.loss
	if l.logged || l.known() || f.MarkLost || st.holder(l.openRecord, &l.answer) != nil {
		return
	}
	began := func(since, noticed, inForce time.Time) {
		l.noticed = pace.Earliest(l.noticed, noticed)
		if since.Before(l.record.Time) {
			l.record.Time, l.record.ID = since, st.newFlushID(since)
		}
		if !inForce.IsZero() && inForce.Before(l.record.Time) {
			l.record.LastInForce = pace.Earliest(l.record.LastInForce, inForce)
		}
	}
	for _, r := range st.pods.LostSince(id, time.Now()) {
		began(r.Since, r.Since, r.InForce)
	}
	for _, m := range st.table(id).missing {
		if !m.lost(id, f) || slices.Contains(f.Witnesses, m.jump.Chain) {
			continue
		}
		l.jumpsDeleted = true
		began(m.since, m.noticed, m.inForce)
	}
}

// missingRecord returns a record of the rules that wait for their owner; false if there are
// none.
func (st *state) missingRecord() (r api.Flush, waits bool) {
	r.Outcome = api.WaitingOwner
	var inForce, noticed time.Time
	pods := map[protect.Attachment]bool{}
	for id, ts := range st.tables() {
		missed := st.pods.MissedIn(id)
		if len(ts.missing)+len(missed) == 0 || ts.verdict.Loss() {
			continue
		}
		h := flushes.Hit{Verdict: ts.missingKind(id)}
		var by []uint32
		for _, m := range ts.missing {
			r.Time, noticed = pace.Earliest(r.Time, m.since), pace.Earliest(noticed, m.noticed)
			inForce = pace.Earliest(inForce, cmp.Or(m.inForce, m.since))
			if rules.Builtin(id.Name, m.jump.Chain) {
				h.Lost.Jumps, h.Lost.Rules = append(h.Lost.Jumps, m.jump), h.Lost.Rules+1
			} else if c, ok := st.want()[id].Chain(m.jump.Chain); ok {
				h.Lost.Chains = append(h.Lost.Chains, reload.LostChain{Name: c.Name, Was: c.Rules, Stands: true})
				h.Lost.Rules += len(c.Rules)
			}
			if m.by != nil {
				flushes.AddCulprit(&r, *m.by)
				by = append(by, m.by.PID)
			}
		}
		for a, robbed := range missed {
			r.Time, noticed = pace.Earliest(r.Time, robbed.Since), pace.Earliest(noticed, robbed.Since)
			inForce = pace.Earliest(inForce, robbed.InForce)
			robbed.AddTo(&h.Lost, st.want()[id])
			pods[a] = true
		}
		flushes.AddLoss(&r, id, h)
		slices.Sort(by)
		r.Lost.Tables[len(r.Lost.Tables)-1].By = slices.Compact(by)
	}
	if waits = !r.Time.IsZero(); waits {
		r.ID, r.NoticedSeconds = st.newFlushID(r.Time), max(noticed.Sub(r.Time).Seconds(), 0)
		if inForce.Before(r.Time) {
			r.LastInForce = inForce
		}
		flushes.SettleCulprit(&r)
		st.pods.AddPods(&r, pods, false)
	}
	return r, waits
}

// publishMissing puts the rules that wait for their owner into a status. While a loss is open,
// its record says enough.
func (d *Daemon) publishMissing(st *state, s *api.Status) {
	r, waits := st.missingRecord()
	if !waits || st.removed {
		return
	}
	s.LossSince = pace.Earliest(s.LossSince, r.Time)
	if st.loss != nil {
		return
	}
	s.Flushes = insertRecord(s.Flushes, r)
	for id, ts := range st.tables() {
		for _, m := range ts.missing {
			if end := d.graceEnds(st, id, m); st.heals() && !ts.verdict.Loss() && end.After(time.Now()) {
				s.OwnerUntil = pace.Earliest(s.OwnerUntil, end)
			}
		}
		for _, r := range st.pods.MissedIn(id) {
			if end := st.pods.LostAt(r); st.heals() && !ts.verdict.Loss() && end.After(time.Now()) {
				s.OwnerUntil = pace.Earliest(s.OwnerUntil, end)
			}
		}
	}
}
