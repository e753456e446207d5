package daemon

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/here"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The rules that were in force when the last run ended are on disk. If they cannot be read, and
// nothing shows that all are still in force, the node is not healthy until an operator restores
// or dismisses.

// unreads has the stored files that an operator has to decide about.
type unreads struct {
	files   []reload.Unread
	unkept  bool         // the disk has another list
	trouble pace.Trouble // why
}

// booted returns when the machine was booted, by the clock on the wall.
func (d *Daemon) booted() time.Time { return here.BootedAt(d.cfg.Uptime()) }

// recallUnread takes up the files that an earlier run could not read: they still wait for an
// operator.
func (d *Daemon) recallUnread(ctx context.Context, st *state) {
	for _, u := range d.cfg.Store.LoadUnread(d.booted()) {
		st.unread.files = append(st.unread.files, u)
		d.logUnread(ctx, u)
	}
}

// noteUnread notes a stored file that cannot be read. It is a problem of the node's health
// until an operator decides, and on disk for the next start.
func (d *Daemon) noteUnread(ctx context.Context, st *state, u reload.Unread) {
	if slices.ContainsFunc(st.unread.files, func(o reload.Unread) bool { return o.File == u.File }) {
		return
	}
	st.unread.files, st.unread.unkept = append(st.unread.files, u), true
	d.keepUnread(ctx, st)
	d.logUnread(ctx, u)
}

// logUnread logs such a file, and the operator's choices.
func (d *Daemon) logUnread(ctx context.Context, u reload.Unread) {
	p := PublicUnread(u)
	klog.FromContext(ctx).Error(errors.New(u.Reason), "Stored rules cannot be read, and canaryd does not know whether all are in force; a decision is needed",
		"file", u.File, "table", u.Table, "older", p.Restore, "acceptWhatStands", dismissCommand)
}

// keepUnread writes the list to disk, and returns false if that fails. Then no state may be
// written: the next start would find readable files, and would not require a decision.
func (d *Daemon) keepUnread(ctx context.Context, st *state) bool {
	if !st.unread.unkept || d.cfg.Store == nil {
		return true
	}
	err := d.cfg.Store.SaveUnread(st.unread.files)
	st.unread.unkept = err != nil
	d.countStateError(err)
	if len(st.unread.files) == 0 { // saving none removes the list
		st.unread.trouble.Report(pace.Warnings(ctx), err, "The list of unreadable stored files could not be removed; until it is, canaryd saves no rules, and a restart may require a decision again",
			"advice", "make the state folder writable; if a decision is needed again: "+dismissCommand)
		return err == nil
	}
	var names []string
	for _, u := range st.unread.files {
		names = append(names, u.File)
	}
	st.unread.trouble.Report(pace.Warnings(ctx), err, "The list of unreadable stored files could not be saved; until it is, canaryd saves no rules, and a restart would know older ones",
		"files", names, "advice", "make room in the state folder or make it writable; do not restart canaryd before that")
	return err == nil
}

// dropUnread removes the files that decided reports as decided, or as shown to be in force, and
// returns their number.
func (d *Daemon) dropUnread(ctx context.Context, st *state, decided func(reload.Unread) bool) (n int) {
	files := st.unread.files
	st.unread.files = nil
	for _, u := range files {
		if !decided(u) {
			st.unread.files = append(st.unread.files, u)
			continue
		}
		st.unread.unkept = true
		if n++; d.cfg.Store != nil && st.decision == nil && u.File == d.cfg.Store.PendingPath() { // nothing else would replace it
			err := d.cfg.Store.ForgetPending()
			d.countStateError(err)
			if err != nil {
				severity.Warnings(klog.FromContext(ctx)).Error(err, "A damaged file could not be removed; after a restart it waits for a decision again",
					"file", u.File, "advice", "make the state folder writable; if it waits again: "+dismissCommand)
			}
		}
	}
	d.keepUnread(ctx, st)
	return n
}

// dropStanding drops the files whose rules are in force again, of native tables or of iptables'
// tables. The generations that they may have held have IDs, and an ID is of the content; stands
// reports whether that content is in force.
func (d *Daemon) dropStanding(ctx context.Context, st *state, native bool, stands func(id string) bool) {
	n := d.dropUnread(ctx, st, func(u reload.Unread) bool {
		return u.Native == native && len(u.IDs) > 0 && !slices.ContainsFunc(u.IDs, func(id string) bool { return !stands(id) })
	})
	if n > 0 {
		severity.Notices(klog.FromContext(ctx)).Info("Stored rules could not be read, but all are in force: the kernel's rules have the same digest", "files", n)
	}
}

// lostMarks reports whether a table has lost the marks of an earlier run whose generation
// cannot be read; then its file waits for an operator. If the marks are not known, any canary
// shows that none was lost. On legacy a flush removes no table, so a table that does not exist
// has lost nothing.
func (d *Daemon) lostMarks(s *suspicion, id rules.TableID, v canary.Verdict, exists bool) bool {
	switch {
	case !v.Loss():
		return false
	case s.remains.Marks != nil:
		return s.remains.Marks[id].Nonce != ""
	default:
		return v != canary.Replaced && (exists || s.remains.Identity.Backend != string(iptables.Legacy))
	}
}

// judgeUnread ends the judgement of a run whose generation cannot be read: after lost marks
// (unmarked) the file waits for an operator.
func (d *Daemon) judgeUnread(ctx context.Context, st *state) {
	s := st.suspicion
	switch u := s.remains.Unread; {
	case u == nil:
	case s.unmarked:
		d.noteUnread(ctx, st, *u)
	default:
		severity.Warnings(klog.FromContext(ctx)).Error(errors.New(u.Reason), "Stored rules cannot be read, but their marks are intact: canaryd starts from the rules in the kernel", "file", u.File)
	}
}

// publishUnread puts the files that cannot be read into a status.
func (st *state) publishUnread(s *api.Status) {
	if st.removed {
		return
	}
	for _, u := range st.unread.files {
		s.StateUnread = append(s.StateUnread, PublicUnread(u))
	}
}

// PublicUnread returns a file that cannot be read as a Status has it, with the operator's
// choices.
func PublicUnread(u reload.Unread) api.UnreadState {
	p := api.UnreadState{File: u.File, Reason: u.Reason, Since: u.Since, Native: u.Native, Table: u.Table, Dismiss: dismissCommand}
	if u.Older != "" {
		p.Restore = restoreCommand + " --generation " + u.Older
	}
	return p
}
