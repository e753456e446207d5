package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestNativeSwitchedMode: kube-proxy starts in iptables mode. It deletes its native table and
// then writes its canary and its rules, so the deletion is its decision. A canary from before
// proves nothing.
func TestNativeSwitchedMode(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]", "-X KUBE-PROXY-CANARY")
		r.settled()
		k.deleteTable(proxyTable)
		r.settled()
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.after(time.Minute)
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
		r.after(10 * time.Second)
		r.wantReady()
		if k.standing(proxyTable) != nil || k.count().heals != 0 {
			t.Error("the table was put back")
		}
		r.wantOneFlush("deleted_by_owner_or_unknown", api.OwnersDecision)
	})
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		r.write(rules.Mangle, ":KUBE-PROXY-CANARY - [0:0]")
		r.after(10 * time.Second)
		k.deleteTable(proxyTable)
		r.after(time.Minute)
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
		r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision)
	})
}

// TestNativeDeletedByAnOwnerThatWasNotRead: nft ends before canaryd can read its process. A
// kube-proxy next to it that started after the table was written is there to remove it, or will
// write it again. An older kube-proxy and other programs prove nothing.
func TestNativeDeletedByAnOwnerThatWasNotRead(t *testing.T) {
	for _, test := range []struct {
		name      string
		neighbour watch.Neighbour
		since     time.Duration // its age at the deletion
		line      string
		owner     bool
	}{
		{"kube-proxy --cleanup", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, time.Second, "", true},
		{"kube-proxy --cleanup, whose nft was read", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, time.Second, "/usr/sbin/nft -f -", true},
		{"a command next to it", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, time.Second, "nft delete table ip kube-proxy", false},
		{"the kube-proxy that wrote it", watch.Neighbour{PID: 4200, Comm: "kube-proxy"}, 2 * time.Hour, "", false},
		{"another owner", watch.Neighbour{PID: 4200, Comm: "dockerd"}, time.Second, "", false},
		{"no process", watch.Neighbour{}, time.Second, "", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(5 * time.Minute)
				k.with(func() {
					k.neighbour, k.unread, k.line = test.neighbour, true, test.line
					k.neighbour.Since = time.Now().Add(-test.since)
				})
				k.deleteTable(proxyTable)
				r.after(time.Minute)
				if !test.owner {
					r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
					r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision)
					return
				}
				r.wantReady()
				if f := r.d.Status().Flushes; len(f) > 0 || k.standing(proxyTable) != nil {
					t.Errorf("%d records, the table is back: %t", len(f), k.standing(proxyTable) != nil)
				}
				r.wantLog("its owner deleted it, likely")
			})
		})
	}
}

// TestNativeDeletedInTurn: kube-proxy deletes its tables of both families in turn, by two
// programs. canaryd cannot read the process of the first or second in time. The other one
// explains both deletions. Until then the node is not healthy. A script's deletions wait for a
// decision.
func TestNativeDeletedInTurn(t *testing.T) {
	proxy6 := tableid.IPv6.Table("kube-proxy")
	type by int
	const (
		owner  by = iota // a kube-proxy that has just started
		unread           // it ended before canaryd could read it
		half             // canaryd read its command line; its parent was gone
		script
		halfScript // as half, with commands on the command line
	)
	for _, test := range []struct {
		name          string
		first, second by
		between       time.Duration
		records       int
	}{
		{"the second one is unread", owner, unread, 300 * time.Millisecond, 0},
		{"the first one is unread", unread, owner, 300 * time.Millisecond, 0},
		{"long after", owner, unread, time.Minute, 1},
		{"long before", unread, owner, time.Minute, 1},
		{"neither is read", unread, unread, 300 * time.Millisecond, 2},
		{"of the second one the parent is unread", owner, half, 300 * time.Millisecond, 0},
		{"of the first one the parent is unread", half, owner, 300 * time.Millisecond, 0},
		{"neither parent is read", half, half, 300 * time.Millisecond, 2},
		{"a script whose end came first", halfScript, halfScript, 300 * time.Millisecond, 2},
		{"such a script after the owner", owner, halfScript, 300 * time.Millisecond, 1},
		{"a script", script, script, 300 * time.Millisecond, 2},
		{"a script after the owner", owner, script, 300 * time.Millisecond, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{guarded: newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(proxy6, "c"))}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(5 * time.Minute)
				remove := func(id tableid.TableID, who by) {
					k.with(func() {
						k.neighbour, k.unread, k.line = watch.Neighbour{}, who != script, ""
						switch who {
						case half:
							k.line = "/usr/sbin/nft -f -"
						case halfScript:
							k.line = "nft delete table " + id.NFT()
						}
						if who == owner {
							k.neighbour = watch.Neighbour{PID: 4200, Comm: "kube-proxy", Since: time.Now().Add(-time.Second)}
						}
					})
					k.deleteTable(id)
				}
				remove(proxyTable, test.first)
				r.after(test.between)
				if test.first != owner {
					r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
				}
				remove(proxy6, test.second)
				r.after(time.Minute)
				waiting := 0
				for _, f := range r.d.Status().Flushes {
					if f.Outcome == api.AwaitingDecision {
						waiting++
					}
					if f.NoticedSeconds > 1 {
						t.Errorf("it was noticed after %v s", f.NoticedSeconds)
					}
				}
				if n := len(r.d.Status().Flushes); n != test.records || waiting != n {
					t.Errorf("%d records, %d wait for a decision; want %d", n, waiting, test.records)
				}
				if ready := r.d.Status().Ready(); (ready == nil) != (test.records == 0) {
					t.Errorf("ready: %v", ready)
				}
			})
		})
	}
}

