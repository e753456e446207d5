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

// This is older.go for native tables. They have no marks: the IDs of their contents show whether a
// table is as it was when the last run ended.

// noteNativeBehind writes a note outside the state folder that its native tables are behind.
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
		klog.FromContext(ctx).V(1).Info("The note about stale native tables cannot be written either", "reason", err)
	}
}

// recallNativeBehind reads the note that the native tables on disk are behind, and returns the
// tables on disk that count. A table that the note lacks was removed by its owner since. A table
// with an older content is put back from disk, with a word in log and record, unless the kernel's
// table is as it was.
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
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The note about stale native tables on disk cannot be read; the stored tables may be older than the tables that were in force", "tables", len(stored.Tables))
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
	severity.Warnings(klog.FromContext(ctx)).Info("The stored native tables are older than the tables that were in force; canaryd puts flushed tables back from them",
		"lastSaved", b.Saved, "changesSince", b.Changes, "reason", b.Reason, "older", len(r.older.native), "neverStored", len(r.neverKept), "deletedSince", len(stored.Tables)-len(list))
	return list
}

// judgeUnreadNative reports the tables that were in force when the last run ended, were never on
// disk, and are not in the kernel as they were: nothing can put them back. It drops unread files
// whose tables are in the kernel.
func (d *Daemon) judgeUnreadNative(ctx context.Context, st *state) {
	r := &st.native
	for _, t := range r.neverKept {
		if !r.standsOf(t.ID) {
			d.noteUnread(ctx, st, reload.Unread{File: "the state folder (table " + t.Name + ")", Reason: "it never had the rules that were in force", Since: time.Now(),
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
