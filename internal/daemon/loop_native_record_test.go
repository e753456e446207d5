package daemon

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/reload"
)

// TestNativeRecordBeginsWithTheFirstLoss: reads fail for 10 s. A process flushes a table at their
// beginning, and another table at their end, while canaryd stalls. One record has both. It begins
// with the first flush, and the tables were not last in force after that.
func TestNativeRecordBeginsWithTheFirstLoss(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.with(func() { k.brokenReads = errNativeBroken })
		first := time.Now()
		k.flushTable(proxyTable)
		r.after(9 * time.Second)
		k.with(func() { k.takes = 4 * time.Second })
		r.after(2 * time.Second) // the next read has begun
		k.flushTable(dockerTable)
		k.with(func() { k.takes = 0 })
		r.after(4 * time.Second) // it has failed, and canaryd has heard of the flush
		k.with(func() { k.brokenReads = nil })
		r.after(4 * time.Second)
		f := r.wantOneFlush("emptied", reload.Proved)
		if len(f.Native) != 2 || !f.Time.Equal(first) || f.LastInForce.After(f.Time) || f.NoticedSeconds < 10 {
			t.Errorf("%d tables, from %s after the first flush, last in force %s, noticed after %v s", len(f.Native), f.Time.Sub(first), f.LastInForce, f.NoticedSeconds)
		}
		r.wantReady()
	})
}

// TestNativeTakers: a record names the process that took a table's parts. It does not name a
// process that made the table again before that, or that wrote after the read that found the loss.
func TestNativeTakers(t *testing.T) {
	const owner, flusher = 100, 200
	for _, test := range []struct {
		name string
		do   func(r *rig, k *fakeNative, by func(pid uint32, do func()))
		want string
	}{
		{"made again, then emptied", func(r *rig, k *fakeNative, by func(uint32, func())) {
			r.atOnce(k, func() {
				k.miss()
				by(owner, func() { k.again(tableOf(dockerTable, "newer")) })
				by(flusher, func() { k.flushTable(dockerTable) })
			})
		}, "emptied by [200]"},
		{"made again, then dormant", func(r *rig, k *fakeNative, by func(uint32, func())) {
			r.atOnce(k, func() {
				k.miss()
				by(owner, func() { k.again(tableOf(dockerTable, "newer")) })
				by(flusher, func() { k.dormant(dockerTable, true) })
			})
		}, "disabled by [200]"},
		{"replaced from a file", func(_ *rig, k *fakeNative, by func(uint32, func())) {
			by(flusher, func() { k.reload(tableOf(dockerTable, "old")) })
		}, "replaced by [200]"},
		{"emptied, and a rule is removed right after the read", func(r *rig, k *fakeNative, by func(uint32, func())) {
			by(flusher, func() { k.flushChain(dockerTable, "prerouting") })
			r.after(10 * time.Millisecond) // canaryd waits for the flusher, and then reads
			k.with(func() { k.after = func() { by(owner, func() { k.removeRule(dockerTable) }) } })
		}, "emptied by [200]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			guarded := newFakeNative(tableOf(proxyTable, "a", "b"), tableOf(dockerTable, "c", "d"), tableOf(wordTable, "c"))
			nativeNode(t, setup{guarded: guarded}, func(t *testing.T, r *rig, k *fakeNative) {
				test.do(r, k, func(pid uint32, do func()) {
					k.with(func() { k.pid = pid })
					do()
					k.with(func() { k.pid = 0 })
				})
				r.settled()
				var got []string
				for _, f := range r.d.Status().Flushes {
					for _, loss := range f.Native {
						if loss.Table == dockerTable.NFT() {
							got = append(got, fmt.Sprintf("%s by %v", loss.Kind, loss.By))
						}
					}
				}
				if d := cmp.Diff([]string{test.want}, got); d != "" {
					t.Errorf("the losses of the records (-want +got):\n%s", d)
				}
			})
		})
	}
}
