package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// older is what is known of a stored generation that is older than what was in force.
type older struct {
	text string // "an older generation, of 14:02; 3 changes since were not kept"; "": it is not
	// tables are those that may be put back from it, with its content, and native the native ones,
	// with its ID.
	tables   rules.Generation
	native   map[tableid.TableID]string
	replayed bool // a table was lost, and is put back from it
}

// unknownOlder is the text where the note cannot be read.
const unknownOlder = "a generation that may be older; the note about its age cannot be read"

// olderText names a generation that was saved then, and lacks so many changes.
func olderText(saved time.Time, changes int) string {
	text := "one change since was not kept"
	if changes > 1 {
		text = fmt.Sprintf("%d changes since were not kept", changes)
	}
	return fmt.Sprintf("an older generation, of %s; %s", saved.UTC().Format(time.RFC3339), text)
}

// noteBehind notes aside that the state on disk is behind, with the marks of what is in force.
func (d *Daemon) noteBehind(ctx context.Context, st *state, reason string) {
	b := reload.Behind{Saved: st.disk.keptAt, Changes: st.generation.changes - st.disk.kept, Marks: st.disk.marks, Reason: reason}
	if err := d.cfg.Store.SaveBehind(b); err != nil {
		klog.FromContext(ctx).V(1).Info("That the state is behind is not noted either", "reason", err)
	}
}

// recallBehind takes up that the state on disk is behind. A table whose last marks stand was not
// flushed: what stands there is learned, and nothing older is put in its place. It returns true if
// that is so of all tables, or if what was in force was never on disk.
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
		st.older = older{text: unknownOlder, tables: st.unclaimed(stored.Generation)}
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The note about a stale generation on disk cannot be read; the stored generation may be older than the rules that were in force", "generation", stored.ID)
		return false
	case b.Changes == 0 && loaded == nil: // only marks were renewed
		known.Marks = b.Marks
		return false
	}
	log := severity.Warnings(klog.FromContext(ctx)).WithValues("lastSaved", b.Saved.UTC().Format(time.RFC3339), "changesSince", b.Changes, "reason", b.Reason)
	if d.marksStand(ctx, st, b.Marks) {
		log.Info("The stored generation is older than what was in force; its marks stand, so canaryd begins with what stands")
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
			if v, marked := b.Marks.Verdicts(f, d.cfg.Canary, seen)[id.Name]; err == nil && marked && v == canary.Intact {
				stored.Generation = stored.Generation.With(id, rules.Section{})
				delete(known.Quarantine, id)
				continue
			}
			st.older.tables = st.older.tables.With(id, st.unclaimed(stored.Generation)[id])
		}
	}
	known.Marks = b.Marks
	log.Info("The stored generation is older than what was in force; what was flushed is put back from it", "generation", stored.ID)
	return false
}

// takenFrom returns the words about their generation for the record of a loss of these tables. A
// table that was learned again since then is not older.
func (o *older) takenFrom(fresh verdicts, learned rules.Generation) string {
	for id := range fresh {
		if was, ok := o.tables[id]; ok && was.Equal(learned[id]) {
			o.replayed = true
			return o.text
		}
	}
	return ""
}