// TestNativeDeletedByAProcessThatIsNotedLate: on a busy node the loop hears of a deletion
// before its process is noted. The process counts once it is known, and a record names it.
func TestNativeDeletedByAProcessThatIsNotedLate(t *testing.T) {
	for _, test := range []struct {
		parent  string
		records int
	}{{"kube-proxy", 0}, {"sh", 1}} {
		t.Run(test.parent, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				r.after(time.Hour)
				k.with(func() { k.origin, k.late = watch.Origin{Ancestors: []string{test.parent}}, 300*time.Millisecond })
				k.deleteTable(proxyTable)
				r.after(200 * time.Millisecond)
				r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
				r.after(time.Minute)
				records := r.d.Status().Flushes
				if len(records) != test.records {
					t.Errorf("%d records, want %d: %+v", len(records), test.records, records)
				}
				for _, f := range records {
					if len(f.Culprit.Ancestors) != 1 || f.Culprit.Ancestors[0] != test.parent || f.NoticedSeconds > 1 {
						t.Errorf("the record names %+v, and it was noticed after %v s", f.Culprit, f.NoticedSeconds)
					}
				}
				if ready := r.d.Status().Ready(); (ready == nil) != (test.records == 0) {
					t.Errorf("ready: %v", ready)
				}
			})
		})
	}
}

// TestNativeDeletedAfterItWasWrittenAgain: kube-proxy deletes its tables, and writes them
// again. A script deletes them a moment later, and one of its programs ends before canaryd can
// read it. The owner's deletion does not explain the script's, and both tables wait for a
// decision.
func TestNativeDeletedAfterItWasWrittenAgain(t *testing.T) {
	proxy6 := tableid.IPv6.Table("kube-proxy")
	nativeNode(t, setup{guarded: newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(proxy6, "c"))}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(time.Hour)
		owner := watch.Neighbour{PID: 4200, Comm: "kube-proxy", Since: time.Now().Add(-time.Second)}
		k.with(func() { k.neighbour, k.unread = owner, true })
		k.deleteTable(proxyTable)
		k.deleteTable(proxy6)
		r.after(time.Second)
		k.again(tableOf(proxyTable, "a", "b"))
		k.again(tableOf(proxy6, "c"))
		r.after(time.Second)
		r.wantReady()
		k.with(func() { k.neighbour, k.unread = watch.Neighbour{}, false })
		k.deleteTable(proxyTable)
		r.after(100 * time.Millisecond)
		k.with(func() { k.unread = true })
		k.deleteTable(proxy6)
		r.after(time.Minute)
		if n := len(r.d.Status().Flushes); n != 2 {
			t.Errorf("%d records, want 2", n)
		}
		r.wantNotReady("table ip kube-proxy is deleted_by_owner_or_unknown")
	})
}

// TestNativeDeletedInTurnAndHeardLate: during a slow read kube-proxy writes a table, and
// kube-proxy --cleanup deletes both. canaryd hears of all that at once, and takes it for the
// owner's doing.
func TestNativeDeletedInTurnAndHeardLate(t *testing.T) {
	proxy6 := tableid.IPv6.Table("kube-proxy")
	nativeNode(t, setup{guarded: newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(proxy6, "c"), tableOf(dockerTable, "d"))}, func(t *testing.T, r *rig, k *fakeNative) {
		r.after(time.Hour)
		k.with(func() { k.takes = 3 * time.Second })
		k.addRule(dockerTable, "e")
		r.after(captureMost + time.Second)
		k.with(func() { k.unread = true })
		k.addRule(proxy6, "f")
		r.after(100 * time.Millisecond)
		k.with(func() {
			k.neighbour = watch.Neighbour{PID: 4200, Comm: "kube-proxy", Since: time.Now().Add(-20 * time.Millisecond)}
		})
		k.deleteTable(proxyTable)
		r.after(100 * time.Millisecond)
		k.with(func() { k.neighbour = watch.Neighbour{} })
		k.deleteTable(proxy6)
		r.after(time.Minute)
		r.wantReady()
		if f := r.d.Status().Flushes; len(f) != 0 {
			t.Errorf("%d records: %+v", len(f), f)
		}
	})
}
