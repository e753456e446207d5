package daemon

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/pace"
)

// tableDeleted is the log's line about a deleted table.
const tableDeleted = "The standby's table is deleted"

// TestStandbyTablesThatAreDeleted: after a cleanup the log says that the standby's table is
// deleted if there was one, and not if the kernel cannot have one.
func TestStandbyTablesThatAreDeleted(t *testing.T) {
	for _, test := range []struct {
		native bool
		err    error // of building it
		want   int   // log lines
	}{
		{native: false, want: 2},
		{native: true, want: 1},
		{native: false, err: errors.New("the kernel cannot hold a standby"), want: 0},
		{native: true, err: errors.New("the kernel cannot hold a standby"), want: 0},
	} {
		bubble(t, fmt.Sprintf("native %t, %v", test.native, test.err), func(t *testing.T) {
			fake := loadedFake(t, "nft")
			k := newFakeNative(natTable(proxyTable, "a"))
			n, s := newFakeNativeStandby(k), newFakeStandby(fake)
			n.followErr, s.followErr = test.err, test.err
			set := setup{standby: s}
			if test.native {
				set = setup{guarded: k, nativeStandby: n}
			}
			r := run(t, fake, set)
			r.after(10 * time.Second)
			must(t, r.d.Cleanup(t.Context(), api.CleanupRequest{}))
			r.after(time.Minute)
			if diff := cmp.Diff(test.want, strings.Count(r.log.String(), tableDeleted)); diff != "" {
				t.Errorf("lines of the log (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAStandbyTableThatStays: the kernel does not delete the table, and does so at the next
// try. The log says both.
func TestAStandbyTableThatStays(t *testing.T) {
	bubble(t, "native", func(t *testing.T) {
		r, k, s := withNativeStandby(t, nil)
		s.set(func(s *fakeNativeStandby) { s.releaseErr = errors.New("the kernel has no memory") })
		k.deleteTable(proxyTable)
		r.settled()
		_, err := r.d.Dismiss(t.Context())
		must(t, err)
		r.after(time.Minute)
		r.wantLog("The standby's table could not be deleted yet")
		if s.holds(proxyTable) == nil || strings.Contains(r.log.String(), tableDeleted) {
			t.Error("it is gone, or the log says so")
		}
		s.set(func(s *fakeNativeStandby) { s.releaseErr = nil })
		r.after(pace.MakeAgain)
		r.wantLog(tableDeleted)
		if s.holds(proxyTable) != nil {
			t.Error("it is not tried again")
		}
	})
}
