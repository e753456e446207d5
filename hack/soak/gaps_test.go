package main

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var podA, podB, podC = netip.MustParseAddr("10.244.1.10"), netip.MustParseAddr("10.244.1.11"), netip.MustParseAddr("10.244.1.12")

// at makes attempts a millisecond apart, one for each letter: a for answered, x for failed.
func at(from int64, outcomes string) []attempt {
	var all []attempt
	for i, o := range outcomes {
		a := attempt{Start: from + 1000*int64(i), Outcome: answered, Pod: podA}
		if o == 'x' {
			a.Outcome = silent
		}
		all = append(all, a)
	}
	return all
}

func TestLongestGap(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		story, outcomes string
		window          window
		want            gap
	}{
		{"nothing failed", "aaaaaaaa", window{From: 2000, To: 8000}, gap{}},
		{"from the last answer to the next", "aaaxxxaa", window{From: 2000, Done: 4000, To: 8000}, gap{Length: 4 * ms, After: 2 * ms, Failed: 3}},
		{"the last answer was before the flush", "aaxxxxaa", window{From: 2000, To: 8000}, gap{Length: 5 * ms, After: 5 * ms, Failed: 4}},
		{"the longest of several", "aaxaxxaxa", window{From: 0, Done: 7000, To: 9000}, gap{Length: 3 * ms, After: ms, Failed: 4}},
		{"other windows' failures", "xxxaaaaxx", window{From: 3000, To: 7000}, gap{}},
		{"over before the flush's last command ended", "aaaxxxaa", window{From: 2000, Done: 7000, To: 8000}, gap{Length: 4 * ms, Failed: 3}},
		{"no answer until the end", "aaaxxxxx", window{From: 2000, To: 8000}, gap{Length: 6 * ms, After: 6 * ms, Failed: 5, Open: true}},
		{"the next answer is the next window's", "aaaxxxxxa", window{From: 2000, Done: 7500, To: 6000}, gap{Length: 6 * ms, After: 500 * time.Microsecond, Failed: 3}},
		{"the next answer comes after the test put the rules right", "aaaxxxxxa", window{From: 2000, To: 6000, Cut: true}, gap{Length: 4 * ms, After: 4 * ms, Failed: 3, Open: true}},
		{"no answer at all", "xxxx", window{From: 0, To: 4000}, gap{Length: 4 * ms, After: 4 * ms, Failed: 4, Open: true}},
		{"no connection", "", window{From: 0, To: 4000}, gap{}},
	} {
		if diff := cmp.Diff(test.want, longestGap(at(0, test.outcomes), test.window)); diff != "" {
			t.Errorf("%s: %s (-want +got):\n%s", test.story, test.outcomes, diff)
		}
	}
}

// TestTruth: a moved pod is right for the one service before and for the other after the move,
// and for both meanwhile.
func TestTruth(t *testing.T) {
	tr := truth{
		First: [][]netip.Addr{{podA}, {podB}},
		Changes: []change{
			{Begin: 1000, End: 1100, Service: 0, Pods: []netip.Addr{podB}}, {Begin: 1000, End: 1100, Service: 1, Pods: []netip.Addr{podA}},
			{Begin: 2000, End: 2100, Service: 0, Pods: []netip.Addr{podC}},
		},
	}
	for _, test := range []struct {
		start, end int64
		target     int
		pod        netip.Addr
		want       bool
	}{
		{900, 950, 0, podA, true}, {900, 950, 0, podB, false}, {900, 950, 1, podB, true},
		{950, 1050, 0, podA, true}, {950, 1050, 0, podB, true}, {1050, 1060, 0, podA, true}, {950, 1050, 0, podC, false},
		{1090, 1200, 0, podA, true}, {1200, 1300, 0, podA, false}, {1200, 1300, 0, podB, true}, {1200, 1300, 1, podA, true},
		{900, 3000, 0, podA, true}, {900, 3000, 0, podC, true}, {2200, 2300, 0, podB, false}, {2200, 2300, 0, podC, true},
		{2200, 2300, 1, podA, true}, {2200, 2300, 1, netip.Addr{}, false},
	} {
		if got := tr.right(attempt{Start: test.start, End: test.end, Target: test.target, Pod: test.pod}); got != test.want {
			t.Errorf("from %d to %d target %d is answered by %s: right %t, want %t", test.start, test.end, test.target, test.pod, got, test.want)
		}
	}
}

func TestQuantile(t *testing.T) {
	var values []time.Duration
	for i := range 200 {
		values = append(values, time.Duration(200-i))
	}
	for share, want := range map[float64]time.Duration{0.5: 100, 0.99: 198, 1: 200} {
		if got := quantile(values, share); got != want {
			t.Errorf("the %v quantile of 1 to 200 is %d, want %d", share, got, want)
		}
	}
	if got := quantile(values[:40], 0.99); got != 200 {
		t.Errorf("the 0.99 quantile of 40 values is %d, want the largest, 200", got)
	}
	if got := quantile(nil, 0.99); got != 0 {
		t.Errorf("of nothing it is %d", got)
	}
}

func TestAnAttemptSurvivesItsLine(t *testing.T) {
	for _, want := range []attempt{
		{Start: 12, End: 34, Target: 56, Outcome: answered, Pod: podA}, {Start: 12, End: 34, Target: 0, Outcome: silent},
	} {
		got, err := parseAttempt(want.String())
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || err != nil {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	for _, line := range []string{"", "1 2 3", "a 2 3 silent x", "1 2 3 answered no-address"} {
		if _, err := parseAttempt(line); err == nil {
			t.Errorf("%q is read", line)
		}
	}
}

// TestWhatFailsASoak: wrong results fail a soak, but slow ones do not.
func TestWhatFailsASoak(t *testing.T) {
	good := result{Healer: byCanaryd, Flushes: 1, Services: side{Failed: 9, Gaps: []time.Duration{time.Minute}}, Calm: 7, Skipped: 8}
	if err := good.err(); err != nil {
		t.Errorf("a long gap: %v", err)
	}
	for story, spoil := range map[string]func(*result){
		"a wrong translation":       func(r *result) { r.Wrong = 1 },
		"a problem":                 func(r *result) { r.Problems = []string{"canaryd ended"} },
		"no flush":                  func(r *result) { r.Flushes = 0 },
		"services that stay lost":   func(r *result) { r.Services.Open = 1 },
		"host ports that stay lost": func(r *result) { r.HostPorts.Open = 1 },
	} {
		bad := good
		if spoil(&bad); bad.err() == nil {
			t.Errorf("%s is taken for good", story)
		}
	}
	for story, lost := range map[string]cell{"a reset": {Resets: 1}, "what never connected": {Never: 1}} {
		lost.Gaps, lost.Refused = []time.Duration{time.Minute}, 1
		for _, r := range []struct {
			healer       string
			strict, want bool
		}{{byCanaryd, true, true}, {byCanaryd, false, false}, {byMonitor, true, false}} {
			bad := result{Healer: r.healer, Strict: r.strict, Flushes: 1, View: []cell{lost}}
			if got := bad.err() != nil; got != r.want {
				t.Errorf("%s with %s, strict %t: an error %t, want %t", story, r.healer, r.strict, got, r.want)
			}
		}
	}
	if err := (result{Healer: byCanaryd, Strict: true, Flushes: 1, View: []cell{{Refused: 1, Failed: 9, Gaps: []time.Duration{time.Minute}}}}).err(); err != nil {
		t.Errorf("a long gap and a refusal: %v", err)
	}
}
