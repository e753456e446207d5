package reload

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/pkg/rules"
)

// purged returns generations of n rules down to 1, as a step by step purge leaves them.
func purged(n int) (list []rules.Generation) {
	var all []rules.Rule
	for i := range n {
		all = append(all, spec(fmt.Sprintf("-s 10.0.%d.%d/32 -j DROP", i/250, i%250)))
	}
	for ; n > 0; n-- {
		list = append(list, rules.Generation{}.With(v4.Table(rules.Filter), rules.Section{Chains: []rules.Chain{{Name: "KUBE-FIREWALL", Rules: all[:n]}}}))
	}
	return list
}

// TestAPurgeLeavesTheFullGeneration: each generation of a burst is smaller than the one before. The
// five newest and the first one stay, also after a restart in the middle of the burst. That holds
// even if the first one was written weeks ago.
func TestAPurgeLeavesTheFullGeneration(t *testing.T) {
	ages := []time.Duration{0, time.Minute, 40 * 24 * time.Hour}
	for len(ages) > 0 {
		age, hour := ages[0], time.Now().Truncate(time.Hour)
		dir := t.TempDir()
		s := openStore(t, dir, here)
		n := testkit.Size(120, 1000)
		all := purged(n)
		must(t, s.saveGeneration(all[0], "snapshot", noon))
		must(t, os.Chtimes(s.path(all[0].ID()), time.Now().Add(-age), time.Now().Add(-age)))
		for i, g := range all[1:] {
			must(t, s.saveGeneration(g, "snapshot", noon))
			if i == n/2 {
				s = openStore(t, dir, here)
				s.Resume(g.ID())
				continue
			}
			if i == n/2+1 || i == len(all)-3 {
				must(t, s.SaveState(testState()))
			}
		}
		if !time.Now().Truncate(time.Hour).Equal(hour) {
			continue // the new hour has a fullest generation, too
		}
		ages = ages[1:]
		want := []int{1, 2, 3, 4, 5, n}
		var got []int
		for _, k := range s.List() {
			got = append(got, k.Rules)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: rules of what is kept (-want +got):\n%s", age, d)
		}
		if _, err := s.Load(all[0].ID()); err != nil {
			t.Error(err)
		}
	}
}

// TestTheFullestOfEachDayIsKeptForAWeek: generations are saved all the time for three weeks, while
// the rules grow, shrink or do both. The disk always has the fullest of this hour, of the hour
// before and of each of seven days, and little else.
func TestTheFullestOfEachDayIsKeptForAWeek(t *testing.T) {
	step := testkit.Size(30*time.Minute, 10*time.Minute)
	steps := int(3 * 7 * 24 * time.Hour / step)
	for name, count := range map[string]func(n int) int{
		"growing":   func(n int) int { return 100 + n },
		"shrinking": func(n int) int { return 100 + steps - n },
		"both":      func(n int) int { return 100 + n*7919%1009 },
		"equal":     func(int) int { return 100 },
	} {
		s := openStore(t, t.TempDir(), here)
		s.headers = map[string]header{}
		var list, all []Kept // newest first
		for n := range steps {
			now := noon.Add(time.Duration(n) * step)
			k := Kept{ID: fmt.Sprint(n), Saved: now, Counted: true, Rules: count(n)}
			s.until[s.written], s.written = now, k.ID
			list, all = slices.Insert(list, 0, k), slices.Insert(all, 0, k)
			keep := s.worthKeeping(list, now)
			list = slices.DeleteFunc(list, func(k Kept) bool { return !keep[k.ID] })
			if len(list) > keptGenerations+keptHours+keptDays {
				t.Fatalf("%s: %d are kept", name, len(list))
			}
			all = all[:min(len(all), (keptDays+1)*24*6)]
			for span, kept := range map[time.Duration]int{time.Hour: keptHours, 24 * time.Hour: keptDays} {
				for back := range kept {
					from := now.Truncate(span).Add(-time.Duration(back) * span)
					if want, got := mostRules(all, from, from.Add(span)), mostRules(list, from, from.Add(span)); got != want {
						t.Fatalf("%s: at %s the fullest of %s from %s has %d rules, want %d", name, now, span, from, got, want)
					}
				}
			}
			if oldest := list[len(list)-1]; now.Sub(oldest.Saved) > keptDays*24*time.Hour+step {
				t.Fatalf("%s: a generation that is %s old is kept", name, now.Sub(oldest.Saved))
			}
		}
	}
}

// mostRules returns the rules of the fullest generation that was saved in that time.
func mostRules(list []Kept, from, to time.Time) (most int) {
	for _, k := range list {
		if !k.Saved.Before(from) && k.Saved.Before(to) {
			most = max(most, k.Rules)
		}
	}
	return most
}

// TestOlderGenerationsHaveABound: older generations take a bounded space in addition to the newest,
// and the fullest of the last hour has priority.
func TestOlderGenerationsHaveABound(t *testing.T) {
	s, now := openStore(t, t.TempDir(), here), time.Now()
	var list []Kept
	s.headers = map[string]header{}
	for i := range 30 {
		k := Kept{ID: fmt.Sprint(i), Saved: now.Add(-time.Duration(i) * 6 * time.Hour), Counted: true, Rules: 100 + i}
		list = append(list, k)
		s.headers[k.ID] = header{size: 30 << 20}
	}
	s.written = list[0].ID
	s.until = map[string]time.Time{list[29].ID: now.Add(-time.Minute)}
	keep := s.worthKeeping(list, now)
	var size int64
	for _, k := range list[keptGenerations:] {
		if keep[k.ID] {
			size += s.headers[k.ID].size
		}
	}
	if size == 0 || size > keptBytes || !keep[list[29].ID] {
		t.Errorf("%d MiB are kept; the fullest of the last hour: %t", size>>20, keep[list[29].ID])
	}
}
