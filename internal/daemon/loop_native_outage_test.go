package daemon

import (
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/watch"
)

// The stories of this file were found by TestNativeStories. Owners and flushers write native tables
// between a flush, its replay, and the proof of that.

// as runs do, whose commits are by a child of that program.
func (k *fakeNative) as(program string, do func()) {
	k.with(func() { k.origin.Ancestors = []string{program} })
	do()
	k.with(func() { k.origin.Ancestors = nil })
}

// fromFile runs do, whose commits are by the unit that loads a file of rules.
func (k *fakeNative) fromFile(do func()) {
	k.with(func() { k.origin.Unit = "nftables.service" })
	do()
	k.with(func() { k.origin.Unit = "" })
}

// atOnce runs do while canaryd reads another table, so that it hears of all commits of do at once.
func (r *rig) atOnce(k *fakeNative, do func()) {
	r.t.Helper()
	k.with(func() { k.takes = time.Second })
	k.sync(tableOf(wordTable, "c", "newer"))
	r.after(captureMost)
	do()
	k.with(func() { k.takes = 0 })
	r.settled()
}

// proxyOf returns a kube-proxy with the first services, in a table of its own.
func proxyOf(services int) *nativeOwner {
	o := &nativeOwner{kind: proxies, id: proxyTable, slot: map[int]int{}}
	for i := range services {
		o.slot[i] = i
	}
	return o
}

// proxyNode runs body on a node with such a table of three services, next to a word's.
func proxyNode(t *testing.T, body func(t *testing.T, r *rig, k *fakeNative)) {
	t.Helper()
	nativeNode(t, setup{guarded: newFakeNative(proxyOf(3).wanted(), tableOf(wordTable, "c"))}, body)
}

// TestNativePartLostBeforeTheProof: canaryd makes a deleted table again, so it has another handle.
// A process flushes a part of it before the proof. That is a loss, and not an owner's new table.
func TestNativePartLostBeforeTheProof(t *testing.T) {
	unknown := func(_ *fakeNative, do func()) { do() }
	chain := func(k *fakeNative) { k.flushChain(proxyTable, "services") }
	set := func(k *fakeNative) { k.flushSet(proxyTable, services) }
	other := func(k *fakeNative) {
		e, o := k.edit(proxyTable), proxyOf(3)
		for slot := range o.slot {
			e.take(services, o.element(slot))
		}
		e.put(services, o.element(0))
		must(t, e.commit(k))
	}
	for _, test := range []struct {
		name  string
		by    func(k *fakeNative, do func())
		flush func(k *fakeNative)
	}{
		{"a chain, by an unknown process", unknown, chain},
		{"a chain, by a unit's file", (*fakeNative).fromFile, chain},
		{"a map, by an unknown process", unknown, set},
		{"a map, by a unit's file", (*fakeNative).fromFile, set},
		{"a map but for one element, by an unknown process", unknown, other},
	} {
		t.Run(test.name, func(t *testing.T) {
			proxyNode(t, func(t *testing.T, r *rig, k *fakeNative) {
				k.with(func() { k.between = func() { test.by(k, func() { test.flush(k) }) } })
				k.flushRuleset()
				r.settled()
				k.wantNative(t, proxyOf(3).wanted())
				r.wantReady()
				if n := k.count().heals; n != 2 {
					t.Errorf("%d replays", n)
				}
			})
		})
	}
}

// olderProxy returns the table of three services as an old file has it.
func olderProxy() *native.Table {
	older := proxyOf(3).wanted()
	older.Chains[0].Rules = older.Chains[0].Rules[:1]
	return older
}

