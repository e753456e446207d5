package native

import (
	"errors"
	"fmt"
	"maps"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// hearMost bounds the wait for notifications of a commit that the genid shows already.
	hearMost = time.Second
	// tornMost is hearMost after an overflow, which most likely dropped the end of the commit.
	tornMost = 20 * time.Millisecond
	// unheardMost bounds the commits that are kept for Hear.
	unheardMost = 4096
	// beforeMost bounds how many of them have tables with them: 1.2 MB for kube-proxy's 5,000
	// services.
	beforeMost = 16
)

// A hearing is the state of a Kernel's notifications.
type hearing struct {
	rec    Recorder
	follow follower
	upTo   uint32 // the genid of the last commit
	// torn: notifications of the present commit are missing, so its end proves nothing.
	torn bool
	// overflowed: the socket dropped notifications, behind others that still waited in it.
	overflowed bool
	// These fields are for the next Hear.
	commits []Commit
	missed  bool
	suspect func(Commit) bool
}

// A Commit is one transaction and its deeds.
type Commit struct {
	nft.Commit
	Deeds map[tableid.TableID]*Deed
	// WitnessLost has the families that lost their witness.
	WitnessLost map[tableid.Family]bool
	// Before has the followed tables that the commit touched, as they were before it. Only commits
	// that Suspect has named have them.
	Before map[tableid.TableID]Before
}

// A Before is a table as it was before a commit.
type Before struct {
	Table  *Table
	Digest Digest
	Genid  uint32    // of that state
	LeftAt time.Time // the time to which remaining timeouts refer
}

// Suspect makes Hear return the commits that f names with their tables as they were before. So a
// table can be learned up to right before a commit that may be a flush. f must be quick.
func (k *Kernel) Suspect(f func(Commit) bool) { k.suspect = f }

// Hear returns the commits since the last call, up to genid at least, the oldest first. missed:
// there were other commits, which were not heard completely. Then a loss may have no deed, and
// its committer is unknown.
func (k *Kernel) Hear(genid uint32) (commits []Commit, missed bool, err error) {
	err = k.hear(genid)
	commits, missed = k.commits, k.missed || err != nil
	k.commits, k.missed = nil, false
	return commits, missed, err
}

// hear processes the notifications of all commits up to genid at least, and waits for them up
// to hearMost. Notifications that do not arrive, or that the socket dropped, set missed and are
// no error: tables are read again. An error means that the socket itself fails.
func (k *Kernel) hear(genid uint32) error {
	for deadline := time.Now().Add(hearMost); ; {
		err := k.events.DrainAll(k.take)
		if err == nil && k.overflowed { // the messages before the gap were taken, and some behind it
			k.rec.drop()
			k.torn, k.overflowed = true, false
		}
		if err != nil { // the messages so far were taken; the rest of that commit is useless
			k.rec.drop()
			k.torn, k.overflowed = true, true
			k.miss()
			if soon := time.Now().Add(tornMost); soon.Before(deadline) {
				deadline = soon
			}
		}
		var errno syscall.Errno
		switch {
		case errors.As(err, &errno) && errno != syscall.ENOBUFS:
			return fmt.Errorf("hearing of commits: %w", err)
		case err == nil && !nft.Newer(genid, k.events.UpTo()):
			return nil
		case time.Now().After(deadline):
			if nft.Newer(genid, k.events.UpTo()) {
				k.events.SkipTo(genid)
				k.upTo = genid
			}
			k.miss()
			k.rec.drop()
			k.torn, k.overflowed = true, false
			k.follow.drop()
			// The genid shows a commit before its notifications arrive. If it shows none, the next
			// commit will be complete.
			if now, err := k.conn.Genid(); err == nil && now == k.upTo {
				k.torn = false
			}
			return nil
		case err == nil:
			time.Sleep(time.Millisecond)
		}
	}
}

// miss notes that notifications are missing.
func (k *Kernel) miss() {
	k.missed = true
	k.follow.forget()
}

