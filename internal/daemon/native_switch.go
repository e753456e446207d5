package daemon

import (
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// proxyWorks reports whether kube-proxy maintains iptables rules: its own canary is in mangle.
// The record of a lost native table needs it, and seekSwitch later: a kube-proxy that changed to
// iptables mode deleted its native table itself. known is false before the first read.
func (st *state) proxyWorks(f tableid.Family) (works, known bool) {
	fs := st.families[f]
	if fs == nil || fs.examined.digest == 0 {
		return false, false
	}
	return fs.proxy.stood && fs.proxy.gone.IsZero(), true
}

// seekSwitch looks for kube-proxy's tables that were deleted alone while iptables' tables
// lacked its canary, if the canary has appeared since. Then kube-proxy was started in iptables
// mode, and deleted them itself: they do not wait for an operator.
func (d *Daemon) seekSwitch(st *state) {
	r := &st.native
	for id, w := range r.waiting {
		t := r.tables[id]
		if id.Name != owners.ProxyTable || t.switched || t.finding.Verdict != native.Unattributed || !t.proxyAway {
			continue
		}
		if works, _ := st.proxyWorks(id.Family); works {
			t.switched = true
			t.touch(w.Time, time.Now(), true)
		}
	}
}

// mayBeOwners reports whether a process that deleted a table may have been an owner's. The
// process or its parent was gone before it could be read, and all that is known is nft that
// reads its commands. If nft has the commands on its command line, a person or a script
// executed it.
func mayBeOwners(w watch.Writer) bool {
	gone := w.Unread || w.Command == ""
	return gone && len(w.Origin.Ancestors) == 0 && (w.Command == "" || strings.HasSuffix(w.Command, " -f -"))
}

// ownerBegan reports whether a process that deleted the table may be its owner's. For that, a
// process of the owner must have started after the table was last written, as kube-proxy does
// with --cleanup or in another mode. The process that wrote the table had started before. A new
// process that wants the table writes it again.
func (t *nativeTable) ownerBegan(id tableid.TableID, w watch.Writer) bool {
	n := w.Neighbour
	return mayBeOwners(w) && n.PID != 0 && slices.Contains(owners.WritersOf(id), n.Comm) && !t.wrote.IsZero() && n.Since.After(t.wrote)
}

const (
	// siblingWithin is how far apart an owner deletes its tables of both families. kube-proxy
	// does so within a second, and on a node without a free core within three.
	siblingWithin = 5 * time.Second
	// reportLater is how long the report on a deleted table waits for its sibling's deletion,
	// if canaryd could not read the process in time.
	reportLater = 1500 * time.Millisecond
)

// A tableDeletion is the last commit that deleted a table, as far as it is known.
type tableDeletion struct {
	at     time.Time // zero: it was missed
	by     native.Committer
	unread bool // its process or the parent was gone before it could be read
}

// deletionOf returns the last commit that deleted the table, with its author, as far as it is
// known.
func (d *Daemon) deletionOf(id tableid.TableID, t *nativeTable) (last tableDeletion) {
	if len(t.deeds) == 0 {
		return tableDeletion{}
	}
	for _, deed := range d.deedsUpTo(id, t, t.deeds[len(t.deeds)-1].Genid) {
		if deed.Deleted {
			last = tableDeletion{deed.since, deed.By, deed.By == native.UnknownCommitter && mayBeOwners(d.cfg.Writers.Of(deed.commit))}
		}
	}
	return last
}

// ownerRemoved notes that a table is gone for good. If its owner deleted it, the table of its
// name in the other family is judged again. The owner deleted that one, too, if it was deleted
// at the same time by a process that could not be read.
func (d *Daemon) ownerRemoved(r *nativeRealm, id tableid.TableID, t *nativeTable) {
	last := d.deletionOf(id, t)
	if last.by != native.Owner && last.by != native.LikelyOwner {
		return
	}
	if r.removed == nil {
		r.removed = map[string]time.Time{}
	}
	r.removed[id.Name] = last.at
	for other, sibling := range r.tables {
		if other != id && other.Name == id.Name && sibling.finding.Verdict == native.Unattributed {
			sibling.touch(last.at, time.Now(), true) // it is judged again
		}
	}
}

// inTurn returns the finding on a table in view of its sibling. If its owner deleted the
// sibling at that time, the owner likely deleted the table, too. A table that was written after
// that deletion was not deleted in turn with it.
func (d *Daemon) inTurn(r *nativeRealm, id tableid.TableID, t *nativeTable, f native.Finding) native.Finding {
	removed, known := r.removed[id.Name]
	if !known || f.Verdict != native.Unattributed || t.wrote.After(removed) {
		return f
	}
	if last := d.deletionOf(id, t); last.unread && last.at.Sub(removed).Abs() <= siblingWithin {
		return native.Finding{Verdict: native.Changed, Why: "its owner deleted it, likely: it deleted its table of the other family at that time"}
	}
	return f
}

// awaitsSibling reports whether the report on a deleted table is put off, because its owner may be
// about to delete its other table. After missed commits its process cannot become known.
func (d *Daemon) awaitsSibling(r *nativeRealm, id tableid.TableID, t *nativeTable) bool {
	if t.finding.Verdict != native.Unattributed || t.missed || len(owners.WritersOf(id)) == 0 || r.waiting[id] != nil {
		return false
	}
	if t.reportAt.IsZero() && d.deletionOf(id, t).unread {
		t.reportAt = time.Now().Add(reportLater)
		t.dirty = pace.Earliest(t.dirty, time.Now()) // a read reports it
	}
	return time.Now().Before(t.reportAt)
}

// reportDue returns when the last report on a table of the loss is due that was put off
// (awaitsSibling); zero: none was. The loss does not end before: its record says how.
func (r *nativeRealm) reportDue() (due time.Time) {
	for id := range r.loss.hit {
		if t := r.tables[id]; t != nil && t.lost() && time.Now().Before(t.reportAt) {
			due = pace.Latest(due, t.reportAt)
		}
	}
	return due
}
