package daemon

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/accepted"
	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd learns the removals of rules' owners. A removal so large that it may be a flush is
// reported once by the log, and by the status for acceptedFor (internal/accepted).

// accept notes a removal by a table's owners, if it is so large that it is to be reported.
// before and after are the generation's sections.
func (st *state) accept(id rules.TableID, before, after rules.Section, now time.Time) {
	fs := st.families[id.Family]
	st.accepted.Learn(id, before, after, culprit.Read{Digest: fs.examined.digest, At: fs.examined.since}, st.generation.learned, now)
}

// sayAccepted finds the process behind each removal that is due, and reports it. Another
// removal from the same chain within acceptedFor is counted, and not logged again.
func (d *Daemon) sayAccepted(ctx context.Context, st *state) {
	q := d.inquire(ctx)
	for _, f := range st.accepted.Due(time.Now()) {
		if f.Native {
			f.By = q.Committer(f.Commit)
		} else {
			f.By, f.Likely = q.Taker(d.charge(st, f.Family.Table(f.Table), f.Finding, f.Upto), f.Seen), q.Legacy || f.Steps
		}
		if again := st.accepted.Counts(&f); !again {
			d.recordRemoval(ctx, st, f)
			logRemoval(ctx, f.Accepted)
		}
		st.accepted.Keep(f)
	}
	st.accepted.Trim()
}

// logRemoval logs an accepted removal, and what to do if it was not accepted rightly.
func logRemoval(ctx context.Context, a api.Accepted) {
	what := "Rules were removed; canaryd takes this for their owner's decision, and does not put them back"
	advice := "if their owner did not remove them, restart it, or run canaryd restore --generation ID (canaryd status lists the IDs)"
	switch {
	case a.NotGuarded:
		what = "Rules are gone from an unguarded table, and canaryd does not put them back; only their owner can write them again"
		advice = "if their owner did not remove them, restart it"
	case a.Set != "":
		what = "Elements of a set were removed; canaryd takes this for their owner's decision, and does not put them back"
	}
	id := a.Family.Table(a.Table)
	table := id.String()
	if a.Native {
		table = id.NFT()
	}
	log := severity.Warnings(klog.FromContext(ctx)).WithValues("table", table)
	for _, place := range [][2]string{{"chain", a.Chain}, {"set", a.Set}, {"rule", a.Rule}} {
		if place[1] != "" {
			log = log.WithValues(place[0], place[1])
		}
	}
	log.Info(what, "gone", a.Rules, "left", a.Left, "by", a.ByText(), "advice", advice)
}

// acceptNative reports large removals from a native table that canaryd takes for its owner's
// doing. now is the content that adoptNative or learnBefore is about to expect. It reports
// nothing for a new table, or if an operator has accepted the table. The same holds for a
// stored table that is too old, or whose last content in force is now's.
func (d *Daemon) acceptNative(st *state, t *nativeTable, now nativeLearned) {
	if t.want == nil || t.old || t.accept || t.inForce == nativestore.IDOf(now.Digest) {
		return
	}
	commits := map[*native.Deed]nft.Commit{}
	var deeds []*native.Deed
	for _, deed := range d.deedsUpTo(now.id, t, now.Genid) {
		deeds, commits[deed.Deed] = append(deeds, deed.Deed), deed.commit
	}
	for _, r := range native.LargeRemovals(t.want, now.Table, deeds) {
		st.accepted.Add(accepted.OfNative(now.id, now.read, r, commits[r.By]), time.Now())
	}
}

// recordRemoval records that most of a table, or of a large native set, was removed by name. It
// leaves out removals that are known to be their owner's. Nothing is put back; the record names
// the process.
func (d *Daemon) recordRemoval(ctx context.Context, st *state, a accepted.Removal) {
	section := st.generation.learned.Generation[a.Family.Table(a.Table)]
	_, stands := section.Chain(owners.ProxyCanary)
	if a.IsRemoval() && !a.ByOwner(stands) {
		r := a.Record(st.journal, st.newFlushID)
		st.journal.Rewrite(r)
		d.write(ctx, r, nil)
	}
}
