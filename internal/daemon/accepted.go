package daemon

import (
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// canaryd learns what the owners of rules remove. What is so much that it may be a flush all the
// same is said once: by the log, and by the status for acceptedFor.

const (
	// acceptedFor is for how long a status has what was accepted.
	acceptedFor = time.Hour
	// Of a chain that keeps rules, and of a table, so many rules must be gone: an endpoint that
	// goes is no news.
	muchOfChain = native.MuchOfPart
	muchOfTable = native.MuchOfTable
)

// acceptances is what was accepted lately.
type acceptances struct {
	said  []api.Accepted // the newest first
	fresh []acceptance
	at    time.Time // when fresh is to be said; zero: there is none
	// shrinking are tables that have lost rules lately.
	shrinking map[rules.TableID]*shrinking
}

// An acceptance is a removal that was just learned.
type acceptance struct {
	api.Accepted
	finding canary.Finding // it as if it were a loss
	seen    time.Time      // when a read was the first to show it
	upto    uint64         // the digest of the read with which it was learned
	commit  nft.Commit     // of a native table
	// steps: it was learned in several steps, and By may have done no more than the last one.
	steps bool
	// chains and elements are how many of the table are gone, too, where most of it is.
	chains, elements int
}

// accept takes up what a table's owners took, if it is to be said. before and after are the
// generation's.
func (st *state) accept(id rules.TableID, before, after rules.Section, now time.Time) {
	fs := st.families[id.Family]
	for _, a := range st.accepted.shrink(id, now).take(before, after, now) {
		a.Time, a.Family, a.Table, a.upto, a.seen = now, id.Family, id.Name, fs.examined.digest, fs.examined.since
		if at := st.generation.learned.Shrunk(id.Family, id.Name, a.Chain); !at.IsZero() {
			a.seen = at
		}
		st.accepted.fresh = append(st.accepted.fresh, a)
		st.accepted.at = now
	}
}

func chainsByName(s rules.Section) map[string]rules.Chain {
	by := make(map[string]rules.Chain, len(s.Chains))
	for _, c := range s.Chains {
		by[c.Name] = c
	}
	return by
}

// allGone reports whether each rule of a chain led to a chain that is gone.
func allGone(c rules.Chain, before, left map[string]rules.Chain) bool {
	return !slices.ContainsFunc(c.Rules, func(r rules.Rule) bool {
		_, stood := before[r.Target]
		_, stands := left[r.Target]
		return !stood || stands
	})
}

func jumpsTo(s rules.Section, chain string) bool {
	return slices.ContainsFunc(s.Jumps, func(h rules.Jump) bool { return h.Into() == chain })
}

func leadsTo(s rules.Section, chain string) bool {
	return jumpsTo(s, chain) || slices.ContainsFunc(s.Chains, func(c rules.Chain) bool {
		return slices.ContainsFunc(c.Rules, func(r rules.Rule) bool { return r.Target == chain })
	})
}

// sayAccepted finds out whose doing it was, and says it. What is taken from the same chain again
// within acceptedFor is counted, and not logged again.
func (d *Daemon) sayAccepted(ctx context.Context, st *state) {
	a, now := &st.accepted, time.Now()
	q := d.inquire(ctx)
	a.said = a.lately(now)
	for _, f := range a.fresh {
		if f.Native {
			f.By = q.Committer(f.commit)
		} else {
			f.By, f.Likely = q.Taker(d.charge(st, f.Family.Table(f.Table), f.finding, f.upto), f.seen), q.Legacy || f.steps
		}
		i := slices.IndexFunc(a.said, f.Accepted.SamePlace)
		if i >= 0 {
			f.Rules += a.said[i].Rules
			a.said = slices.Delete(slices.Clone(a.said), i, i+1)
		} else {
			what := "Rules were removed, which canaryd accepts as their owner's doing; they are not put back"
			if f.NotGuarded {
				what = "Rules are gone from a table that canaryd does not guard; unless their owner removed them, it has to write them again"
			}
			d.recordRemoval(ctx, st, f)
			severity.Warnings(klog.FromContext(ctx)).Info(what,
				"family", f.Family, "table", f.Table, "chain", f.Chain, "set", f.Set, "rule", f.Rule, "gone", f.Rules, "left", f.Left, "by", f.ByText())
		}
		a.said = slices.Insert(slices.Clone(a.said), 0, f.Accepted)
	}
	a.fresh, a.at = nil, time.Time{}
	a.said = a.said[:min(len(a.said), api.AcceptedShown)]
}

// lately returns what was accepted within acceptedFor.
func (a *acceptances) lately(now time.Time) []api.Accepted {
	return slices.DeleteFunc(slices.Clone(a.said), func(x api.Accepted) bool { return now.Sub(x.Time) >= acceptedFor })
}

// withdraw forgets what was accepted of a table since then: it is wanted again.
func (a *acceptances) withdraw(id rules.TableID, since time.Time) {
	old := func(x api.Accepted) bool { return x.Family == id.Family && x.Table == id.Name && !x.Time.Before(since) }
	a.said = slices.DeleteFunc(slices.Clone(a.said), old)
	a.fresh = slices.DeleteFunc(a.fresh, func(f acceptance) bool { return old(f.Accepted) })
	delete(a.shrinking, id)
}

// acceptNative takes up what the owner of a native table took, if it is to be said: the table is
// about to be learned without it. What a person has accepted needs no word.
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
		a := acceptance{commit: commits[r.By],
			Accepted: api.Accepted{Time: now.read, Family: now.id.Family, Table: now.id.Name, Native: true, Rules: r.Gone, Left: r.Left}}
		switch r.Kind {
		case nft.Tables:
			a.chains, a.elements = r.Chains, r.Elements
		case nft.Chains:
			a.Chain = r.Name
		case nft.Sets:
			a.Set = r.Name
		case nft.Rules:
			a.Chain, a.Rule = r.Name, "the last jump to it"
		}
		st.accepted.fresh, st.accepted.at = append(st.accepted.fresh, a), time.Now()
	}
}
