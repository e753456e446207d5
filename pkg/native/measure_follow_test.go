//go:build measure

package native_test

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMeasureFollow prints two processor times: to learn that the endpoints of one service changed,
// and to read the whole table. NATIVE_TEXT names a file such as
// hack/bench/heal/testdata/services-100.nft.gz.
func TestMeasureFollow(t *testing.T) {
	path := os.Getenv("NATIVE_TEXT")
	if path == "" {
		path = services100
	}
	text := services(t, path)
	chains := regexp.MustCompile(`chain (service-\S+/tcp/\S+) \{\n\t\tmeta l4proto tcp dnat ip to numgen`).FindAllStringSubmatch(text, -1)
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, text, "nft", "-f", "-")
		k := openKernel(t)
		runtime.LockOSThread()
		id := tableid.IPv4.Table("kube-proxy")
		follow := func() (*native.Ruleset, time.Duration) {
			start := processor(t)
			r, err := k.Follow(everything)
			if err != nil {
				t.Fatal(err)
			}
			return r, processor(t) - start
		}
		r, dump := follow()
		digest := r.Digest(id)
		if r, _ = follow(); !r.Followed(id) {
			t.Fatal("it is not followed")
		}
		was := r.Tables[id]
		var all, follows, judges []time.Duration
		for i := range 60 {
			nstest.CommandInput(t, fmt.Sprintf(`flush chain ip kube-proxy %[1]s
				add rule ip kube-proxy %[1]s meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.9.0.%[2]d . 80, 1 : 10.9.1.%[2]d . 80 }
				add element ip kube-proxy cluster-ips { 10.77.0.%[2]d }
				`, chains[i%len(chains)][1], i), "nft", "-f", "-")
			r, took := follow()
			if !r.Followed(id) {
				t.Fatal("it is not followed")
			}
			start := processor(t)
			f := native.Judge(native.Evidence{Was: was, Now: r.Tables[id], Deeds: []*native.Deed{{New: 2, Rules: map[string]int{"c": 1}}}, Habits: owners.HabitsOf(id)})
			judged := processor(t) - start
			if was = r.Tables[id]; f.Verdict != native.Changed || len(f.Changes) != 2 || r.Digest(id) == digest {
				t.Fatalf("judged %+v", f)
			}
			digest = r.Digest(id)
			all, follows, judges = append(all, took+judged), append(follows, took), append(judges, judged)
		}
		for _, list := range [][]time.Duration{all, follows, judges} {
			slices.Sort(list)
		}
		runtime.GC()
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		t.Logf("MEASURE read %v; one service: %v (%v to %v; follow %v, judge %v); heap %d MiB", dump, all[30], all[0], all[59], follows[30], judges[30], memory.HeapAlloc>>20)
		runtime.KeepAlive(k)
	})
}