// TestNativeRemovedInAnOutage: kube-proxy removes a service while its table is flushed. A flush
// hides that before the replay. The service does not come back.
func TestNativeRemovedInAnOutage(t *testing.T) {
	removes := func(k *fakeNative) {
		k.as("kube-proxy", func() {
			e, o := k.edit(proxyTable), proxyOf(3)
			if len(e.set(services).Elements) > 0 {
				e.take(services, o.element(2))
			}
			e.drop(o.chain(2))
			_ = e.commit(k) // the table that is wanted shows a failure
		})
	}
	table := func(k *fakeNative) { k.flushTable(proxyTable) }
	theMap := func(k *fakeNative) { k.flushSet(proxyTable, services) }
	for _, test := range []struct {
		name  string
		steps []func(k *fakeNative)
	}{
		{"the map before", []func(k *fakeNative){theMap, removes}},
		{"the map after", []func(k *fakeNative){table, removes, theMap}},
		{"the table and the map after", []func(k *fakeNative){table, removes, table, theMap}},
		{"the table after, by a unit's file", []func(k *fakeNative){table, removes, func(k *fakeNative) {
			k.fromFile(func() { k.deleteTable(proxyTable) })
		}}},
		{"the ruleset after, by a unit's file with the service", []func(k *fakeNative){table, removes, func(k *fakeNative) {
			k.fromFile(func() { k.reload(olderProxy()) })
		}}},
		{"the ruleset after", []func(k *fakeNative){table, removes, (*fakeNative).flushRuleset}},
	} {
		for _, atOnce := range []bool{false, true} {
			name := test.name
			if atOnce {
				name += ", heard at once"
			}
			t.Run(name, func(t *testing.T) {
				proxyNode(t, func(t *testing.T, r *rig, k *fakeNative) {
					all := func(pause time.Duration) {
						for _, step := range test.steps {
							step(k)
							time.Sleep(pause)
						}
					}
					if atOnce {
						r.atOnce(k, func() { all(0) })
					} else {
						all(4 * time.Millisecond) // canaryd waits for the flusher
						r.settled()
					}
					k.wantNative(t, proxyOf(2).wanted())
					r.wantReady()
				})
			})
		}
	}
}

// TestNativeMadeAgainUnheard: kube-proxy removes a service in an outage, and canaryd misses that it
// makes the service again. A unit's file with the service follows. The service comes back.
func TestNativeMadeAgainUnheard(t *testing.T) {
	proxyNode(t, func(t *testing.T, r *rig, k *fakeNative) {
		o := proxyOf(3)
		k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
		k.flushTable(proxyTable)
		k.as("kube-proxy", func() {
			e := k.edit(proxyTable)
			e.take(services, o.element(2))
			e.drop(o.chain(2))
			must(t, e.commit(k))
		})
		r.settled()
		r.atOnce(k, func() {
			k.missing(func() {
				e := k.edit(proxyTable)
				e.write(o.service(2, 2))
				e.put(services, o.element(2))
				must(t, e.commit(k))
			})
			k.fromFile(func() { k.reload(olderProxy()) })
		})
		k.with(func() { k.brokenWrites = nil })
		r.after(30 * time.Second)
		k.wantNative(t, o.wanted())
		r.wantReady()
	})
}

// TestNativeMapFlushedBeforeASync: a process flushes kube-proxy's map of services, and kube-proxy
// syncs before the replay. A full sync, which rewrites the base chains, is the whole table:
// services that it lacks are removed. After a partial sync a merge adds the others.
func TestNativeMapFlushedBeforeASync(t *testing.T) {
	for _, test := range []struct {
		name string
		sync func(e *nativeEdit)
		want func() *native.Table
	}{
		{"a full sync with fewer services", func(e *nativeEdit) {
			for _, c := range proxyOf(1).wanted().Chains {
				e.write(c)
			}
			e.put(services, proxyOf(1).element(0))
			e.flush(proxyOf(3).chain(1))
			e.flush(proxyOf(3).chain(2))
		}, func() *native.Table {
			want := proxyOf(1).wanted()
			want.Chains = append(want.Chains, native.Chain{Name: proxyOf(3).chain(1)}, native.Chain{Name: proxyOf(3).chain(2)})
			return want
		}},
		{"a partial sync with one service more", func(e *nativeEdit) {
			e.write(proxyOf(4).service(3, 3))
			e.put(services, proxyOf(4).element(3))
		}, proxyOf(4).wanted},
	} {
		t.Run(test.name, func(t *testing.T) {
			proxyNode(t, func(t *testing.T, r *rig, k *fakeNative) {
				r.atOnce(k, func() {
					k.flushSet(proxyTable, services)
					k.as("kube-proxy", func() {
						e := k.edit(proxyTable)
						test.sync(e)
						must(t, e.commit(k))
					})
				})
				k.wantNative(t, test.want())
				r.wantReady()
			})
		})
	}
}

