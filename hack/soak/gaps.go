package main

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// A change is a moment at which a service got other pods.
type change struct {
	Begin, End int64 // of its restore, by clock
	Service    int
	Pods       []netip.Addr // from then on
}

// A truth has the pods of each target over time.
type truth struct {
	First   [][]netip.Addr // by target
	Changes []change       // in their order
}

// right reports whether a pod of the target answered. During a change, both pods are right.
func (t truth) right(a attempt) bool {
	now := t.First[a.Target]
	for _, c := range t.Changes {
		switch {
		case c.Service != a.Target:
		case a.End < c.Begin: // this one and all later ones
			return slices.Contains(now, a.Pod)
		case a.Start > c.End:
			now = c.Pods
		default:
			now = slices.Concat(now, c.Pods)
		}
	}
	return slices.Contains(now, a.Pod)
}

// A window is the time of one flush: from its first command to the next flush, or until the
// test repaired the rules.
type window struct {
	Kind     string
	Standby  string // --standby
	From, To int64
	Done     int64 // the end of the flush's last command
	Cut      bool  // the test repaired the rules
}

// A gap is the longest time without an answer.
type gap struct {
	Length time.Duration // 0: nothing failed
	// After is the longest part of a gap after the flush's last command: the time of the
	// healer, without the flusher's.
	After time.Duration
	// Open means that no connection was answered until the end, or until the test repaired the
	// rules.
	Open   bool
	Failed int
}

// longestGap examines attempts, which are sorted by their starts. A gap begins with the last
// answered connection before a failed one, and ends with the next answered one. That one may
// belong to the next window, if the client had no processor for a while.
func longestGap(attempts []attempt, w window) gap {
	var g gap
	from, _ := slices.BinarySearchFunc(attempts, w.From, func(a attempt, at int64) int { return cmp.Compare(a.Start, at) })
	last := w.From
	for i := from - 1; i >= 0; i-- {
		if attempts[i].Outcome == answered {
			last = attempts[i].Start
			break
		}
	}
	failing := false
	longer := func(until int64) {
		g.Length = max(g.Length, time.Duration(until-last)*time.Microsecond)
		g.After = max(g.After, time.Duration(until-max(last, w.Done))*time.Microsecond)
	}
	until := w.To
	for _, a := range attempts[from:] {
		late := a.Start >= w.To
		if late && (w.Cut || !failing) {
			break
		}
		until = max(until, a.Start)
		if a.Outcome != answered {
			if !late {
				g.Failed++
			}
			failing = true
			continue
		}
		if failing {
			longer(a.Start)
		}
		failing, last = false, a.Start
	}
	if failing {
		longer(until)
		g.Open = true
	}
	return g
}

// quantile returns the smallest value that is not below a share of the values (the nearest
// rank). Of 40 values, the 0.99 quantile is the largest.
func quantile(values []time.Duration, share float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(share*float64(len(sorted)) + 0.999999)
	return sorted[min(max(rank, 1), len(sorted))-1]
}
