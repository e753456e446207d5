package reload

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/savefile"
	"github.com/canaryd/canaryd/pkg/rules"
)

// wholeAlways is a size below which everything is written complete, as before there were bases.
const wholeAlways = 1 << 40

// manyServices are kube-proxy's rules of 5,000 services, for both families.
func manyServices(t testing.TB) rules.Generation {
	t.Helper()
	text := testkit.Unpacked(t, "../../hack/bench/heal/testdata/services-5000.rules.gz")
	set := savefile.Tables(t, text)
	g := rules.Generation{}
	for name, table := range set {
		section := rules.Protection{Chain: func(chain string) bool { return strings.HasPrefix(chain, "KUBE-") }}.Extract(table, func(rules.Rule) bool { return false })
		g = g.With(v4.Table(name), section).With(v6.Table(name), section)
	}
	if n, _ := g.Counts(); n < 90000 {
		t.Fatalf("%d rules of 5,000 services", n)
	}
	return g
}

// endpoint returns g with another rule in the n-th chain of nat.
func endpoint(g rules.Generation, n int) rules.Generation { return endpoints(g, n, 1) }

// endpoints returns g with another rule in so many chains of nat, beginning at the n-th.
func endpoints(g rules.Generation, n, chains int) rules.Generation {
	s := g[v4.Table(rules.Nat)]
	s.Chains = slices.Clone(s.Chains)
	for ; chains > 0; chains-- {
		c := &s.Chains[7*n%len(s.Chains)]
		c.Rules = append(slices.Clone(c.Rules), rules.Rule{
			Spec: fmt.Sprintf(`-s 10.1.%d.%d/32 -m comment --comment "ns/svc-%d:http" -j KUBE-MARK-MASQ`, n/250%250, n%250, n), Target: "KUBE-MARK-MASQ",
		})
		n++
	}
	return g.With(v4.Table(rules.Nat), s)
}

// A meter counts the bytes of the files that are written to a store's folder.
type meter struct {
	s      *Store
	before map[string]os.FileInfo
}

func (m *meter) written(t testing.TB) int64 {
	t.Helper()
	entries, err := os.ReadDir(m.s.folder())
	if err != nil {
		t.Fatal(err)
	}
	now, n := map[string]os.FileInfo{}, int64(0)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		now[e.Name()] = info
		if old := m.before[e.Name()]; old == nil || !os.SameFile(old, info) || !old.ModTime().Equal(info.ModTime()) {
			n += info.Size()
		}
	}
	m.before = now
	return n
}

// TestAMinuteOfChanges: 20 changes a second for a minute at 5,000 services, saved each second. A
// save writes little more than its change. A restart loads the last generation as it was.
func TestAMinuteOfChanges(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	g := manyServices(t)
	must(t, s.saveGeneration(g, "snapshot", noon))
	disk := meter{s: s}
	whole := disk.written(t)
	must(t, s.saveGeneration(endpoint(g, 7000), "snapshot", noon))
	if n := disk.written(t); n > 16<<10 {
		t.Errorf("a change of one chain: %d bytes are written", n)
	}
	total := int64(0)
	seconds := testkit.Size(8, 60)
	for second := range seconds {
		g = endpoints(g, 20*second, 20)
		must(t, s.saveGeneration(g, "snapshot", noon))
		wrote := disk.written(t)
		total += wrote
		if wrote > whole/20 && second < 10 {
			t.Errorf("second %d: %d bytes are written, of %d", second, wrote, whole)
		}
	}
	t.Logf("whole: %d kB; %d saves: %d kB", whole/1000, seconds, total/1000)
	if total*60 > 2*whole*int64(max(seconds, 30)) {
		t.Errorf("%d saves wrote %d bytes, a whole generation has %d", seconds, total, whole)
	}
	stored, err := openStore(t, s.dir, here).Load(g.ID())
	must(t, err)
	exactly(t, g, stored.Generation)
}

// TestAGenerationThatComesBack: a pod becomes ready, unready and ready again. The generation of the
// base returns, and the base is not written again.
func TestAGenerationThatComesBack(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	s.wholeBelow = 0
	ready := manyChains(t, 200)
	must(t, s.Save(Stored{Generation: ready, Made: MadeAtStart, Captured: noon}))
	disk := meter{s: s}
	whole := disk.written(t)
	for n := range 20 {
		g := ready
		if n%2 == 0 {
			g = endpoint(ready, 5)
		}
		later := noon.Add(time.Duration(n) * time.Second)
		must(t, s.Save(Stored{Generation: g, Made: MadeByOwners, Captured: later}))
		if wrote := disk.written(t); wrote > whole/20 {
			t.Errorf("change %d: %d bytes are written, of %d", n, wrote, whole)
		}
		stored, err := s.Load(g.ID())
		must(t, err)
		if stored.Made != MadeByOwners || !stored.Captured.Equal(later) {
			t.Errorf("it is from %s, made by %s", stored.Captured, stored.Made)
		}
	}
}

// BenchmarkSave saves a change of one chain at 5,000 services.
func BenchmarkSave(b *testing.B) {
	first := manyServices(b)
	for way, small := range map[string]int64{"whole": wholeAlways, "different": wholeBelow} {
		b.Run(way, func(b *testing.B) {
			s, err := OpenStore(b.TempDir(), here)
			if err != nil {
				b.Fatal(err)
			}
			s.wholeBelow = small
			if err := s.saveGeneration(first, "snapshot", noon); err != nil {
				b.Fatal(err)
			}
			disk, n, wrote := meter{s: s}, 0, int64(0)
			disk.written(b)
			b.ReportAllocs()
			for b.Loop() {
				n++
				if err := s.saveGeneration(endpoint(first, n), "snapshot", noon); err != nil {
					b.Fatal(err)
				}
				wrote += disk.written(b)
			}
			b.ReportMetric(float64(wrote)/float64(n), "disk-B/op")
		})
	}
}
