package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A suspicion is the state that an earlier run of this boot and network namespace left, and
// that this run did not take up. Before marks are planted in a family, a read shows whether the
// earlier marks are in place: afterwards none can.
type suspicion struct {
	remains reload.Remains
	reason  string                 // why it was not taken up
	todo    map[rules.TableID]bool // the tables that were not judged yet
	read    map[rules.Family]bool  // the families that were read
	// unmarked: the last rules in force cannot be read, and a table lost its marks.
	unmarked bool
	retry    pace.Retry
	trouble  pace.Trouble // why they could not be read
}

// suspect plans a read that shows whether the rules of an earlier run were lost. recall calls
// it if it does not take up the last run's state, for that reason. Until the read, no marks are
// planted.
func (d *Daemon) suspect(ctx context.Context, st *state, reason string) {
	remains, ok := d.cfg.Store.Remains(d.booted())
	if !ok {
		return
	}
	s := &suspicion{remains: remains, reason: reason, retry: pace.Retry{At: time.Now()},
		todo: map[rules.TableID]bool{}, read: map[rules.Family]bool{}}
	for id := range st.tables() {
		s.todo[id] = true
	}
	st.suspicion = s
	d.recallSets(ctx, st)
}

// why returns the trouble that keeps the suspicion open; nil if there is none. plant reports it
// while tables have no marks.
func (s *suspicion) why() error {
	if s == nil || !s.trouble.There() {
		return nil
	}
	return fmt.Errorf("canaryd does not know whether rules of the last run were lost: %s", s.trouble.What)
}

// plantable returns the families in which plant may plant marks: those that a suspicion does
// not wait to read. A table that cannot be read delays no other table of its family; it gets no
// mark itself.
func (d *Daemon) plantable(st *state) []rules.Family {
	return slices.DeleteFunc(slices.Clone(d.cfg.Kernel.Families()), func(f rules.Family) bool {
		return st.suspicion != nil && !st.suspicion.read[f]
	})
}

// judgeRemains finds the tables that lost the marks and the rules of an earlier run. The
// missing rules wait for a decision. A family that cannot be read is read again later.
func (d *Daemon) judgeRemains(ctx context.Context, st *state) {
	s := st.suspicion
	there, done, err := d.guardedBefore(ctx, s.remains)
	if err != nil {
		klog.FromContext(ctx).Error(err, "The backend of the last run cannot be read; canaryd does not know whether its rules were lost", "backend", s.remains.Identity.Backend)
		s.unmarked = true
		d.judgeUnread(ctx, st)
		st.suspicion = nil
		return
	}
	defer done()
	found := map[rules.TableID]flushes.Hit{}
	var failed error
	for _, f := range rules.Families() {
		if len(tableid.Of(s.todo, f)) == 0 {
			continue
		}
		hits, err := d.lostSince(ctx, st, f, there)
		failed = errors.Join(failed, err)
		tableid.Put(found, f, hits)
	}
	if s.remains.Unread == nil {
		d.openDecision(ctx, st, found)
	}
	if failed == nil {
		d.judgeUnread(ctx, st)
		st.suspicion = nil
		return
	}
	s.retry.Failed(nil, time.Now())
	s.trouble.Report(ctx, failed, "The tables could not be read; canaryd does not know whether rules of the last run were lost", "retryIn", s.retry.Wait)
}

// guardedBefore returns a Reader of the backend that the earlier run guarded, and its close
// function. It fails if that backend cannot be opened.
func (d *Daemon) guardedBefore(ctx context.Context, r reload.Remains) (Reader, func(), error) {
	backend := iptables.Backend(r.Identity.Backend)
	if backend == d.cfg.Kernel.Info().Backend {
		return d.cfg.Kernel, func() {}, nil
	}
	if d.cfg.Elsewhere == nil {
		return nil, nil, errors.New("it is not open")
	}
	return d.cfg.Elsewhere(ctx, backend)
}

