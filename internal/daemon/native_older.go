package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This is older.go for native tables. They have no marks: the IDs of their contents show which of
// them are as they were when the last run ended.

// noteNativeBehind notes aside that the native tables on disk are behind.
func (d *Daemon) noteNativeBehind(ctx context.Context, st *state, reason string) {
	if d.cfg.Store == nil {
		return
	}
	r := &st.native
	b := reload.BehindNative{Stored: d.cfg.Native.Store.index, Saved: r.disk.keptAt, Changes: r.disk.changes - r.disk.keptChanges, Reason: reason}
	for _, id := range r.ids() {
		t := r.tables[id]
		b.Tables = append(b.Tables, reload.BehindTable{Name: id.NFT(), ID: nativeID(t.digest), Witness: t.witness})
	}
	if err := d.cfg.Store.SaveNativeBehind(b); err != nil {
		klog.FromContext(ctx).V(1).Info("That the native tables on disk are behind is not noted either", "reason", err)
	}
}

// recallNativeBehind takes up that the native tables on disk are behind, and returns those of them
// that count. A table that the note does not have was removed by its owner since. One that is on
// disk with an older content is put back from it, and that is said, unless it stands as it was.
func (d *Daemon) recallNativeBehind(ctx context.Context, st *state, stored storedNative) []storedNativeTable {
	if d.cfg.Store == nil {
		return stored.Tables
	}
	r := &st.native
	b, err := d.cfg.Store.LoadNativeBehind(d.cfg.Native.Store.index)
	switch {
	case errors.Is(err, reload.ErrNothingStored):
		return stored.Tables
	case err != nil:
		r.older = older{text: unknownOlder, native: map[tableid.TableID]string{}}
		for _, s := range stored.Tables {
			r.older.native[s.generation.Table.ID] = s.generation.ID
		}
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The note of what the stored native tables lack cannot be read; they may be older than those in force", "tables", len(stored.Tables))
		return stored.Tables
	}
	kept := map[string]bool{}
	list := slices.DeleteFunc(slices.Clone(stored.Tables), func(s storedNativeTable) bool {
		kept[s.generation.Name] = true
		_, guarded := b.Table(s.generation.Name)
		return !guarded
	})
	for i := range list {
		s := &list[i]
		now, _ := b.Table(s.generation.Name)
		if s.Witness = now.Witness; now.ID == s.generation.ID {
			continue
		}
		s.inForce = now.ID
		r.older.text = olderText(b.Saved, b.Changes)
		r.older.native = tableid.With(r.older.native, s.generation.Table.ID, s.generation.ID)
	}
	for _, t := range b.Tables {
		if !kept[t.Name] {
			r.neverKept = append(r.neverKept, t)
		}
	}
	severity.Warnings(klog.FromContext(ctx)).Info("The stored native tables are older than those in force; what was flushed is put back from them",
		"lastSaved", b.Saved, "changesSince", b.Changes, "reason", b.Reason, "older", len(r.older.native), "neverStored", len(r.neverKept), "deletedSince", len(stored.Tables)-len(list))
	return list
}

// judgeUnreadNative says which tables were in force when the last run ended, were never on disk,
// and do not stand as they were: nothing can put them back. It drops those that could not be read
// and stand.
func (d *Daemon) judgeUnreadNative(ctx context.Context, st *state) {
	r := &st.native
	for _, t := range r.neverKept {
		if !r.standsOf(t.ID) {
			d.noteUnread(ctx, st, reload.Unread{File: "the state folder (table " + t.Name + ")", Reason: "it never had what was in force", Since: time.Now(),
				Native: true, Table: t.Name, IDs: []string{t.ID}})
		}
	}
	r.neverKept = nil
	if len(st.unread.files) > 0 {
		d.dropStanding(ctx, st, true, r.standsOf)
	}
}

// takenFromNative is takenFrom for a native table whose content has that ID.
func (o *older) takenFromNative(id tableid.TableID, content string) string {
	if o.text == "" || o.native[id] != content {
		return ""
	}
	o.replayed = true
	return o.text
}
