package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/severity"
)

// journal keeps the finished record of a loss, newest first. On disk it gets the lost rules that
// the disk lacks.
func (d *Daemon) journal(ctx context.Context, st *state, o *openRecord) {
	o.compare(&st.baseline)
	d.keepRecord(ctx, st, o.record, o.kept, func() { d.write(ctx, o.record, o.takeUnkept()) })
}

// keepOpen writes a lasting loss to the journal. If canaryd is killed meanwhile, only the
// journal knows the culprit.
func (d *Daemon) keepOpen(ctx context.Context, st *state, o *openRecord) {
	if o.unkept {
		o.kept = true
		o.compare(&st.baseline)
		d.write(ctx, o.record, o.takeUnkept())
	}
}

// keepHeld writes a loss that canaryd leaves as it is to the journal, with the reason.
func (d *Daemon) keepHeld(ctx context.Context, st *state, o *openRecord, why api.Outcome) {
	if o.kept && !o.unkept && o.record.Outcome == why {
		return // a pause may last for hours, on a busy node
	}
	o.record.Outcome, o.kept = why, true
	o.compare(&st.baseline)
	d.write(ctx, o.record, o.takeUnkept())
}

// write gives a record to the journal, which does not wait for the disk. Without a diff the
// journal keeps its present one.
func (d *Daemon) write(ctx context.Context, record api.Flush, diff []api.TableDiff) {
	if d.cfg.Journal == nil {
		return
	}
	e, err := flushes.EntryOf(record, diff)
	if err == nil {
		err = d.cfg.Journal.Keep(e)
	}
	if err != nil {
		d.reportJournal(ctx, err)
	}
}

// reportJournal notes whether the journal could be written (err is nil), for status, metrics
// and log. Any goroutine may call it.
func (d *Daemon) reportJournal(ctx context.Context, err error) {
	if err != nil {
		d.cfg.Metrics.ObserveJournalError()
	}
	log := klog.FromContext(ctx)
	switch changed := d.journalTrouble.Take(err, time.Now()); {
	case changed && err != nil:
		severity.Warnings(log).Error(err, "A flush record is not on disk; it will be lost when canaryd restarts")
	case changed:
		severity.Notices(log).Info("The flush records are on disk again")
	}
}

// recallFlushes takes up the records of earlier runs, also of other boots. They are shown, and
// this run may continue a record that was left open.
func (d *Daemon) recallFlushes(ctx context.Context, st *state) {
	if d.cfg.Journal == nil {
		return
	}
	entries, err := d.cfg.Journal.Load(flushes.Kept)
	if err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "Some earlier flush records cannot be read")
	}
	for _, e := range entries {
		if record, ok := flushes.StoredFlush(e); ok {
			st.journal.Remember(flushes.OfEarlier(record))
			d.keepUnanswered(st, record)
		}
	}
}

// Flush returns the whole record of one flush, with its rules. r.Name is its ID, or its number
// in the list.
func (d *Daemon) Flush(ctx context.Context, r api.FlushRequest) (api.FlushReply, error) {
	list := flushes.History(d.Status().Flushes)
	reply := api.FlushReply{Diff: []api.TableDiff{}}
	id, i := r.Name, list.Find(r.Name)
	if i >= 0 {
		id = list[i].ID
	}
	kept, diff, err := d.kept(ctx, id)
	if i < 0 && err != nil {
		if i = list.Counting(id); i >= 0 {
			kept, diff, err = d.kept(ctx, list[i].ID)
		}
	}
	if i >= 0 {
		reply.Flush = list[i]
	}
	switch {
	case i < 0 && err != nil:
		return api.FlushReply{}, fmt.Errorf("%w: %q; %s", api.ErrNoFlush, r.Name, list.Offer())
	case err != nil:
		reply.NoDiff = err.Error()
		return reply, nil
	case i < 0 && kept.Time.Before(d.made):
		reply.Flush = flushes.OfEarlier(kept)
	case i < 0:
		reply.Flush = kept
	case kept.Lost.Rules == reply.Flush.Lost.Rules:
		reply.Flush.Lost = kept.Lost // with the chains that are too many for the memory
	}
	if reply.Diff = append(reply.Diff, diff...); len(diff) == 0 {
		reply.NoDiff = "the journal has the record without its rules"
	}
	return reply, nil
}

// kept returns the journal's record of a flush, with its lost rules, for Flush. The error says
// why there is none.
func (d *Daemon) kept(ctx context.Context, id string) (api.Flush, []api.TableDiff, error) {
	if d.cfg.Journal == nil {
		return api.Flush{}, nil, errors.New("no state folder is in use")
	}
	e, err := d.cfg.Journal.Find(ctx, id)
	if err != nil {
		return api.Flush{}, nil, err
	}
	record, ok := flushes.StoredFlush(e)
	if !ok {
		return api.Flush{}, nil, fmt.Errorf("the journal's record of flush %s cannot be read", id)
	}
	var detail flushes.FlushDetail
	if e.Detail != nil {
		err = json.Unmarshal(e.Detail, &detail)
	}
	return record, detail.Diff, err
}

// keepRecord keeps a finished record and writes it by write, unless it is only counted in
// another one like it. open: the journal has it as an open record, which the next run would
// continue.
func (d *Daemon) keepRecord(ctx context.Context, st *state, record api.Flush, open bool, write func()) {
	into := st.journal.FoldsInto(record)
	if open || into == nil || into.Outcome != record.Outcome {
		st.journal.Remember(record)
		write()
		return
	}
	if into.Repeated == nil {
		severity.Warnings(klog.FromContext(ctx)).Info("The same process flushes the same tables again and again; further flushes are counted in one record",
			"flush", into.ID, "by", flushes.CulpritsText(record))
	}
	next := api.Repeated{Times: 1, Last: record.Time, MostAbsentSeconds: record.AbsentSeconds}
	if r := into.Repeated; r != nil {
		next.Times, next.MostAbsentSeconds = r.Times+1, max(r.MostAbsentSeconds, next.MostAbsentSeconds)
	}
	into.Repeated = &next
	if !slices.Contains(st.disk.folded, into.ID) {
		st.disk.folded = append(st.disk.folded, into.ID)
	}
}

// writeFolded writes the records in which flushes were counted since they were written. Each
// save calls it.
func (d *Daemon) writeFolded(ctx context.Context, st *state) {
	for _, id := range st.disk.folded {
		if i := st.journal.Find(id); i >= 0 {
			d.write(ctx, st.journal[i], nil)
		}
	}
	st.disk.folded = nil
}

// comingsLogged is how many log lines a minute report that tables appear and disappear. A
// program may make and delete a table 100 times a second.
const comingsLogged = 40

// comings counts these lines.
type comings struct {
	since time.Time
	lines int
}

// log returns the log for one more line about a table that appears or disappears: after too
// many in a minute only -v=2 shows them.
func (c *comings) log(ctx context.Context) klog.Logger {
	log, now := klog.FromContext(ctx), time.Now()
	if now.Sub(c.since) > time.Minute {
		*c = comings{since: now}
	}
	switch c.lines++; {
	case c.lines == comingsLogged:
		log.Info("Native tables appear and disappear too often for a line each; -v=2 logs the others of this minute")
		return log.V(2)
	case c.lines > comingsLogged:
		return log.V(2)
	}
	return log
}
