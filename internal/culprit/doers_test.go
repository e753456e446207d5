package culprit

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestLegacyDeedsOfASpan: on legacy a process may have written at any time between the messages
// about opening and closing the lock. So it counts for each span between two reads that this
// time overlaps.
func TestLegacyDeedsOfASpan(t *testing.T) {
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	for _, tt := range []struct {
		hold   string
		noted  []int // when the process was noted
		counts bool
	}{
		{"before the span", []int{10, 90}, false},
		{"behind the span", []int{210, 220}, false},
		{"within the span", []int{110, 190}, true},
		{"begun before the span", []int{90, 110}, true},
		{"over behind the span", []int{190, 210}, true},
		{"longer than the span", []int{90, 210}, true},
		{"noted once", []int{150}, true},
	} {
		writers := &watch.Writers{}
		for _, ms := range tt.noted {
			writers.Note(watch.Writer{Time: at(ms), PID: 7, Comm: "iptables", Command: "iptables -D", By: watch.Doer{PID: 4711, Start: 1, Comm: "puppet", Command: "puppet agent"}})
		}
		q := Inquiry{Writers: writers, Own: func(uint32) bool { return false }, Legacy: true}
		got := q.touched(rules.IPv4.Table(rules.Nat), Span{After: Read{At: at(100)}, Upto: Read{At: at(200)}}).of("KUBE-SERVICES")
		if diff := cmp.Diff(tt.counts, len(got) == 1); diff != "" {
			t.Errorf("a hold %s (-want +got):\n%s", tt.hold, diff)
		}
	}
}
