package reload

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

// manyChains returns so many chains of three rules in nat of both families, with every field of a
// section.
func manyChains(t *testing.T, n int) rules.Generation {
	t.Helper()
	lines := []string{"-A OUTPUT -j KUBE-SERVICES", ":KUBE-SERVICES - [0:0]"}
	for i := range n {
		lines = append(lines, fmt.Sprintf(":KUBE-SVC-%04d - [0:0]", i), fmt.Sprintf("-A KUBE-SERVICES -d 10.0.%d.%d/32 -j KUBE-SVC-%04d", i/250, i%250, i))
		for k := range 3 {
			lines = append(lines, fmt.Sprintf(`-A KUBE-SVC-%04d -s 10.%d.%d.%d/32 -m comment --comment "a <b> & \"c\" %d" -j RETURN`, i, k, i/250, i%250, i))
		}
	}
	s := sectionOf(t, rules.Nat, lines...)
	s.Alone, s.DependsOn, s.Policies = []string{"OUTPUT"}, []string{"corp"}, map[string]string{"OUTPUT": "ACCEPT"}
	return rules.Generation{v4.Table(rules.Nat): s, v6.Table(rules.Nat): s}
}

// exactly fails unless both generations are the same in every field.
func exactly(t *testing.T, want, got rules.Generation) {
	t.Helper()
	plain := cmp.Transformer("Section", func(s rules.Section) plainSection { return plainSection(s) })
	if d := cmp.Diff(want, got, plain, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("generation (-want +got):\n%.2000s", d)
	}
}

func spec(text string) rules.Rule {
	r, err := rules.ParseRule(text)
	if err != nil {
		panic(err)
	}
	return r
}

// bases returns the names of the bases on disk.
func (s *Store) bases(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.folder(), "*"+baseSuffix))
	must(t, err)
	for i, f := range files {
		files[i] = strings.TrimSuffix(filepath.Base(f), baseSuffix)
	}
	return files
}

