package daemon

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestOwnWriteWithoutProof: canaryd renews its marks, and the read that should prove them
// fails, as when the kernel kills iptables-save for lack of memory. No process has flushed.
func TestOwnWriteWithoutProof(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend iptables.Backend) {
		r := start(t, backend, setup{})
		moved := r.moved(func() {
			restores := r.fake.Restores()
			r.fake.BeforeRestore(func() { r.fake.FailReads(errInjected) })
			must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
			r.after(5 * time.Second)
			if r.fake.Restores() == restores {
				t.Error("the marks were not renewed")
			}
			r.wantNotReady("unknown")
			r.fake.BeforeRestore(nil)
			r.fake.FailReads(nil)
			r.after(20 * time.Second)
		}, lossMetrics...)
		wantMoved(t, moved, series{})
		if records := r.records(0); len(records) != 0 {
			t.Errorf("flush records: %+v", records)
		}
		r.wantReady()
	})
}

// TestNoTimeOfTheWallIsCompared: the wall clock may jump, so canaryd compares only times with a
// reading of the monotonic clock. Times from disk have none, and are for people only. Bubbles
// have no monotonic clock, so this test takes time.
func TestNoTimeOfTheWallIsCompared(t *testing.T) {
	dir, id := t.TempDir(), identity(iptables.NFT)
	fake := loadedFake(t, iptables.NFT)
	wait := func(r *rig, what string, done func(api.Status) bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !done(r.d.Status()); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("waited 10 s for %s", what)
			}
		}
	}
	first := run(t, fake, setup{store: openStore(t, dir, id)})
	wait(first, "a generation", func(s api.Status) bool { return s.Healthy && s.Generation.Rules > 0 })
	first.stop()

	r := run(t, fake, setup{store: openStore(t, dir, id)})
	wait(r, "the generation of before", func(s api.Status) bool { return s.Healthy })
	r.flushNat()
	wait(r, "a repair", func(s api.Status) bool { return s.Healthy && len(s.Flushes) == 1 })
	must(t, r.fake.RestoreNoflush(rules.IPv4, scenario.NewService))
	time.Sleep(500 * time.Millisecond) // until it is learned, and the marks are renewed
	var bare []string
	must(t, r.d.ask(t.Context(), func(_ context.Context, st *state) {
		bare = bareTimes(reflect.ValueOf(st), "state")
	}))
	// These times are printed or written to disk, and never compared.
	bare = slices.DeleteFunc(bare, func(path string) bool {
		return path == "state.absence.confirmed" || path == "state.generation.captured" || strings.HasPrefix(path, "state.disk.stored[")
	})
	if len(bare) > 0 {
		t.Errorf("times without the monotonic clock: %q", bare)
	}
	if found := bareTimes(reflect.ValueOf(state{journal: []api.Flush{{Time: time.Unix(1, 0)}}}), "state"); !slices.Equal(found, []string{"state.journal[0].Time"}) {
		t.Errorf("a time without it is not found: %q", found)
	}
}

// bareTimes returns the paths of all non-zero times within v that have no reading of the
// monotonic clock.
func bareTimes(v reflect.Value, path string) []string {
	var found []string
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			found = bareTimes(v.Elem(), path)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			// The first bit of the first field says whether there is a reading.
			if wall := v.Field(0).Uint(); wall>>63 == 0 && !v.IsZero() {
				found = append(found, path)
			}
			return found
		}
		for i := range v.NumField() {
			found = append(found, bareTimes(v.Field(i), path+"."+v.Type().Field(i).Name)...)
		}
	case reflect.Slice:
		for i := range v.Len() {
			found = append(found, bareTimes(v.Index(i), fmt.Sprintf("%s[%d]", path, i))...)
		}
	case reflect.Map:
		for each := v.MapRange(); each.Next(); {
			found = append(found, bareTimes(each.Value(), fmt.Sprintf("%s[%v]", path, each.Key()))...)
		}
	}
	return found
}
