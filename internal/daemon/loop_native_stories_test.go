package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
)

// The stories of this file were found by TestNativeStories.

// TestNativeWrittenAndFlushedDuringARead: its owner writes a table again, and a flush takes it,
// while canaryd reads an older state. The newer one returns.
func TestNativeWrittenAndFlushedDuringARead(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() {
			k.after = func() {
				k.again(tableOf(dockerTable, "newest"))
				k.flushRuleset()
			}
		})
		k.again(tableOf(dockerTable, "newer"))
		r.settled()
		k.wantNative(t, tableOf(dockerTable, "newest"))
		r.wantReady()
	})
}

// TestNativeWrittenAndFlushedDuringAProof: the same during the read that proves a replay.
func TestNativeWrittenAndFlushedDuringAProof(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() {
			k.between = func() {
				k.after = func() {
					k.again(tableOf(dockerTable, "newest"))
					k.flushRuleset()
				}
			}
		})
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(dockerTable, "newest"))
		r.wantReady()
	})
}

// TestNativeRemadeBetweenFlushes: a process makes a table again during an outage, and a second
// flush follows. The new content returns, and nothing that it lacks.
func TestNativeRemadeBetweenFlushes(t *testing.T) {
	for name, ancestors := range map[string][]string{"its owner": {"dockerd"}, "an unknown process": nil} {
		t.Run(name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.flushRuleset()
				r.after(5 * time.Millisecond) // canaryd waits for the flusher
				k.with(func() { k.origin.Ancestors = ancestors })
				k.again(tableOf(dockerTable, "newest"))
				k.with(func() { k.origin.Ancestors = nil })
				r.after(5 * time.Millisecond)
				k.flushTable(dockerTable)
				r.settled()
				k.wantNative(t, tableOf(dockerTable, "newest"))
				r.wantReady()
			})
		})
	}
}

// TestNativeWrittenRightAfterItsFirstRead: a commit to a new table lands between its first read and
// the hearing after that. canaryd knows a change, and puts back flushed rules.
func TestNativeWrittenRightAfterItsFirstRead(t *testing.T) {
	later := tableOf(proxyTable.Family.Table("later"), "x")
	for _, test := range []struct {
		name string
		do   func(k *fakeNative)
		want *native.Table
	}{
		{"a change", func(k *fakeNative) { k.addRule(later.ID, "y") }, tableOf(later.ID, "x", "y")},
		{"a flush", func(k *fakeNative) { k.flushTable(later.ID) }, later},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.after = func() { test.do(k) } })
				k.again(later)
				r.settled()
				k.wantNative(t, test.want)
				k.flushRuleset()
				r.settled()
				k.wantNative(t, test.want)
				r.wantReady()
			})
		})
	}
}

// TestNativeUnreadIsNotHealthy: reads of tables fail, and commits can be heard. Each look succeeds,
// and the node is not healthy until a read succeeds.
func TestNativeUnreadIsNotHealthy(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenReads = errNativeBroken })
		k.again(tableOf(dockerTable, "newer"))
		for range 40 {
			r.after(100 * time.Millisecond)
			if s := r.d.Status(); s.Healthy {
				t.Fatal("a changed table cannot be read, and the node is healthy")
			}
		}
		k.with(func() { k.brokenReads = nil })
		r.settled()
		r.wantReady()
	})
}

// TestNativeLossIsKeptAfterMissedCommits: the kernel refuses a deleted table, and commits are
// missed meanwhile. The evidence of the flush remains, so canaryd puts the table back.
func TestNativeLossIsKeptAfterMissedCommits(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() {
			k.refuses[dockerTable] = true
			k.origin.Unit = "nftables.service"
		})
		k.deleteTable(dockerTable)
		r.settled()
		k.with(func() { k.origin.Unit = "" })
		k.missing(func() { k.addRule(proxyTable, "n") })
		r.settled()
		r.wantNotReady("table ip docker-bridges is table_deleted")
		k.with(func() { delete(k.refuses, dockerTable) })
		r.after(time.Minute)
		k.wantNative(t, tableOf(dockerTable, "c"))
		r.wantReady()
		r.wantOneFlush("table_deleted", reload.Proved)
	})
}

// TestNativeLostOnceMoreDuringTries: the kernel refuses a restored table, and a process deletes it
// alone meanwhile. The first record does not say that the table is back, and the second one waits.
func TestNativeLostOnceMoreDuringTries(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.refuses[dockerTable] = true })
		k.flushTable(dockerTable)
		r.settled()
		k.deleteTable(dockerTable)
		r.after(time.Minute)
		var got []string
		for _, f := range r.d.Status().Flushes {
			got = append(got, string(f.Kind)+": "+string(f.Outcome))
		}
		want := "deleted_by_owner_or_unknown: " + string(api.AwaitingDecision) + ", emptied: " + string(api.Interrupted)
		if strings.Join(got, ", ") != want {
			t.Errorf("the records are %v, want %s", got, want)
		}
		r.wantNotReady("table ip docker-bridges is deleted_by_owner_or_unknown")
		if strings.Contains(r.log.String(), "The rules are back") {
			t.Error("the log says that the rules are back")
		}
	})
}

// TestNativeUnreadDeletionAndMissedCommits: the report on a deleted table waits for its process,
// and commits are missed meanwhile. canaryd reports at once, and does not read again and again.
func TestNativeUnreadDeletionAndMissedCommits(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.unread, k.takes = true, time.Millisecond })
		k.deleteTable(dockerTable)
		r.after(10 * time.Millisecond)
		before := k.count().captures + k.follows
		k.missing(func() { k.addRule(proxyTable, "n") })
		r.settled()
		if n := k.count().captures + k.follows - before; n > 10 {
			t.Errorf("%d reads", n)
		}
		r.wantNotReady("table ip docker-bridges is deleted_by_owner_or_unknown")
	})
}