// take processes one notification; hear calls it for each. NFT_MSG_NEWGEN ends a commit: it is
// kept for Hear, and applied to the followed tables. After missed notifications that commit is
// dropped.
func (k *Kernel) take(n nft.Notification) error {
	if n.Kind != unix.NFT_MSG_NEWGEN {
		k.follow.take(n)
		return k.rec.Take(n.Kind, n.Family, n.Attrs)
	}
	last := k.upTo
	c := Commit{Commit: n.By, WitnessLost: maps.Clone(k.rec.witness)}
	c.Deeds = k.rec.End(n.By)
	whole := !k.torn && !k.overflowed && n.By.Genid == nft.Following(last)
	k.upTo, k.torn = n.By.Genid, k.overflowed
	if !whole {
		k.miss()
		k.follow.drop()
		return nil
	}
	if k.suspect != nil && k.suspect(c) {
		k.thin()
		c.Before = k.before(c, last)
	}
	k.follow.end(n.By.Genid, time.Now())
	if len(k.commits) >= unheardMost {
		k.commits, k.missed = nil, true
	}
	k.commits = append(k.commits, c)
	return nil
}

// thin makes room for the tables of one more commit. If many commits wait, the oldest commit
// that deleted no table loses its tables, or else the oldest. It is still returned by Hear, but
// without Before.
func (k *Kernel) thin() {
	kept, oldest, mild := 0, -1, -1
	for i, c := range k.commits {
		if len(c.Before) == 0 {
			continue
		}
		if kept++; oldest < 0 {
			oldest = i
		}
		deleted := false
		for _, d := range c.Deeds {
			deleted = deleted || d.Deleted
		}
		if mild < 0 && !deleted {
			mild = i
		}
	}
	if mild < 0 {
		mild = oldest
	}
	if kept >= beforeMost {
		k.commits[mild].Before = nil
	}
}

// before returns the tables that a suspect commit touched, as they were at the genid before,
// for Commit.Before. A table that is not followed, or was read later, is left out.
func (k *Kernel) before(c Commit, genid uint32) map[tableid.TableID]Before {
	all := map[tableid.TableID]Before{}
	for id := range c.Deeds {
		f := k.follow.tables[id]
		if f == nil || !nft.Newer(c.Genid, f.genid) { // it was read later
			continue
		}
		if t, digest := k.follow.value(id); t != nil {
			all[id] = Before{t, digest, genid, f.at}
		}
	}
	return all
}

// Capture is the package's Capture at less cost. It reads a set that no process can change only
// once, or takes it from the notifications of the commit that made it. It reads all else now, so it
// proves a write. Drifted names followed tables that differ from the read, a fault of canaryd or
// the kernel.
func (k *Kernel) Capture(wanted func(nft.Table) bool) (*Ruleset, error) {
	return k.read(wanted, false)
}

// Follow returns the same as Capture. It reads a table once, and then applies the notifications of
// each commit. It reads a table again only if notifications were missed or are incomplete. It
// always reads tables with flowtables or with chains of devices.
func (k *Kernel) Follow(wanted func(nft.Table) bool) (*Ruleset, error) {
	return k.read(wanted, true)
}

// read reads the wanted tables. whole: it takes followed tables without a read, for Follow; see
// knowledge. Other tables are followed from this read on, unless a commit came between.
func (k *Kernel) read(wanted func(nft.Table) bool, whole bool) (*Ruleset, error) {
	genid, err := k.conn.Genid()
	if err == nil {
		err = k.hear(genid)
	}
	if err != nil {
		return nil, err
	}
	r, err := captureOthers(k.conn, wanted, knowledge{k.followed, whole, k.budget})
	if err != nil {
		return nil, err
	}
	k.budget = r.budget
	for id := range r.LeftOut {
		delete(k.follow.tables, id)
	}
	if k.afterCapture != nil {
		k.afterCapture()
	}
	if err := k.hear(r.Genid); err != nil {
		return nil, err
	}
	// A commit that was heard after the read, in whole or in part, is not in the read. Followed
	// tables have it already, and any other table is read again later.
	current := k.upTo == r.Genid && k.rec.deeds == nil
	for id, t := range r.Tables {
		if r.followed(id) || !current {
			continue
		}
		if was, digest := k.follow.value(id); was != nil {
			if t.Digest() == digest {
				continue
			}
			r.Drifted = append(r.Drifted, id)
		}
		k.follow.seed(t, r.Genid, r.At)
	}
	sorting.Stable(r.Drifted, tableid.TableID.Compare)
	return r, nil
}

// followed returns a table as it is at a genid, nil if it is not followed up to there. A
// capture then reads the table. It first hears the commits up to genid.
func (k *Kernel) followed(genid uint32, id tableid.TableID) *followed {
	if k.hear(genid) != nil || k.upTo != genid {
		return nil
	}
	return k.follow.standing(id)
}
