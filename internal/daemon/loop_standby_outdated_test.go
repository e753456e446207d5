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

// outdatedStories say how long a copy could not take a change before its table is lost, and
// which line the log has about its gate.
var outdatedStories = map[string]struct {
	behind time.Duration
	log    string
	opens  bool
}{
	"behind for 10 s": {10 * time.Second, "The standby translates until the rules are back, but its copy is out of date", true},
	"behind for 40 s": {40 * time.Second, "The standby stays shut: its copy is out of date", false},
}

// TestNativeStandbyIsOutdated: a copy takes no changes. canaryd opens it as it is, and the log
// says so. Once it is behind for as long as a gate may be open, it stays shut.
func TestNativeStandbyIsOutdated(t *testing.T) {
	for name, story := range outdatedStories {
		bubble(t, name, func(t *testing.T) {
			r, k, s := withNativeStandby(t, nil)
			s.set(func(s *fakeNativeStandby) { s.outdated = errors.New("the table has to be written as a whole") })
			k.with(func() { k.refuses[dockerTable], k.refuses[proxyTable] = true, true })
			k.flushTable(dockerTable) // during a loss canaryd follows nothing
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

// TestStandbyIsOutdated is the same for a family. A translated change is not written, and the
// gate's decision is about the written copy.
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
			must(t, r.fake.Flush(rules.IPv4, rules.Filter, "")) // during a loss canaryd follows nothing
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
