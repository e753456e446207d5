package native

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/nft"
)

// Fleeting reports whether packets or time may change a set of the table without a notification.
func (t *Table) Fleeting() bool {
	return slices.ContainsFunc(t.Sets, func(s Set) bool { return s.fleeting() })
}

func (s *Set) fleeting() bool { return s.Dynamic() || s.Flags&setTimeout != 0 }

// A refreshed is the result of reading one set.
type refreshed struct {
	f    *followed
	s    *followedSet
	read []Element
}

// Refresh reads the changes that packets and time have made in followed tables. It reads whole
// sets, the longest unread first, until budget is used up, and returns their number. The next
// Follow has the changes, and reads a table again that has become too large. The error is
// nft.ErrInterrupted if another process committed meanwhile.
func (k *Kernel) Refresh(budget time.Duration) (sets int, err error) {
	start := time.Now()
	genid, err := k.conn.Genid()
	if err == nil {
		err = k.hear(genid)
	}
	if err == nil && k.upTo != genid {
		err = nft.ErrInterrupted
	}
	if err != nil {
		return 0, err
	}
	all := k.follow.fleeting()
	for i := range all {
		all[i].read, err = k.elements(all[i])
		if errors.Is(err, nft.ErrEnough) { // the next read is broken off, too
			delete(k.follow.tables, all[i].f.head.ID)
		} else if err != nil {
			return 0, err
		}
		if sets++; time.Since(start) > budget {
			break
		}
	}
	after, err := k.conn.Genid()
	if err == nil && after != genid {
		err = nft.ErrInterrupted
	}
	if err != nil {
		return 0, err
	}
	for _, r := range all[:sets] {
		if r.take(start); !k.follow.fits() {
			delete(k.follow.tables, r.f.head.ID)
		}
	}
	return sets, nil
}

// fleeting returns the sets that packets or time change, the longest unread first. Refresh
// reads them in that order, so that each has its turn.
func (f *follower) fleeting() []refreshed {
	var all []refreshed
	for _, t := range f.tables {
		for _, s := range t.sets.list {
			if s.fleeting() {
				all = append(all, refreshed{f: t, s: s})
			}
		}
	}
	sorting.Stable(all, func(a, b refreshed) int {
		return cmp.Or(a.s.refreshed.Compare(b.s.refreshed), a.f.head.ID.Compare(b.f.head.ID), cmp.Compare(a.s.Handle, b.s.Handle))
	})
	return all
}

// elements reads the elements of one set for Refresh. nft.ErrInterrupted means that the set is
// gone, so another process has committed.
func (k *Kernel) elements(r refreshed) ([]Element, error) {
	id := r.f.head.ID
	all, err := elementsOf(k.conn, id, r.s.Name, &scale{most: k.follow.most})
	switch {
	case errors.Is(err, syscall.ENOENT): // the genid has moved
		return nil, nft.ErrInterrupted
	case err != nil:
		return nil, fmt.Errorf("table %s: %w", id, err)
	}
	return all, nil
}

// take stores the elements of one set, which Refresh began to read at the time at. The rest of
// their timeouts is converted to count from r.f.at, as in the whole table. The next value of
// the table has them.
func (r refreshed) take(at time.Time) {
	for i, e := range r.read {
		r.read[i] = e.later(at.Sub(r.f.at))
	}
	r.s.Elements, r.s.refreshed = r.read, at
	r.s.sort()
	r.f.weigh(&r.s.weight, r.s.Set.weight())
	r.s.recount, r.s.known = true, false
	r.f.last = nil
}
