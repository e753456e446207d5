//go:build measure

package baseline

import (
	"encoding/json"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMeasureNative prints the time of comparisons of kube-proxy's native table, and the memory of
// its baseline. NATIVE_TEXT names a file like that of 100 services.
func TestMeasureNative(t *testing.T) {
	path := os.Getenv("NATIVE_TEXT")
	if path == "" {
		path = "../../hack/bench/heal/testdata/services-100.nft.gz"
	}
	text := testkit.Unpacked(t, path)
	nstest.Run(t, func(t *testing.T) {
		nstest.CommandInput(t, text, "nft", "-f", "-")
		conn, err := nft.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		seen, err := native.Capture(conn, func(nft.Table) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		timed := func(do func()) time.Duration {
			start := time.Now()
			do()
			return time.Since(start).Round(10 * time.Microsecond)
		}
		heap := func() uint64 {
			runtime.GC()
			runtime.GC() // pools keep memory for one more
			var memory runtime.MemStats
			runtime.ReadMemStats(&memory)
			return memory.HeapAlloc >> 10
		}
		table := seen.Tables[tableid.IPv4.Table("kube-proxy")]
		b := reload.Baseline{Native: map[string]map[string][]byte{}}
		confirms := timed(func() { b.Native[table.ID.NFT()] = Confirm(table) })
		disk, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		before := heap()
		var read reload.Baseline
		if err := json.Unmarshal(disk, &read); err != nil {
			t.Fatal(err)
		}
		base := newBase(&read)
		read = reload.Baseline{}
		now := &Content{Native: map[tableid.TableID]*native.Table{table.ID: table}}
		first := timed(func() { base.since(now) })
		again := timed(func() { base.since(now) })
		t.Logf("MEASURE confirm %v; compare %v, again %v; %d KB on disk, %d KB of heap", confirms, first, again, len(disk)>>10, heap()-before)
		runtime.KeepAlive(base)
		runtime.KeepAlive(b)
		runtime.KeepAlive(disk)
		runtime.KeepAlive(seen)
	})
}
