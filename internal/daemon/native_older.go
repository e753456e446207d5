package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// This is older.go for native tables. They have no marks: the IDs of their contents show whether a
// table is as it was when the last run ended.

// nativeBehind returns the note that the native tables on disk are behind, for saveNative to
// write if it fails.
func (d *Daemon) nativeBehind(st *state) *reload.Behind {
	r := &st.native
	b := &reload.Behind{Stored: d.cfg.Native.Store.Index(), Saved: r.disk.keptAt, Changes: r.disk.changes - r.disk.keptChanges}
	for _, id := range r.ids() {
		t := r.tables[id]
		if t.out != nil {
			continue
		}
		b.Tables = append(b.Tables, reload.BehindTable{Name: id.NFT(), ID: nativestore.IDOf(t.digest), Witness: t.witness})
	}
	return b
}

// recallNativeBehind reads the note that the native tables on disk are behind, and returns the
// stored tables that count. A table that the note lacks was removed by its owner since. A table
// with older content is put back from disk, unless the kernel's table is as it was. Log and
// record then say that it is older.
func (d *Daemon) recallNativeBehind(ctx context.Context, st *state, stored nativestore.Stored) []nativestore.Row {
	if d.cfg.Store == nil {
		return stored.Tables
	}
	r := &st.native
	b, err := d.cfg.Store.LoadNativeBehind(d.cfg.Native.Store.Index())
	switch {
	case errors.Is(err, reload.ErrNothingStored):
		return stored.Tables
	case err != nil:
		tables := map[tableid.TableID]string{}
		for _, s := range stored.Tables {
			tables[s.Generation.Table.ID] = s.Generation.ID
		}
		r.older = mayBeOlder(ctx, err, tables)
		return stored.Tables
	}
	kept := map[string]bool{}
	list := slices.DeleteFunc(slices.Clone(stored.Tables), func(s nativestore.Row) bool {
		kept[s.Generation.Name] = true
		_, guarded := b.Table(s.Generation.Name)
		return !guarded
	})
	for i := range list {
		s := &list[i]
		now, _ := b.Table(s.Generation.Name)
		if s.Witness = now.Witness; now.ID == s.Generation.ID {
			continue
		}
		s.InForce = now.ID
		r.older.text = olderText(b.Saved, b.Changes)
		r.older.tables = tableid.With(r.older.tables, s.Generation.Table.ID, s.Generation.ID)
	}
	for _, t := range b.Tables {
		if !kept[t.Name] {
			r.neverKept = append(r.neverKept, t)
		}
	}
	severity.Warnings(klog.FromContext(ctx)).Info(olderIsPutBack, "tables", r.older.names(tableid.TableID.NFT),
		"lastSaved", b.Saved, "changesSince", b.Changes, "reason", b.Reason, "older", len(r.older.tables), "neverStored", len(r.neverKept), "deletedSince", len(stored.Tables)-len(list), "advice", olderAdvice)
	return list
}

// judgeUnreadNative reports the tables that nothing can put back. They were in force when the
// last run ended, were never on disk, and are not in the kernel as they were. It drops unread
// files whose tables are in the kernel.
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

func (t *nativeTable) contentID() string { return nativestore.IDOf(t.digest) }
