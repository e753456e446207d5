package native_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestJudgeOfATableThatWasTooLarge: canaryd knows only its name and handle, and its deeds. It
// judges it like a table that it has read, calls no unknown process the owner, and has no remedy.
func TestJudgeOfATableThatWasTooLarge(t *testing.T) {
	id := tableid.Inet.Table("large")
	table := func(handle uint64, rules ...int) *native.Table {
		now := &native.Table{ID: id, Handle: handle, Chains: []native.Chain{{Name: "base", Base: true}, {Name: "other"}}, Sets: []native.Set{{Name: "addresses"}}}
		for i, n := range rules {
			now.Chains[i].Rules = make([]native.Rule, n)
		}
		return now
	}
	took := func(by native.Committer, rules ...int) *native.Deed {
		d := &native.Deed{By: by, Rules: map[string]int{}}
		for i, n := range rules {
			d.Rules[[]string{"base", "other"}[i]] = n
		}
		return d
	}
	elements := func(by native.Committer) *native.Deed {
		return &native.Deed{By: by, Elements: map[string]int{"addresses": 9}}
	}
	wrote := func(by native.Committer) *native.Deed { return &native.Deed{By: by, New: 1} }
	named := took(native.Shell, 5)
	named.ByName = true
	known := owners.HabitsOf(tableid.IPv4.Table("kube-proxy"))
	for _, test := range []struct {
		name  string
		now   *native.Table
		deeds []*native.Deed
		used  map[string]bool // of a probe
		knows bool            // the owner
		want  native.Verdict
		lost  string // parts
		says  string
	}{
		{"the ruleset was flushed", nil, []*native.Deed{{Deleted: true, WitnessLost: true}}, nil, false, native.TableDeleted, "", "the witness"},
		{"a unit of another owner deleted it", nil, []*native.Deed{{Deleted: true, By: native.NotOwner}}, nil, false, native.TableDeleted, "", "not its owner"},
		{"it was deleted alone", nil, []*native.Deed{{Deleted: true}}, nil, false, native.Unattributed, "", "deleted alone"},
		{"its owner deleted it", nil, []*native.Deed{{Deleted: true, By: native.Owner}}, nil, false, native.Changed, "", "its owner"},
		{"a flusher made it again", table(2), []*native.Deed{{Deleted: true, Made: 2, WitnessLost: true}}, nil, false, native.Replaced, "", "flusher"},
		{"its owner made it again", table(2), []*native.Deed{{Deleted: true, Made: 2, By: native.Owner}}, nil, false, native.Changed, "", "its owner made it again"},
		{"an unknown process made it again", table(2), []*native.Deed{{Deleted: true, Made: 2}}, nil, false, native.Changed, "", "a process that may be its owner made it again"},
		{"another process emptied a set", table(1), []*native.Deed{elements(native.NotOwner)}, nil, false, native.Emptied, "set addresses: 9 elements lost, empty", "a commit took"},
		{"its owner emptied a set", table(1), []*native.Deed{elements(native.Owner)}, nil, false, native.Changed, "", "small enough"},
		{"an unknown process emptied a set", table(1), []*native.Deed{elements(native.UnknownCommitter)}, nil, false, native.Changed, "", "small enough"},
		{"another process emptied a set, an unknown one wrote", table(1), []*native.Deed{elements(native.NotOwner), wrote(native.UnknownCommitter)}, nil, false,
			native.Emptied, "set addresses: 9 elements lost, empty", "a commit took"},
		{"an unknown process flushed the table", table(1), []*native.Deed{took(native.UnknownCommitter, 2, 3)}, nil, false,
			native.Emptied, "chain base: 2 rules lost, empty", "a commit took the rules of chain base"},
		{"an unknown process took the last rule", table(1), []*native.Deed{took(native.UnknownCommitter, 1)}, nil, false, native.Changed, "", "small enough"},
		{"an unknown process emptied a chain of several", table(1, 0, 4), []*native.Deed{took(native.UnknownCommitter, 5)}, nil, false,
			native.Emptied, "chain base: 5 rules lost, empty", ""},
		{"an unknown process took a part of a chain", table(1, 1, 4), []*native.Deed{took(native.UnknownCommitter, 5)}, nil, false, native.Changed, "", ""},
		{"a person removed rules by name", table(1, 0, 4), []*native.Deed{named}, nil, false, native.Changed, "", ""},
		{"its owner took the rules after a flusher", table(1, 0, 4), []*native.Deed{took(native.NotOwner, 5), took(native.Owner, 1)}, nil, false, native.Changed, "", ""},
		{"a probe: something leads to the empty chain", table(1, 3, 0), []*native.Deed{took(native.NotOwner, 0, 5)}, map[string]bool{"other": true}, false,
			native.Emptied, "chain other: 5 rules lost, empty", ""},
		{"a probe: nothing leads to the empty chain", table(1, 3, 0), []*native.Deed{took(native.NotOwner, 0, 5)}, map[string]bool{}, false, native.Changed, "", ""},
		{"a shell emptied a known owner's chain", table(1, 0, 3), []*native.Deed{took(native.Shell, 5)}, nil, true, native.Emptied, "chain base: 5 rules lost, empty", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := native.Evidence{Was: &native.Table{ID: id, Handle: 1}, Now: test.now, Deeds: test.deeds, Used: test.used, Unread: true, Habits: owners.HabitsOf(id)}
			if test.knows {
				e.Habits = known
			}
			f := native.Judge(e)
			if f.Verdict != test.want || f.Remedy != native.NoRemedy || !strings.Contains(f.Why, test.says) {
				t.Errorf("%+v, want %s without a remedy, as %q", f, test.want, test.says)
			}
			if lost := test.want != native.Changed; lost != strings.Contains(f.Why, "cannot put it back") {
				t.Errorf("it says %q", f.Why)
			}
			if test.want != native.Emptied {
				return
			}
			var parts []string
			for _, c := range f.Changes {
				parts = append(parts, c.String())
			}
			if got := strings.Join(parts, "; "); got != test.lost {
				t.Errorf("lost are %q, want %q", got, test.lost)
			}
			back := table(1, 1, 1)
			back.Sets[0].Elements = make([]native.Element, 1)
			if !f.Lasts(test.now) || f.Lasts(back) {
				t.Errorf("it lasts: %t, and when all is back: %t", f.Lasts(test.now), f.Lasts(back))
			}
		})
	}
}