// TestDifferences: a generation changes. The loaded one equals the saved one, field by field.
func TestDifferences(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*rules.Section)
		other  bool // too much differs: it has a base of its own
	}{
		{name: "a rule more", change: func(s *rules.Section) { s.Chains[7].Rules = append(s.Chains[7].Rules, spec("-j RETURN")) }},
		{name: "a rule more in front", change: func(s *rules.Section) { s.Chains[7].Rules = slices.Insert(s.Chains[7].Rules, 0, spec("-j RETURN")) }},
		{name: "a rule less", change: func(s *rules.Section) { s.Chains[7].Rules = slices.Delete(s.Chains[7].Rules, 1, 2) }},
		{name: "no rule", change: func(s *rules.Section) { s.Chains[7].Rules = nil }},
		{name: "a rule twice", change: func(s *rules.Section) {
			s.Chains[7].Rules = append(s.Chains[7].Rules, s.Chains[7].Rules[0], s.Chains[7].Rules[0])
		}},
		{name: "rules in another order", change: func(s *rules.Section) { slices.Reverse(s.Chains[0].Rules) }},
		{name: "a rule in another spelling", change: func(s *rules.Section) {
			s.Chains[7].Rules[0] = spec(strings.Replace(s.Chains[7].Rules[0].Spec, "-m comment", "-m  comment", 1))
		}},
		{name: "a service more", change: func(s *rules.Section) {
			s.Chains[0].Rules = slices.Insert(s.Chains[0].Rules, 50, spec("-d 10.9.9.9/32 -j KUBE-SVC-A"))
			s.Chains = slices.Insert(s.Chains, 50, rules.Chain{Name: "KUBE-SVC-A", Rules: []rules.Rule{spec("-j RETURN")}})
		}},
		{name: "a service less", change: func(s *rules.Section) {
			s.Chains[0].Rules = slices.Delete(s.Chains[0].Rules, 50, 51)
			s.Chains = slices.Delete(s.Chains, 51, 52)
		}},
		{name: "another name", change: func(s *rules.Section) { s.Chains[7].Name = "KUBE-SVC-A" }},
		{name: "an empty chain", change: func(s *rules.Section) { s.Chains = append(s.Chains, rules.Chain{Name: "KUBE-SVC-A"}) }},
		{name: "chains in another order", change: func(s *rules.Section) {
			slices.Reverse(s.Chains)
			s.Chains[7].Rules = nil
		}},
		{name: "a policy of a chain", change: func(s *rules.Section) {
			s.Chains[7].Policy, s.Chains[8].Rules = "DROP", nil
		}},
		{name: "a jump more", change: func(s *rules.Section) {
			s.Jumps = append(s.Jumps, rules.Jump{Chain: "PREROUTING", Rule: spec("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Behind, Neighbour: spec("-j corp")}})
		}},
		{name: "a jump in front", change: func(s *rules.Section) {
			s.Jumps = slices.Insert(s.Jumps, 0, rules.Jump{Chain: "PREROUTING", Rule: spec("-j KUBE-SERVICES"), Anchor: rules.Anchor{Position: rules.Top}})
		}},
		{name: "a jump elsewhere", change: func(s *rules.Section) {
			s.Jumps[0].Anchor = rules.Anchor{Position: rules.Behind, Neighbour: spec("-j corp")}
		}},
		{name: "a jump less", change: func(s *rules.Section) { s.Jumps = nil }},
		{name: "what is no rule", change: func(s *rules.Section) {
			s.Alone, s.DependsOn, s.Policies = nil, []string{"other"}, map[string]string{"OUTPUT": "DROP"}
			s.Jumps = slices.Clone(s.Jumps)
			s.Jumps[0].Named, s.Chains[7].Rules = true, nil
		}},
		{name: "a third of the chains", other: true, change: func(s *rules.Section) {
			for i := range 70 {
				s.Chains[i].Rules = []rules.Rule{spec(`-m comment --comment "` + strings.Repeat("x", 400) + `" -j RETURN`)}
			}
		}},
		{name: "next to nothing is left", other: true, change: func(s *rules.Section) {
			s.Chains = s.Chains[:3]
			s.Chains[0].Rules = s.Chains[0].Rules[:2]
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := openStore(t, t.TempDir(), here)
			s.wholeBelow = 0
			before := manyChains(t, 100)
			delete(before, v6.Table(rules.Nat))
			must(t, s.saveGeneration(before, "snapshot", noon))
			base := s.bases(t)
			section := manyChains(t, 100)[v4.Table(rules.Nat)]
			test.change(&section)
			after := rules.Generation{v4.Table(rules.Nat): section}
			must(t, s.saveGeneration(after, "snapshot", noon))
			must(t, s.SaveState(testState()))
			if d := cmp.Diff(base, s.bases(t)); (d != "") != test.other {
				t.Errorf("bases (-before +now):\n%s", d)
			}
			s = openStore(t, s.dir, here)
			_, stored, err := s.LoadState()
			must(t, err)
			exactly(t, after, stored.Generation)
			stored, err = s.Load(before.ID())
			must(t, err)
			exactly(t, before, stored.Generation)
		})
	}
}

// TestTablesThatComeAndGo: a generation has tables that the base lacks, or lacks a family of the
// base's.
func TestTablesThatComeAndGo(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	s.wholeBelow = 0
	g := manyChains(t, 100)
	must(t, s.saveGeneration(g, "snapshot", noon))
	base := s.bases(t)
	small := sectionOf(t, rules.Filter, ":KUBE-FORWARD - [0:0]", "-A KUBE-FORWARD -j ACCEPT", "-A FORWARD -j KUBE-FORWARD")
	for name, next := range map[string]rules.Generation{
		"a table more": g.With(v4.Table(rules.Filter), small), "a table that holds nothing": g.With(v4.Table(rules.Mangle), rules.Section{}),
		"a family less": {v4.Table(rules.Nat): g[v4.Table(rules.Nat)]},
	} {
		must(t, s.saveGeneration(next, "snapshot", noon))
		stored, err := openStore(t, s.dir, here).Load(next.ID())
		must(t, err)
		t.Log(name)
		exactly(t, next, stored.Generation)
	}
	if d := cmp.Diff(base, s.bases(t)); d != "" {
		t.Errorf("bases (-before +now):\n%s", d)
	}
}

// TestManyJumps: a node has a jump for each pod, and a change of one pod does not write all of
// them.
func TestManyJumps(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	g := manyChains(t, 300)
	section := g[v4.Table(rules.Nat)]
	for i := range 500 {
		section.Jumps = append(section.Jumps, rules.Jump{Chain: "POSTROUTING", Rule: spec(fmt.Sprintf("-s 10.1.%d.%d/32 -j KUBE-SVC-%04d", i/250, i%250, i%300)), Anchor: rules.Anchor{Position: rules.Bottom}})
	}
	must(t, s.saveGeneration(g.With(v4.Table(rules.Nat), section), "snapshot", noon))
	section.Jumps = slices.Delete(slices.Clone(section.Jumps), 200, 201)
	g = g.With(v4.Table(rules.Nat), section)
	must(t, s.saveGeneration(g, "snapshot", noon))
	if n := len(must1(os.ReadFile(s.path(g.ID())))); n > 1000 {
		t.Errorf("%d bytes are written", n)
	}
	stored, err := openStore(t, s.dir, here).Load(g.ID())
	must(t, err)
	exactly(t, g, stored.Generation)
}

// TestPieces: any list is the sum of its pieces, and no element of the base is in two of them.
func TestPieces(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		list := func() []uint64 {
			l := make([]uint64, random.IntN(12))
			for i := range l {
				l[i] = random.Uint64N(8)
			}
			return l
		}
		from, now := list(), list()
		if random.IntN(2) == 0 && len(from) > 0 { // most elements are unchanged
			now = slices.Clone(from)
			now[random.IntN(len(now))] = 9
		}
		cut := pieces(from, now, func(i int) uint64 { return now[i] })
		got, err := expand(cut, from, func(n uint64) (uint64, error) { return n, nil })
		must(t, err)
		if !slices.Equal(got, now) {
			t.Fatalf("%v on %v became %v", now, from, got)
		}
		for _, p := range cut {
			if p.made == nil {
				continue
			}
			if have, want := count(from, *p.made), count(now, *p.made); have >= want {
				t.Fatalf("%v on %v: %d is written, and stands there", now, from, *p.made)
			}
		}
	}
}

func count(list []uint64, n uint64) int {
	return len(slices.DeleteFunc(slices.Clone(list), func(o uint64) bool { return o != n }))
}

// TestEqualRulesWithoutEnd: a process that may write rules cannot make canaryd compare each with
// each.
func TestEqualRulesWithoutEnd(t *testing.T) {
	const many = 300_000
	from, now := make([]uint64, many), make([]uint64, 2*many)
	now[0] = 1
	if cut := pieces(from, now, func(i int) uint64 { return now[i] }); len(cut) != many+1 {
		t.Errorf("%d pieces", len(cut))
	}
}

// TestTheFirstChangeAfterARestartIsSmall: the loaded base stays in use.
func TestTheFirstChangeAfterARestartIsSmall(t *testing.T) {
	s := openStore(t, t.TempDir(), here)
	s.wholeBelow = 0
	g := manyChains(t, 100)
	must(t, s.saveGeneration(g, "snapshot", noon))
	must(t, s.SaveState(testState()))
	base := s.bases(t)
	for n := range 3 {
		s = openStore(t, s.dir, here)
		s.wholeBelow = 0
		_, stored, err := s.LoadState()
		must(t, err)
		s.Resume(stored.ID)
		g = endpoint(g, n)
		must(t, s.saveGeneration(g, "snapshot", noon))
		must(t, s.SaveState(testState()))
		if d := cmp.Diff(base, s.bases(t)); d != "" {
			t.Errorf("bases after restart %d (-before +now):\n%s", n, d)
		}
		_, stored, err = openStore(t, s.dir, here).LoadState()
		must(t, err)
		exactly(t, g, stored.Generation)
	}
}

// TestABaseThatVanished: a base is removed or cut off. Later generations are stored on another
// base.
func TestABaseThatVanished(t *testing.T) {
	for name, harm := range map[string]func(path string) error{
		"removed": os.Remove,
		"cut":     func(path string) error { return os.Truncate(path, 100) },
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, t.TempDir(), here)
			s.wholeBelow = 0
			g := manyChains(t, 100)
			must(t, s.saveGeneration(g, "snapshot", noon))
			must(t, harm(s.basePath(s.bases(t)[0])))
			next := endpoint(g, 1)
			must(t, s.saveGeneration(next, "snapshot", noon))
			stored, err := openStore(t, s.dir, here).Load(next.ID())
			must(t, err)
			exactly(t, next, stored.Generation)
		})
	}
}