// lostSince returns a family's tables that lost their marks and rules since the earlier run.
// Lost marks are the evidence of a flush, but not of a loss that lasts. If the rules' owner has
// written them again, also on the other backend, nothing is lost. If the earlier marks are not
// known, any canary shows that none was lost. The error names the tables that could not be
// read.
func (d *Daemon) lostSince(ctx context.Context, st *state, f rules.Family, there Reader) (map[rules.TableName]flushes.Hit, error) {
	snapshot, err := there.Read(ctx, f)
	if err != nil {
		return nil, err
	}
	here := snapshot
	if there != Reader(d.cfg.Kernel) {
		if here, err = d.cfg.Kernel.Read(ctx, f); err != nil {
			return nil, err
		}
	}
	remains, todo := st.suspicion.remains, st.suspicion.todo
	st.suspicion.read[f] = true
	job := reload.Job{Generation: st.unclaimed(remains.Generation), Marks: remains.Marks}
	if remains.Marks == nil {
		job.Marks = unknownMarks(f)
	}
	hits, unread := map[rules.TableName]flushes.Hit{}, error(nil)
	for t, x := range d.examiner(st).Examine(snapshot, job) {
		id := f.Table(t)
		want := job.Generation[id]
		if st.marks.current[id].Nonce != "" {
			delete(todo, id) // it has marks of this run by now, and shows nothing any more
		}
		if !todo[id] {
			continue
		}
		if x.Finding.Err != nil {
			unread = errors.Join(unread, fmt.Errorf("%s %s: %w", f, t, x.Finding.Err))
			continue
		}
		delete(todo, id)
		s := st.suspicion
		s.unmarked = s.unmarked || s.remains.Unread != nil && d.lostMarks(s, id, x.Finding.Verdict, snapshot.Tables[t] != nil)
		switch {
		case !x.Finding.Verdict.Loss(), remains.Marks == nil && x.Finding.Verdict == canary.Replaced:
		case canary.Covers(want, snapshot.Tables[t]), canary.Covers(want, here.Tables[t]):
		default:
			hits[t] = flushes.HitOf(x)
		}
	}
	return hits, unread
}

// unknownMarks returns marks that were planted and are not known: by them each canary is
// another planting's.
func unknownMarks(f rules.Family) canary.Marks {
	marks := canary.Marks{}
	for _, t := range protect.Tables() {
		marks = marks.With(f.Table(t), canary.Mark{Nonce: canary.NewNonce()})
	}
	return marks
}

// openDecision opens a decision about lost tables, or adds to the open one. Tables that lost no
// rule are recorded with others, and alone are no loss.
func (d *Daemon) openDecision(ctx context.Context, st *state, found map[rules.TableID]flushes.Hit) {
	w, s, now := st.decision, st.suspicion, time.Now()
	first := w == nil
	if first {
		w = &decision{
			id: s.remains.ID, generation: st.unclaimed(s.remains.Generation), identity: s.remains.Identity,
			backend: iptables.Backend(s.remains.Identity.Backend), reason: s.reason, waiting: flushes.Verdicts{}, room: flushes.DiffRoom(),
			record: api.Flush{ID: fmt.Sprintf("%x", now.UnixMicro()), Time: now, Outcome: api.AwaitingDecision, Detail: s.reason},
		}
		if s.remains.Uptime > 0 {
			w.record.LastInForce = d.inForceAt(s.remains.Uptime)
		}
	}
	fresh := w.add(found)
	if len(fresh) == 0 {
		return
	}
	st.decision, w.kept = w, false
	st.generation.edition++ // the sets of the lost generation are kept, too
	if first {
		d.cfg.Metrics.ObserveFlush(w.record.Time, fresh.Public())
	} else {
		d.cfg.Metrics.ObserveFurtherLoss(fresh.Public())
	}
	for id := range fresh {
		d.cfg.Metrics.ObserveUnprotected(id.Family, id.Name, 0, found[id].TookMarks())
	}
	st.journal.Rewrite(w.record)
	d.write(ctx, w.record, w.diff)
	d.keepDecision(ctx, st)
	d.logAwaiting(ctx, w)
}

// add adds lost tables to the decision and returns the new ones, none if no rule was lost.
// openDecision records these.
func (w *decision) add(found map[rules.TableID]flushes.Hit) flushes.Verdicts {
	fresh := flushes.Verdicts{}
	if !anyOf(found, func(h flushes.Hit) bool { return h.Lost.Rules > 0 }) {
		return fresh
	}
	for _, id := range flushes.TableIDs() {
		h, hit := found[id]
		if !hit || w.waiting[id] != "" {
			continue
		}
		fresh[id] = h.Verdict
		if h.Lost.Rules > 0 {
			w.waiting[id] = h.Verdict
		}
		h.Unsure = h.TookMarks() // canaryd did not run, and never read the table's other rules
		flushes.AddLoss(&w.record, id, h)
		w.diff = append(w.diff, flushes.DiffOf(id, h.Lost, &w.room))
	}
	return fresh
}