// TestLossesOfUnprobedParts: a table lost rules and a counter before it became too large. Probes
// show rules only, so the loss ends with these. A later loss of another part is added once.
func TestLossesOfUnprobedParts(t *testing.T) {
	base := native.Change{Kind: nft.Chains, Name: "base", Empty: true, Lost: 2}
	f := native.Finding{Verdict: native.Emptied, Changes: []native.Change{base, {Kind: nft.Objects, Name: "hits", Gone: true, Lost: 1}}}
	now := &native.Table{Chains: []native.Chain{{Name: "base"}}}
	if parts := native.Parts(nil, f); len(parts) != 1 || parts[0].Name != "base" {
		t.Errorf("probed are %v", parts)
	}
	if !f.Lasts(now) {
		t.Error("it does not last without rules")
	}
	now.Chains[0].Rules = make([]native.Rule, 1)
	if f.Lasts(now) {
		t.Error("it lasts with rules")
	}
	set := native.Change{Kind: nft.Sets, Name: "base", Empty: true, Lost: 9}
	both := f.And(native.Finding{Verdict: native.Emptied, Changes: []native.Change{base, set}})
	if diff := cmp.Diff(append(slices.Clone(f.Changes), set), both.Changes); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(f, f.And(native.Finding{Verdict: native.Changed, Changes: []native.Change{set}})); diff != "" {
		t.Errorf("a change is no loss (-want +got)\n%s", diff)
	}
}

