package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// older describes stored rules that are older than the last rules in force.
type older struct {
	text     string                     // "an older generation, of 14:02; 3 changes since were not kept"; "": they are not
	tables   map[tableid.TableID]string // tables that may be put back from them, with the IDs of their contents
	replayed bool                       // a table was lost, and is put back from them
}

// olderText names a generation that was saved then, and lacks so many changes, for the log, the
// status and flush records.
func olderText(saved time.Time, changes int) string {
	text := "one change since was not kept"
	if changes > 1 {
		text = fmt.Sprintf("%d changes since were not kept", changes)
	}
	return fmt.Sprintf("an older generation, of %s; %s", saved.UTC().Format(time.RFC3339), text)
}

// olderIsPutBack is the log's sentence about stored rules that are older than the last rules in
// force.
const olderIsPutBack = "The stored rules are older than the last rules in force; canaryd puts flushed rules back from them"

// olderAdvice is its advice.
const olderAdvice = "if canaryd puts one of these tables back, restart the table's owner, such as kube-proxy: its rules are current"

// names returns the sorted names of the tables for the log, as spell has them.
func (o *older) names(spell func(tableid.TableID) string) []string {
	names := make([]string, 0, len(o.tables))
	for id := range o.tables {
		names = append(names, spell(id))
	}
	slices.Sort(names)
	return names
}

// behind returns the note that the state on disk is behind, with the marks of the rules in
// force. tookSave writes it after a save failed, and the next start reads it.
func (st *state) behind() *reload.Behind {
	return &reload.Behind{Saved: st.disk.keptAt, Changes: st.generation.changes - st.disk.kept, Marks: st.disk.marks}
}

// noteBehind writes a note that the disk is behind by save, or with nil removes it.
func (d *Daemon) noteBehind(ctx context.Context, save func(*reload.Behind) error, b *reload.Behind) {
	if d.cfg.Store == nil {
		return
	}
	if err := save(b); err != nil {
		klog.FromContext(ctx).V(1).Info("The note about older rules on disk could not be written", "reason", err)
	}
}

// tookWrite notes the result of a write to the state folder: t has why it fails. b is the note
// that save writes if it failed; after a success an earlier note is removed.
func (d *Daemon) tookWrite(ctx context.Context, t *pace.Trouble, err error, save func(*reload.Behind) error, b *reload.Behind) {
	tables := len(b.Tables)
	over := t.Report(pace.Warnings(ctx), err, "The generation is not on disk; after a restart canaryd would know an older one, or none",
		"lastSaved", b.Saved, "changesSince", b.Changes, "nativeTables", tables)
	if err == nil {
		b = nil
	} else {
		b.Reason = err.Error()
	}
	d.noteBehind(ctx, save, b)
	if over {
		klog.FromContext(ctx).Info("The generation is on disk again", "nativeTables", tables)
	}
}

// mayBeOlder says that stored tables may be older than the last tables in force, because the
// note cannot be read (err). Flush records then say so if a replay puts one of them back.
func mayBeOlder(ctx context.Context, err error, tables map[tableid.TableID]string) older {
	severity.Warnings(klog.FromContext(ctx)).Error(err, "The note about older rules on disk cannot be read; the stored rules may be older than the last rules in force", "tables", len(tables))
	return older{text: "a generation that may be older; the note about its age cannot be read", tables: tables}
}

// recallBehind takes up that the state on disk is behind; loaded is the error of loading it. A
// table with its last marks was not flushed: its content is learned, and nothing older is put
// in its place. If that holds for all tables, or if the last rules in force were never on disk,
// again is true: recall takes up no generation.
func (d *Daemon) recallBehind(ctx context.Context, st *state, known *reload.State, stored *reload.Stored, loaded error) (again bool) {
	if loaded != nil && !errors.Is(loaded, reload.ErrNothingStored) {
		return false
	}
	b, err := d.cfg.Store.LoadBehind(known.ID)
	switch {
	case errors.Is(err, reload.ErrNothingStored):
		return false
	case err != nil && loaded != nil:
		d.noteUnread(ctx, st, reload.Unread{File: "the state folder", Reason: "it may never have had the rules that were in force: " + err.Error(), Since: time.Now()})
		return false
	case err != nil:
		tables := map[tableid.TableID]string{}
		for id, section := range st.unclaimed(stored.Generation) {
			tables[id] = contentID(section)
		}
		st.older = mayBeOlder(ctx, err, tables)
		return false
	case b.Changes == 0 && loaded == nil: // only marks were renewed
		known.Marks = b.Marks
		return false
	}
	log := severity.Warnings(klog.FromContext(ctx)).WithValues("lastSaved", b.Saved.UTC().Format(time.RFC3339), "changesSince", b.Changes, "reason", b.Reason)
	if d.marksStand(ctx, st, b.Marks) {
		log.Info("The stored generation is older than the last rules in force; their marks are intact, so canaryd starts from the rules in the kernel")
		return true
	}
	if loaded != nil {
		d.noteUnread(ctx, st, reload.Unread{File: "the state folder", Reason: "it never had the rules that were in force: " + b.Reason, Since: time.Now()})
		return true
	}
	st.older = older{text: olderText(b.Saved, b.Changes)}
	for f := range st.families {
		seen, err := d.cfg.Kernel.Probe(ctx, f, b.Marks.Places(f, d.cfg.Canary))
		for id := range st.tables() {
			if id.Family != f {
				continue
			}
			v, marked := b.Marks.Verdicts(f, d.cfg.Canary, seen)[id.Name]
			section := st.unclaimed(stored.Generation)[id]
			if !marked && section.Bare() { // nothing was guarded in it
				continue
			}
			if err == nil && marked && v == canary.Intact {
				stored.Generation = stored.Generation.With(id, rules.Section{})
				delete(known.Quarantine, id)
				continue
			}
			st.older.tables = tableid.With(st.older.tables, id, contentID(section))
		}
	}
	known.Marks = b.Marks
	log.Info(olderIsPutBack, "tables", st.older.names(tableid.TableID.String), "generation", stored.ID, "advice", olderAdvice)
	return false
}

// contentID returns the ID of the content of one of iptables' tables.
func contentID(s rules.Section) string {
	return rules.Generation{rules.IPv4.Table(rules.Filter): s}.ID()
}

// takenFrom returns the words about an older generation for the record of a table's loss, "" if
// its content is not older. content returns the ID of the table's content. A table that was
// learned again since then is not older.
func (o *older) takenFrom(id tableid.TableID, content func() string) string {
	if was, ok := o.tables[id]; !ok || was != content() {
		return ""
	}
	o.replayed = true
	return o.text
}
