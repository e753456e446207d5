package culprit

import (
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// Taker returns the process that took what a charge is about, nil if it is not known. On legacy it
// is the one that held the lock last before a read was the first to show it.
func (q Inquiry) Taker(c Charge, seen time.Time) *api.Culprit {
	var by []watch.Writer
	if q.Legacy {
		by = slices.DeleteFunc(q.Writers.Holders(seen.Add(-holderWindow)), func(w watch.Writer) bool {
			return w.Time.After(seen.Add(holderLate)) || q.Own(w.PID) || onlyReads(w.Command)
		})
	} else {
		for _, k := range q.about(c) {
			by = append(by, q.Writers.Of(k.Commit))
		}
	}
	if len(by) == 0 {
		return nil
	}
	culprit := api.CulpritOf(by[len(by)-1])
	return &culprit
}

// Committer returns the process that made a commit to a native table, nil if it is not known.
func (q Inquiry) Committer(c nft.Commit) *api.Culprit {
	if c.PID == 0 {
		return nil
	}
	culprit := api.CulpritOf(q.Writers.Of(c))
	return &culprit
}

// LastTaker returns the process whose commit took last what a charge is about, since the table was
// known to be well. It returns false on legacy, and where that commit is not known.
func (q Inquiry) LastTaker(c Charge) (w watch.Writer, found bool) {
	if q.Legacy {
		return w, false
	}
	for _, k := range q.about(c) {
		if nft.Newer(k.Commit.Genid, c.Sound) {
			w = q.Writers.Of(k.Commit)
		}
	}
	return w, !w.Time.IsZero()
}

// TookFrom reports whether another process took from a chain what a charge is about.
func (q Inquiry) TookFrom(c Charge, chain string) bool {
	return slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return q.tookSince(k, c.ID, c.since(), c.Upto, []string{chain})
	})
}

// tookSince reports whether another process's commit between two genids took from one of these
// chains of a table.
func (q Inquiry) tookSince(k iptables.Taking, id rules.TableID, after, upto uint32, chains []string) bool {
	return k.Family.Table(k.Table) == id && q.foreign(k) && nft.Newer(k.Commit.Genid, after) && !nft.Newer(k.Commit.Genid, upto) &&
		slices.ContainsFunc(chains, k.Took)
}

// TakersOf returns the processes that may have taken from chains of a table between two reads and,
// where the kernel says so, what each commit took.
func (q Inquiry) TakersOf(id rules.TableID, before, upto Read, chains []string) (by []watch.Writer, takings []iptables.Taking) {
	if q.Legacy {
		return slices.DeleteFunc(lastOf(q.Writers.Holders(before.At.Add(-holderWindow))), func(w watch.Writer) bool {
			return q.Own(w.PID) || onlyReads(w.Command)
		}), nil
	}
	if before.Digest == 0 || !q.Takings.Reach(uint32(before.Digest)) {
		return nil, nil
	}
	for _, k := range q.Takings.List {
		if q.tookSince(k, id, uint32(before.Digest), uint32(upto.Digest), chains) {
			takings = append(takings, k)
			by = append(by, q.Writers.Of(k.Commit))
		}
	}
	return by, takings
}

// OthersWrote reports whether a process that took nothing wrote to the table meanwhile, or
// may have. On legacy nothing is heard of single writes: what was read around the flush
// has to do.
func (q Inquiry) OthersWrote(id rules.TableID, from, upto uint32, by []watch.Writer) bool {
	switch {
	case q.Legacy:
		return false
	case !q.Takings.Reach(from):
		return len(by) == 0 // else they were the only ones
	}
	return slices.ContainsFunc(q.Takings.List, func(k iptables.Taking) bool {
		return k.Family.Table(k.Table) == id && nft.Newer(k.Commit.Genid, from) && !nft.Newer(k.Commit.Genid, upto) &&
			!slices.ContainsFunc(by, func(w watch.Writer) bool { return w.PID == k.Commit.PID })
	})
}
