package native

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// hearMost bounds the wait for notifications of a commit that the genid shows already.
	hearMost = time.Second
	// tornMost is hearMost after an overflow: what ends the commit was dropped most likely.
	tornMost = 20 * time.Millisecond
	// unheardMost bounds the commits that are kept for Hear.
	unheardMost = 4096
	// beforeMost bounds how many of them have tables with them: 1.2 MB for kube-proxy's 5,000
	// services.
	beforeMost = 16
)

// A hearing is what a Kernel has heard.
type hearing struct {
	rec    Recorder
	follow follower
	upTo   uint32 // the genid of the last commit
	// torn: the notifications of a commit came in part, so that what ends it says nothing.
	torn bool
	// overflowed: the socket dropped some, behind those that still waited in it.
	overflowed bool
	// What Hear has not returned yet.
	commits []Commit
	missed  bool
	suspect func(Commit) bool
}

// A Commit is what one transaction did.
type Commit struct {
	nft.Commit
	Deeds map[tableid.TableID]*Deed
	// WitnessLost has the families whose witness went.
	WitnessLost map[tableid.Family]bool
	// Before has the tables that it touched as they were before it, of a commit that Suspect has
	// named. A table that is not followed is not among them.
	Before map[tableid.TableID]Before
}

// A Before is a table as it was before a commit.
type Before struct {
	Table  *Table
	Digest Digest
	Genid  uint32    // at which it stood so
	LeftAt time.Time // when what is left of timeouts was left
}

// Suspect has the commits that f names kept with what their tables were before. What is learned of
// a table then ends right before the commit that may have been a flush. f must be quick.
func (k *Kernel) Suspect(f func(Commit) bool) { k.suspect = f }

// Hear returns the commits since it was called before, up to genid at least, the oldest first.
// With missed there were others, of which not all was heard.
func (k *Kernel) Hear(genid uint32) (commits []Commit, missed bool, err error) {
	err = k.hear(genid)
	commits, missed = k.commits, k.missed || err != nil
	k.commits, k.missed = nil, false
	return commits, missed, err
}

// hear takes in the notifications of all commits up to genid at least.
func (k *Kernel) hear(genid uint32) error {
	for deadline := time.Now().Add(hearMost); ; {
		err := k.events.DrainAll(k.take)
		if err == nil && k.overflowed { // all that came before the hole was taken, and some behind it
			k.rec.drop()
			k.torn, k.overflowed = true, false
		}
		if err != nil { // what came was taken; the rest of that commit is of no use
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
			// A commit is visible before it is heard of: if there is none, what comes next is
			// whole.
			if now, err := k.conn.Genid(); err == nil && now == k.upTo {
				k.torn = false
			}
			return nil
		case err == nil:
			time.Sleep(time.Millisecond)
		}
	}
}

// miss notes that some notifications were not heard.
func (k *Kernel) miss() {
	k.missed = true
	k.follow.forget()
}

// take takes in one notification.
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

// thin makes room for what the tables are before one more commit: where many commits wait, the
// oldest that deleted no table lose theirs, or else the oldest.
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

// before returns what a commit touched, as it was at the genid before.
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

// Capture is Capture of the package, for less: what is in a set that no process can change it reads
// once, which may be in the notifications of the commit that made it. All else it reads now, so it
// proves what was written. Drifted names tables that were followed to something else, which is a
// fault of canaryd's or the kernel's.
func (k *Kernel) Capture(wanted func(nft.Table) bool) (*Ruleset, error) {
	return k.read(wanted, false)
}

// Follow returns what Capture does. What it has read before it has followed by the notifications of
// each commit, and reads it again only where these were missed or do not tell all: then, and of
// flowtables and chains of devices.
func (k *Kernel) Follow(wanted func(nft.Table) bool) (*Ruleset, error) {
	return k.read(wanted, true)
}

// read reads the wanted tables. whole: not what is followed; see knowledge.
func (k *Kernel) read(wanted func(nft.Table) bool, whole bool) (*Ruleset, error) {
	genid, err := k.conn.Genid()
	if err == nil {
		err = k.hear(genid)
	}
	if err != nil {
		return nil, err
	}
	r, err := captureOthers(k.conn, wanted, knowledge{k.followed, whole})
	if err != nil {
		return nil, err
	}
	if k.afterCapture != nil {
		k.afterCapture()
	}
	if err := k.hear(r.Genid); err != nil {
		return nil, err
	}
	// What was heard behind the read, in whole or in part, is not in it. Then a table that was
	// followed has it, and any other is read again.
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
	slices.SortFunc(r.Drifted, tableid.TableID.Compare)
	return r, nil
}

// followed returns a table as it is at a genid, nil if it is not followed up to there.
func (k *Kernel) followed(genid uint32, id tableid.TableID) *followed {
	if k.hear(genid) != nil || k.upTo != genid {
		return nil
	}
	return k.follow.standing(id)
}
