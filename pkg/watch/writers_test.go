package watch

import (
	"math"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func genids(writers []Writer) []uint32 {
	var ids []uint32
	for _, w := range writers {
		ids = append(ids, w.Genid)
	}
	return ids
}

func TestWritersBetween(t *testing.T) {
	tests := []struct {
		name        string
		noted       []uint32
		after, upto uint32
		want        []uint32
	}{
		{"nothing noted", nil, 1, 9, nil},
		{"after is left out, upto is not", []uint32{4, 5, 6, 7}, 4, 6, []uint32{5, 6}},
		{"nothing happened", []uint32{4, 5}, 5, 5, nil},
		{"across the wrap-around", []uint32{math.MaxUint32 - 1, math.MaxUint32, 1, 2}, math.MaxUint32 - 1, 1, []uint32{math.MaxUint32, 1}},
		{"a holder of the lock has no genid", []uint32{math.MaxUint32, 0, 1}, math.MaxUint32 - 1, 1, []uint32{math.MaxUint32, 1}},
		{"in the order of their coming", []uint32{6, 5}, 4, 6, []uint32{6, 5}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var ws Writers
			for _, id := range tt.noted {
				ws.Note(Writer{Genid: id})
			}
			if diff := cmp.Diff(tt.want, genids(ws.Between(tt.after, tt.upto))); diff != "" {
				t.Errorf("Between(%d, %d) (-want +got):\n%s", tt.after, tt.upto, diff)
			}
		})
	}
}

func TestWritersForgetTheOldest(t *testing.T) {
	var ws Writers
	for id := uint32(1); id <= WritersKept+10; id++ {
		ws.Note(Writer{Genid: id})
	}
	got := genids(ws.Between(0, WritersKept+10))
	if len(got) != WritersKept || got[0] != 11 || got[len(got)-1] != WritersKept+10 {
		t.Errorf("kept %d from %d to %d, want %d from 11 to %d", len(got), got[0], got[len(got)-1], WritersKept, WritersKept+10)
	}
}

// TestWritersOfBothKinds: commits and holders of the lock do not take each other's places.
func TestWritersOfBothKinds(t *testing.T) {
	var ws Writers
	ws.Note(Writer{PID: 1, Genid: 1})
	ws.Note(Writer{PID: 2})
	for id := uint32(2); id <= WritersKept; id++ {
		ws.Note(Writer{PID: 3, Genid: id})
	}
	if got := ws.Holders(time.Time{}); len(got) != 1 || got[0].PID != 2 {
		t.Errorf("holders: %+v", got)
	}
	for range WritersKept {
		ws.Note(Writer{PID: 4})
	}
	if got := ws.Between(0, 1); len(got) != 1 || got[0].PID != 1 {
		t.Errorf("writers of commits: %+v", got)
	}
}

func TestWritersHolders(t *testing.T) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var ws Writers
	for i := range 3 {
		ws.Note(Writer{PID: uint32(i), Time: start.Add(time.Duration(i) * time.Second)})
	}
	var pids []uint32
	for _, w := range ws.Holders(start.Add(time.Second)) {
		pids = append(pids, w.PID)
	}
	if diff := cmp.Diff([]uint32{1, 2}, pids); diff != "" {
		t.Errorf("Holders (-want +got):\n%s", diff)
	}
}

func TestWritersAreForTwoGoroutines(t *testing.T) {
	var ws Writers
	var both sync.WaitGroup
	both.Go(func() {
		for id := range uint32(1000) {
			ws.Note(Writer{Genid: id})
		}
	})
	both.Go(func() {
		for range 1000 {
			ws.Between(0, 1000)
		}
	})
	both.Wait()
}
