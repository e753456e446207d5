package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/journal"
	"github.com/canaryd/canaryd/internal/severity"
)

// A flushDetail is what the journal keeps of a flush in addition to its record.
type flushDetail struct {
	Diff []api.TableDiff `json:"diff"`
}

// journal keeps a finished record, newest first.
func (d *Daemon) journal(ctx context.Context, st *state, l *loss) {
	d.keepRecord(ctx, st, l.record, len(l.unkept) == 0, func() { d.write(ctx, l.record, l.unkept) })
}

// remember puts a record before the others.
func (st *state) remember(record api.Flush) {
	st.journal = slices.Insert(st.journal, 0, record)
	if len(st.journal) > journalKept {
		st.journal = st.journal[:journalKept]
	}
	if len(st.journal) > recordsListed {
		dropLists(&st.journal[recordsListed])
	}
}

// keepOpen has the journal write a loss that lasts. If canaryd is killed meanwhile, only the
// journal knows the culprit.
func (d *Daemon) keepOpen(ctx context.Context, l *loss) {
	if len(l.unkept) > 0 {
		d.write(ctx, l.record, l.unkept)
		l.unkept = nil
	}
}

// write gives a record to the journal, which does not wait for the disk. Without a diff the
// journal keeps the one that it has.
func (d *Daemon) write(ctx context.Context, record api.Flush, diff []api.TableDiff) {
	if d.cfg.Journal == nil {
		return
	}
	e, err := entryOf(record, diff)
	if err == nil {
		err = d.cfg.Journal.Keep(e)
	}
	if err != nil {
		d.reportJournal(ctx, err)
	}
}

// entryOf returns what the journal has of a record; without a diff that has no detail.
func entryOf(record api.Flush, diff []api.TableDiff) (e journal.Entry, err error) {
	e = journal.Entry{ID: record.ID, About: record.Summary()}
	if e.Record, err = json.Marshal(record); err == nil && len(diff) > 0 {
		e.Detail, err = json.Marshal(flushDetail{diff})
	}
	return e, err
}

// reportJournal takes up whether the journal could be written. Any goroutine may call it.
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

// recallFlushes takes up the records of earlier runs, also those of another boot. They are
// shown, and nothing else rests on them.
func (d *Daemon) recallFlushes(ctx context.Context, st *state) {
	if d.cfg.Journal == nil {
		return
	}
	entries, err := d.cfg.Journal.Load(journalKept)
	if err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "Not all flush records of before can be read")
	}
	for _, e := range entries {
		if record, ok := storedFlush(e); ok {
			st.remember(ofEarlier(record))
			d.keepUnanswered(st, record)
		}
	}
}

// storedFlush reads what write wrote.
func storedFlush(e journal.Entry) (api.Flush, bool) {
	var record api.Flush
	err := json.Unmarshal(e.Record, &record)
	return record, err == nil && record.ID == e.ID && !record.Time.IsZero() && (record.Kind.Loss() || record.Requested())
}

// ofEarlier returns the record as one of an earlier run. If it was not closed it
// never will be.
func ofEarlier(r api.Flush) api.Flush {
	r.Earlier = true
	if r.Unanswered() {
		r.Outcome = api.Interrupted
	}
	return r
}

// Flush returns all that is known of one flush.
func (d *Daemon) Flush(ctx context.Context, r api.FlushRequest) (api.FlushReply, error) {
	list := d.Status().Flushes
	reply := api.FlushReply{Diff: []api.TableDiff{}}
	id, i := r.Name, find(list, r.Name)
	if i >= 0 {
		id = list[i].ID
	}
	kept, diff, err := d.kept(ctx, id)
	if i < 0 && err != nil {
		if i = countsFlush(list, id); i >= 0 {
			kept, diff, err = d.kept(ctx, list[i].ID)
		}
	}
	if i >= 0 {
		reply.Flush = list[i]
	}
	switch {
	case i < 0 && err != nil:
		return api.FlushReply{}, fmt.Errorf("%w: %q; %s", api.ErrNoFlush, r.Name, offer(list))
	case err != nil:
		reply.NoDiff = err.Error()
		return reply, nil
	case i < 0 && kept.Time.Before(d.made):
		reply.Flush = ofEarlier(kept)
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

// kept returns what the journal has of a flush.
func (d *Daemon) kept(ctx context.Context, id string) (api.Flush, []api.TableDiff, error) {
	if d.cfg.Journal == nil {
		return api.Flush{}, nil, errors.New("no state folder is in use")
	}
	e, err := d.cfg.Journal.Find(ctx, id)
	if err != nil {
		return api.Flush{}, nil, err
	}
	record, ok := storedFlush(e)
	if !ok {
		return api.Flush{}, nil, fmt.Errorf("the journal's record of flush %s cannot be read", id)
	}
	var detail flushDetail
	if e.Detail != nil {
		err = json.Unmarshal(e.Detail, &detail)
	}
	return record, detail.Diff, err
}

// flushIDLength is that of an ID, at least: the microseconds since 1970 as a
// hexadecimal number, since 1978.
const flushIDLength = 13

// find returns the index of the flush of that number or ID, or -1.
func find(list []api.Flush, name string) int {
	if n, err := strconv.Atoi(name); err == nil && len(name) < flushIDLength {
		if 1 <= n && n <= len(list) {
			return n - 1
		}
		return -1
	}
	return slices.IndexFunc(list, func(f api.Flush) bool { return f.ID == name })
}

// offer says what may be asked for.
func offer(list []api.Flush) string {
	switch len(list) {
	case 0:
		return "none was seen"
	case 1:
		return "there is 1"
	default:
		return fmt.Sprintf("there are 1 to %d, the newest is 1", len(list))
	}
}