// TestNativeMissedLossOutlivesAWrite: canaryd misses the flush of a chain, and the kernel has no
// memory for the refill. kube-proxy writes another chain meanwhile. The chain is lost still.
func TestNativeMissedLossOutlivesAWrite(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
		k.missing(func() { k.flushChain(proxyTable, "prerouting") })
		r.settled()
		r.wantNotReady("ip kube-proxy is emptied")
		k.as("kube-proxy", func() { k.addRule(proxyTable, "newer") })
		r.settled()
		r.wantNotReady("ip kube-proxy is emptied")
		k.with(func() { k.brokenWrites = nil })
		r.after(30 * time.Second)
		k.wantNative(t, tableOf(proxyTable, "a", "b", "newer"))
		r.wantReady()
		r.wantOneFlush("emptied", reload.Proved)
	})
}

// TestNativeChangedBetweenReplayAndFlush: canaryd makes a table again. Its owner changes it before
// the proof, and a second flush follows at once. The owner's change returns.
func TestNativeChangedBetweenReplayAndFlush(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		newer := tableOf(proxyTable, "a", "newer")
		k.with(func() {
			k.between = func() {
				k.sync(newer)
				k.flushTable(proxyTable)
			}
		})
		k.flushRuleset()
		r.settled()
		k.wantNative(t, newer)
		r.wantReady()
	})
}

// TestNativeDeletedWhileItIsLost: the kernel has no memory for the refill of a flushed table, and a
// process that could not be read deletes the table. It waits for a decision. The first record does
// not say that its owner wrote it.
func TestNativeDeletedWhileItIsLost(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenWrites = &nft.RefusedError{Errno: syscall.ENOMEM} })
		k.flushTable(proxyTable)
		r.settled()
		r.wantNotReady("ip kube-proxy is emptied")
		k.with(func() {
			k.brokenWrites = nil
			k.onCommit = func(c nft.Commit) {
				r.writers.Note(watch.Writer{Time: time.Now(), Genid: c.Genid, PID: c.PID})
				r.hints.Give(watch.SourceNFT)
			}
		})
		k.deleteTable(proxyTable)
		r.after(30 * time.Second)
		r.wantNotReady("ip kube-proxy is deleted_by_owner_or_unknown")
		var got []string
		for _, f := range r.d.Status().Flushes {
			got = append(got, string(f.Native[0].Kind)+" "+string(f.Outcome))
		}
		if diff := cmp.Diff([]string{"deleted_by_owner_or_unknown waiting: decision", "emptied interrupted"}, got); diff != "" {
			t.Errorf("records (-want +got):\n%s", diff)
		}
	})
}

// TestNativeWrittenWhileItIsJudged: the owner of a table that waits for a decision makes it again
// right
// after a read. canaryd hears of the commit before it judges the read, and reads again.
func TestNativeWrittenWhileItIsJudged(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.dormant(proxyTable, true)
		r.settled()
		r.wantNotReady("ip kube-proxy is disabled")
		k.with(func() { k.after = func() { k.dormant(proxyTable, false) } })
		k.addRule(proxyTable, "newer") // it is read again
		r.settled()
		r.wantReady()
	})
}
