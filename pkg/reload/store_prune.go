package reload

import (
	"errors"
	"os"
	"slices"
	"time"

	"github.com/canaryd/canaryd/internal/sorting"
)

const (
	// keptGenerations is how many of the newest generations are always kept.
	keptGenerations = 5
	// In each of so many hours and days, the present ones included, the fullest generation is kept.
	keptHours = 2
	keptDays  = 7
	// keptBytes bounds the size of older generations on disk in addition to the newest, bases
	// included.
	keptBytes = 64 << 20
)

// prune removes generations that are not worth their space, and bases that no generation needs.
// Save calls it after each new generation.
func (s *Store) prune() error {
	list, err := s.list()
	if err != nil {
		return err
	}
	keep := s.worthKeeping(list, time.Now())
	var errs []error
	for _, k := range list {
		if !keep[k.ID] {
			s.step("prune")
			delete(s.until, k.ID)
			errs = append(errs, os.Remove(s.path(k.ID)))
		}
	}
	return errors.Join(append(errs, s.pruneBases())...)
}

// worthKeeping returns which generations of a list, newest first, stay on disk. These are the
// newest, and the generation that a loss waits for. The fullest of this hour, of the hour before,
// and of each day of a week also stays. A process that deletes rules one by one makes many
// generations, and would push out the first one. Hours and days are the clock's, in UTC: the
// fullest of an hour that is over stays its fullest. The fullest of a sliding hour would change to
// a generation that was pruned long before.
func (s *Store) worthKeeping(list []Kept, now time.Time) map[string]bool {
	keep, bases, spent := map[string]bool{}, map[string]bool{}, int64(0)
	for i, k := range list {
		if i < keptGenerations || k.ID == s.pinned {
			keep[k.ID], bases[s.headers[k.ID].stored.Base] = true, true
		}
	}
	add := func(from, to time.Time) {
		k, found := s.fullest(list, from, to, now)
		if !found || keep[k.ID] {
			return
		}
		cost, base := s.headers[k.ID].size, s.headers[k.ID].stored.Base
		if base != "" && !bases[base] {
			if info, err := os.Stat(s.basePath(base)); err == nil {
				cost += info.Size()
			}
		}
		if spent+cost <= keptBytes {
			keep[k.ID], bases[base], spent = true, true, spent+cost
		}
	}
	for _, span := range []struct {
		length time.Duration
		kept   int
	}{{time.Hour, keptHours}, {24 * time.Hour, keptDays}} {
		for n := range span.kept {
			from := now.Truncate(span.length).Add(-time.Duration(n) * span.length)
			add(from, from.Add(span.length))
		}
	}
	return keep
}

// fullest returns the fullest generation that was in force between from and to and may be
// restored here; of equally full ones the newest. worthKeeping keeps it. After a restart of
// canaryd, a generation counts as in force until the next one that is still on disk was saved.
func (s *Store) fullest(list []Kept, from, to, now time.Time) (best Kept, found bool) {
	list = slices.Clone(list)
	sorting.Stable(list, func(a, b Kept) int { return b.Saved.Compare(a.Saved) })
	until := now // the next newer generation replaced it then
	for _, k := range list {
		if at, known := s.until[k.ID]; known {
			until = at
		}
		if k.ID == s.written {
			until = now
		}
		if k.Foreign == "" && k.Counted && k.Rules > best.Rules && k.Saved.Before(to) && until.After(from) {
			best, found = k, true
		}
		until = k.Saved
	}
	return best, found
}
