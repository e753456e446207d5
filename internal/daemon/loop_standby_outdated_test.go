package daemon

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// outdatedStories are for how long a change could not be written into a copy when its table is
// lost, and what the log says of its gate then.
var outdatedStories = map[string]struct {
	behind time.Duration
	log    string
	opens  bool
}{
	"behind for 10 s": {10 * time.Second, "The standby translates until the rules are back, but its copy is out of date", true},
	"behind for 40 s": {40 * time.Second, "The standby stays shut: its copy is out of date", false},
}

// TestNativeStandbyIsOutdated: a copy that takes no changes is opened as it is, and the log says
// so; but no more once it is behind for as long as a gate may be open.
func TestNativeStandbyIsOutdated(t *testing.T) {
	for name, story := range outdatedStories {
		bubble(t, name, func(t *testing.T) {
			r, k, s := withNativeStandby(t, nil)
			s.set(func(s *fakeNativeStandby) { s.outdated = errors.New("the table has to be written as a whole") })
			k.with(func() { k.refuses[dockerTable], k.refuses[proxyTable] = true, true })
			k.flushTable(dockerTable) // while something is missing, nothing is followed
			r.after(time.Second)
			k.sync(natTable(proxyTable, "a"))
			r.after(story.behind)
			k.flushTable(proxyTable)
			r.after(15 * time.Second)
			if diff := cmp.Diff(story.opens, s.isOpen(proxyTable)); diff != "" {
				t.Errorf("the gate is open (-want +got):\n%s", diff)
			}
			if log := r.log.String(); !strings.Contains(log, story.log) || !strings.Contains(log, "as a whole") {
				t.Errorf("the log lacks %q or its reason:\n%s", story.log, log)
			}
		})
	}
}

// TestStandbyIsOutdated is the same of a family: what was translated is not taken, and what is
// written is judged.
func TestStandbyIsOutdated(t *testing.T) {
	for name, story := range outdatedStories {
		bubble(t, name, func(t *testing.T) {
			r, s := withStandby(t, nil)
			s.set(func(s *fakeStandby) { s.outdated = errors.New("the table has to be written as a whole") })
			r.after(10 * time.Second)
			since := time.Now()
			for n := range 12 {
				r.endpoint(n, true)
				r.after(100 * time.Millisecond)
			}
			if followed, written := s.named("follow ipv4", since), s.named("write ipv4", since); len(followed) <= len(written) {
				t.Fatalf("translated %d times and written %d times, so that nothing is outstanding", len(followed), len(written))
			}
			r.fake.FailRestores(-1, iptables.ReasonMissingSet)
			must(t, r.fake.Flush(rules.IPv4, rules.Filter, "")) // while something is missing, nothing is followed
			r.after(story.behind)
			r.flushNat()
			r.after(time.Second)
			if diff := cmp.Diff(story.opens, s.anyOpen()); diff != "" {
				t.Errorf("the gate is open (-want +got):\n%s", diff)
			}
			if log := r.log.String(); !strings.Contains(log, story.log) || !strings.Contains(log, "as a whole") {
				t.Errorf("the log lacks %q or its reason:\n%s", story.log, log)
			}
		})
	}
}