// TestProbe: canaryd looks at parts of a table of 200,000 elements, and reads few of them. It
// sees which are empty, and which have gone.
func TestProbe(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		const text = `table inet large {
			set empty { type ipv4_addr; }
			map verdicts { type ipv4_addr : verdict; elements = { 10.0.0.1 : jump mapped }; }
			chain mapped { }
			chain jumped { }
			chain alone { accept; }
			chain lonely { }
			chain base { type filter hook input priority 0; ip saddr @addresses drop; ip saddr vmap @verdicts; jump jumped; }
		}
`
		nstest.CommandInput(t, withSet("large", "small")+text+addresses("large", 0, 200_000), "nft", "-f", "-")
		k, id := openLimited(t, 1000), tableid.Inet.Table("large")
		var asked []native.Change
		for _, name := range []string{"alone", "base", "gone", "jumped", "lonely", "mapped"} {
			asked = append(asked, native.Change{Kind: nft.Chains, Name: name, Lost: 1})
		}
		for _, name := range []string{"addresses", "empty", "gone"} {
			asked = append(asked, native.Change{Kind: nft.Sets, Name: name, Lost: 1})
		}
		look := func() string {
			var g native.Probe
			took := allocated(func() {
				var err error
				g, err = k.Probe(id, native.Parts(nil, native.Finding{Changes: asked}))
				if err != nil {
					t.Fatal(err)
				}
			})
			if genid, err := k.Genid(); err != nil || g.Genid != genid {
				t.Errorf("it is of genid %d, not %d, %v", g.Genid, genid, err)
			}
			if took > 1<<20 {
				t.Errorf("it allocates %d KiB", took>>10)
			}
			if g.Table == nil {
				return "no table"
			}
			var all []string
			for _, c := range g.Table.Chains {
				if c.Name == "" {
					c.Name = "any rule"
				}
				all = append(all, fmt.Sprintf("%s %t %t %t", c.Name, c.Base, g.Used[c.Name], len(c.Rules) > 0))
			}
			for _, s := range g.Table.Sets {
				all = append(all, fmt.Sprintf("%s %t", s.Name, len(s.Elements) > 0))
			}
			slices.Sort(all)
			return strings.Join(all, ", ")
		}
		want := func(what string) {
			t.Helper()
			if diff := cmp.Diff(what, look()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		}
		want("addresses true, alone false true true, any rule false false true, base true true true, empty false, jumped false true false, lonely false false false, mapped false true false")
		nstest.Command(t, "nft", "flush chain inet large base")
		want("addresses true, alone false true true, any rule false false true, base true false false, empty false, jumped false false false, lonely false false false, mapped false true false")
		nstest.Command(t, "nft", "flush table inet large")
		want("addresses true, alone false false false, base true false false, empty false, jumped false false false, lonely false false false, mapped false true false")
		nstest.Command(t, "nft", "add rule inet large c accept") // a chain that is not asked for
		want("addresses true, alone false false false, any rule false false true, base true false false, empty false, jumped false false false, lonely false false false, mapped false true false")
		nstest.Command(t, "nft", "flush set inet large addresses")
		want("addresses false, alone false false false, any rule false false true, base true false false, empty false, jumped false false false, lonely false false false, mapped false true false")
		nstest.Command(t, "nft", "delete table inet large")
		want("no table")
	})
}

// TestAFlushOfAPartOfALargeTable: a process flushes parts of a table that is too large before and
// after. Its deeds and a probe show the loss, and when it is over.
func TestAFlushOfAPartOfALargeTable(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		const base = "table inet large { chain base { type filter hook input priority 0; ip saddr @addresses drop; tcp dport 22 accept; }; }\n"
		nstest.CommandInput(t, withSet("large")+base+addresses("large", 0, 20_000), "nft", "-f", "-")
		k, id := openLimited(t, 1000), tableid.Inet.Table("large")
		if r, err := k.Follow(everything); err != nil || len(r.LeftOut) != 1 {
			t.Fatalf("%+v, %v", r, err)
		}
		judge := func(was native.Finding) native.Finding {
			t.Helper()
			genid, err := k.Genid()
			if err != nil {
				t.Fatal(err)
			}
			commits, missed, err := k.Hear(genid)
			if err != nil || missed {
				t.Fatalf("missed: %t, %v", missed, err)
			}
			var deeds []*native.Deed
			for _, c := range commits {
				deeds = append(deeds, c.Deeds[id])
			}
			g, err := k.Probe(id, native.Parts(deeds, was))
			if err != nil || g.Genid != genid {
				t.Fatalf("a probe of genid %d at %d, %v", g.Genid, genid, err)
			}
			if was.Lasts(g.Table) {
				return was
			}
			return native.Judge(native.Evidence{Was: &native.Table{ID: id}, Now: g.Table, Used: g.Used, Deeds: deeds, Unread: true, Habits: owners.HabitsOf(id)})
		}
		steps := []struct {
			command string
			want    native.Verdict
			lost    []native.Change
		}{
			{"delete element inet large addresses { 10.0.0.1 }", native.Changed, nil},
			{"flush table inet large", native.Emptied, []native.Change{{Kind: nft.Chains, Name: "base", Empty: true, Lost: 2}}},
			{"add element inet large addresses { 11.0.0.1 }", native.Emptied, []native.Change{{Kind: nft.Chains, Name: "base", Empty: true, Lost: 2}}},
			{"add rule inet large base tcp dport 22 accept", native.Changed, nil},
		}
		var f native.Finding
		for _, step := range steps {
			nstest.Command(t, "nft", step.command)
			f = judge(f)
			if diff := cmp.Diff(step.lost, f.Changes); f.Verdict != step.want || len(step.lost) > 0 && diff != "" {
				t.Errorf("after %s: %+v, want %s (-want +got)\n%s", step.command, f, step.want, diff)
			}
		}
	})
}
