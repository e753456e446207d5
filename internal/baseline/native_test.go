package baseline

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// nativeTable returns a table of chains, each "NAME: rule rule".
func nativeTable(name string, chains ...string) *native.Table {
	t := &native.Table{ID: tableid.Inet.Table(name)}
	for _, line := range chains {
		chain, rules, _ := strings.Cut(line, ": ")
		c := native.Chain{Name: chain}
		for _, r := range strings.Fields(rules) {
			c.Rules = append(c.Rules, native.Rule{Attrs: nft.AppendAttr(nil, unix.NFTA_RULE_USERDATA, r, 0)})
		}
		t.Chains = append(t.Chains, c)
	}
	return t
}

// baselineOf returns a baseline of native tables.
func baselineOf(tables ...*native.Table) reload.Baseline {
	b := reload.Baseline{Native: map[string]map[string][]byte{}}
	for _, t := range tables {
		b.Native[t.ID.NFT()] = Confirm(t)
	}
	return b
}

// TestLostNativeRules: of the rules that a table has lost, those count that the baseline lacks. A
// table that it lacks as a whole counts without chains.
func TestLostNativeRules(t *testing.T) {
	stored := baselineOf(nativeTable("t", "a: 1 2 2", "b: 3"))
	want := nativeTable("t", "a: 1 2 evil 2 2", "b: 3", "c: bad worse")
	other := nativeTable("other", "a: 1 2", "b: 3")
	for _, test := range []struct {
		name      string
		want, now *native.Table
		lacking   []string
	}{
		{"the whole table", want, nil, []string{"a 2", "c 2"}},
		{"confirmed rules", want, nativeTable("t", "a: evil 2", "b: 3", "c: bad worse"), nil},
		{"a new rule", want, nativeTable("t", "a: 1 2 2 2", "b: 3", "c: bad worse"), []string{"a 1"}},
		{"a part of a new chain", want, nativeTable("t", "a: 1 2 evil 2 2", "c: bad"), []string{"c 1"}},
		{"nothing", want, want, nil},
		{"all of a table that was never confirmed", other, nil, []string{" 3"}},
		{"a part of it", other, nativeTable("other", "a: 1"), []string{" 2"}},
	} {
		for _, compared := range []bool{false, true} {
			known := Of(stored, nil)
			if compared {
				known.Compare(1, &Content{Native: map[tableid.TableID]*native.Table{test.want.ID: test.want}})
			}
			var record api.Flush
			lost := flushes.LostTable{Want: test.want, Now: test.now}
			known.AddNative(&record, []flushes.LostTable{lost})
			var got []string
			n := 0
			for _, c := range record.NotInBaseline.Chains {
				got = append(got, fmt.Sprint(c.Chain, " ", c.Rules))
				n += c.Rules
			}
			if d := cmp.Diff(test.lacking, got); d != "" || record.NotInBaseline.Rules != n || known.Base.LacksLost(lost) != n {
				t.Errorf("%s: %d rules, chains (-want +got):\n%s", test.name, record.NotInBaseline.Rules, d)
			}
		}
	}
}

// TestApart: the lines of a preview that a baseline lacks are rules and declarations.
func TestApart(t *testing.T) {
	base := Of(baselineOf(nativeTable("t", "a: 1 2")), nil).Base
	now := nativeTable("t", "a: 1 evil 2", "b: bad")
	now.Sets = []native.Set{{Name: "evil", Elements: []native.Element{{1}}}}
	_, lines := native.Difference(nil, now)
	lacking, others, rules := base.Apart(now, lines)
	if len(lacking) != 3 || rules != 2 || len(lacking)+len(others) != len(lines) {
		t.Errorf("%d rules are lacking: %v, the others are %v", rules, lacking, others)
	}
	for _, l := range others {
		if l.Kind == nft.Sets || strings.Contains(l.Text, "0x"+fmt.Sprintf("%x", "evil")) {
			t.Errorf("not marked: %v", l)
		}
	}
	if lacking, others, _ := (*Base)(nil).Apart(now, lines); len(lacking) != 0 || len(others) != len(lines) {
		t.Errorf("without a baseline %v are lacking", lacking)
	}
}
