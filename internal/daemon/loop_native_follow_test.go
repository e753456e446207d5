package daemon

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestNativeRemovedRightBefore: an owner removes and writes rules right before a flush. canaryd
// restores the written rules, and not the removed ones.
func TestNativeRemovedRightBefore(t *testing.T) {
	// remove takes one rule and writes nothing, as an owner may; that looks like a flush.
	remove := func(k *fakeNative, left ...string) {
		k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
			next := *tableOf(proxyTable, left...)
			next.Handle = k.tables[proxyTable].Handle
			k.tables[proxyTable] = &next
			deed(proxyTable).Rules = map[string]int{"services": 1}
		})
	}
	for _, test := range []struct {
		name, kind string
		do         func(k *fakeNative)
		want       []string
	}{
		{"a change, flush ruleset", "table_deleted", func(k *fakeNative) { k.sync(tableOf(proxyTable, "a", "c")); k.flushRuleset() }, []string{"a", "c"}},
		{"a change, flush table", "emptied", func(k *fakeNative) { k.sync(tableOf(proxyTable, "c")); k.flushTable(proxyTable) }, []string{"c"}},
		{"a removal, flush ruleset", "table_deleted", func(k *fakeNative) { remove(k, "b"); k.flushRuleset() }, []string{"b"}},
		{"a removal, flush table", "emptied", func(k *fakeNative) { remove(k, "b"); k.flushTable(proxyTable) }, []string{"b"}},
		{"a removal, a change, flush table, flush ruleset", "table_deleted", func(k *fakeNative) {
			remove(k, "b")
			k.sync(tableOf(proxyTable, "b", "d"))
			k.flushTable(proxyTable)
			k.flushRuleset()
		}, []string{"b", "d"}},
		{"made again, a change, flush ruleset", "table_deleted", func(k *fakeNative) {
			k.again(tableOf(proxyTable, "x"))
			k.sync(tableOf(proxyTable, "x", "y"))
			k.flushRuleset()
		}, []string{"x", "y"}},
		{"flush table, a change of what is left, flush ruleset", "table_deleted", func(k *fakeNative) {
			k.flushTable(proxyTable)
			left := tableOf(proxyTable, "c")
			left.Chains[0].Rules = nil
			k.sync(left)
			k.flushRuleset()
		}, []string{"a", "b"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(k)
				r.settled()
				k.wantNative(t, tableOf(proxyTable, test.want...))
				r.wantReady()
				r.wantOneFlush(test.kind, reload.Proved)
			})
		})
	}
}

// TestNativeFollowed: canaryd reads a table once. Then it follows the notifications of owners
// and flushes, and reads only for a replay and its proof.
func TestNativeFollowed(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		reads := k.count().captures
		for range 50 {
			k.sync(tableOf(proxyTable, "a", "c"))
			r.after(30 * time.Millisecond)
			k.sync(tableOf(proxyTable, "a", "b"))
			r.after(70 * time.Millisecond)
		}
		if n := k.count().captures - reads; n != 0 {
			t.Errorf("%d reads for changes of an owner", n)
		}
		k.flushRuleset()
		r.settled()
		r.wantReady()
		if n := k.count().captures - reads; n != 2 {
			t.Errorf("%d reads for a flush, want that under guard and the proof", n)
		}
	})
}

// TestNativePackets: canaryd reads elements that packets add from time to time, without a
// commit. It restores them after a flush, but not expired ones.
func TestNativePackets(t *testing.T) {
	with := func(elements ...string) *native.Table {
		table := tableOf(proxyTable, "a", "b")
		seen := native.Set{Name: "affinity", Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT}
		for _, e := range elements {
			seen.Elements = append(seen.Elements, native.Element(e))
		}
		table.Sets = []native.Set{seen}
		return table
	}
	k := newFakeNative(with("one"))
	nativeNode(t, setup{guarded: k}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() {
			next := *with("two", "three")
			next.Handle = k.tables[proxyTable].Handle
			k.tables[proxyTable] = &next
		})
		r.after(3 * time.Second)
		if n := len(r.d.Status().Flushes); n != 0 {
			t.Errorf("%d flushes for what packets did", n)
		}
		k.flushRuleset()
		r.settled()
		r.wantReady()
		var got []string
		for _, e := range k.standing(proxyTable).Sets[0].Elements {
			got = append(got, string(e))
		}
		if len(got) != 2 || got[0] != "two" {
			t.Errorf("after a flush the set has %q, want two and three", got)
		}
		var before, after int
		k.with(func() { before = k.refreshes })
		r.after(time.Minute)
		k.with(func() { after = k.refreshes })
		if n := after - before; n < 20 || n > 31 {
			t.Errorf("%d reads of such sets in a minute", n)
		}
	})
}

// TestNativeWarOnOne: a process flushes one table ten times a second. Replays are limited, the
// other table keeps its owner's writes, and in the end both are as their owners left them.
func TestNativeWarOnOne(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		for n := range 300 {
			if k.flushTable(proxyTable); n%50 == 7 {
				k.sync(tableOf(dockerTable, "c", "d"))
			}
			r.after(100 * time.Millisecond)
		}
		if n := k.count().heals; n < 10 || n > 40 {
			t.Errorf("%d replays in half a minute of flushes", n)
		}
		r.after(20 * time.Second)
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, tableOf(dockerTable, "c", "d"))
		r.wantReady()
		for _, f := range r.d.Status().Flushes {
			for _, lost := range f.Native {
				if lost.Table == dockerTable.NFT() {
					t.Errorf("the other table is in a record: %+v", f)
				}
			}
		}
	})
}

// TestNativeFalseFlushes: some deeds of owners look like a flush, and are not taken for one.
func TestNativeFalseFlushes(t *testing.T) {
	renamed := proxyTable.Family.Table("renamed")
	for _, test := range []struct {
		name  string
		do    func(r *rig, k *fakeNative)
		ready bool
		want  map[tableid.TableID]*native.Table
	}{
		{"made again", func(_ *rig, k *fakeNative) { k.again(tableOf(proxyTable, "z")) }, true,
			map[tableid.TableID]*native.Table{proxyTable: tableOf(proxyTable, "z")}},
		{"made again ten times", func(r *rig, k *fakeNative) {
			for range 10 {
				k.again(tableOf(proxyTable, "z"))
				r.after(5 * time.Millisecond)
			}
		}, true, map[tableid.TableID]*native.Table{proxyTable: tableOf(proxyTable, "z")}},
		{"dormant and back", func(_ *rig, k *fakeNative) { k.dormant(proxyTable, true); k.dormant(proxyTable, false) }, true,
			map[tableid.TableID]*native.Table{proxyTable: tableOf(proxyTable, "a", "b")}},
		{"renamed: deleted and made under another name", func(_ *rig, k *fakeNative) {
			k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
				deed(proxyTable).Deleted = true
				delete(k.tables, proxyTable)
				k.put(tableOf(renamed, "a", "b"))
				deed(renamed).Made = k.handle
			})
		}, false, map[tableid.TableID]*native.Table{renamed: tableOf(renamed, "a", "b")}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(r, k)
				r.settled()
				if k.count().heals != 0 {
					t.Errorf("%d replays", k.count().heals)
				}
				for _, want := range test.want {
					k.wantNative(t, want)
				}
				if test.ready {
					r.wantReady()
				} else if f := r.wantOneFlush("deleted_by_owner_or_unknown", api.AwaitingDecision); k.standing(proxyTable) != nil {
					t.Errorf("the old name is back: %+v", f)
				}
			})
		})
	}
}
