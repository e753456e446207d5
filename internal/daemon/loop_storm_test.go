package daemon

import (
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/watch"
)

// TestFlushesInAStorm: an owner commits 500 times a second. canaryd notices a flush of either
// realm within 5 ms, and the record has that time.
func TestFlushesInAStorm(t *testing.T) {
	const late = 5*time.Millisecond + time.Microsecond // for a float's rounding
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		done := make(chan struct{})
		defer close(done)
		go func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(2 * time.Millisecond):
					r.hints.Give(watch.SourceNFT)
				}
			}
		}()
		r.after(time.Second) // until the immediate looks are used up
		for i, flush := range []func(){r.flushNat, k.flushRuleset, func() { k.flushTable(proxyTable) }, r.flushNat, k.flushRuleset, func() { r.flushBoth(k) }} {
			r.after(time.Second + time.Duration(i)*700*time.Microsecond)
			flushed, before := time.Now(), len(r.d.Status().Flushes)
			flush()
			for len(r.d.Status().Flushes) == before || r.d.Status().Ready() != nil {
				if r.after(time.Millisecond); time.Since(flushed) > time.Minute {
					t.Fatalf("flush %d is not repaired", i)
				}
			}
			record := r.d.Status().Flushes[0]
			noticed := record.Time.Add(time.Duration(record.NoticedSeconds * float64(time.Second)))
			if off, took := record.Time.Sub(flushed), noticed.Sub(flushed); off < -late || off > 0 || took > late {
				t.Errorf("flush %d is dated %s, and was noticed after %s", i, off, took)
			}
		}
	})
}
