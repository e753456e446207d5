package nft

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A mirrorTest is a mirror of some tables of family inet, and a connection that
// reads the same from the kernel.
type mirrorTest struct {
	conn  *Conn
	m     *Mirror
	f     *FamilyMirror
	store *RuleStore
}

func newMirrorTest(t *testing.T, budget *Budget[Place]) mirrorTest {
	t.Helper()
	conn, err := Dial()
	if err != nil {
		t.Fatal(err)
	}
	store := NewRuleStore()
	m := NewMirror(conn, MirrorConfig{Genid: conn.Genid, Own: func(uint32, uint32) bool { return false }})
	f := m.Add(FamilyConfig{
		Family: tableid.Inet, Tables: func(name string) bool { return strings.HasPrefix(name, "guarded") },
		Rules: &store, Budget: budget,
	})
	t.Cleanup(func() { m.Close(); conn.Close() })
	return mirrorTest{conn, m, f, &store}
}

// read brings the mirror up to date and returns it in words, and its genid.
func (x mirrorTest) read(t *testing.T) (words map[string][]string, genid uint32) {
	t.Helper()
	done, err := x.m.Turn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	if genid, err = x.m.Read(t.Context(), x.f); err != nil {
		t.Fatal(err)
	}
	words = map[string][]string{}
	for _, table := range x.f.Tables() {
		words[table] = []string{}
		for _, chain := range x.f.Chains(table) {
			c := x.f.Chain(Place{table, chain})
			words[table] = append(words[table], fmt.Sprint(chain, " ", c.Handle, c.Base != nil))
			for i, id := range c.IDs {
				words[table] = append(words[table], fmt.Sprintf("%s %d %x", chain, c.Handles[i], x.store.Rule(id, nil)))
			}
		}
		slices.Sort(words[table])
	}
	return words, genid
}

// kernel returns the same from dumps.
func (x mirrorTest) kernel(t *testing.T) (words map[string][]string, genid uint32) {
	t.Helper()
	genid, err := x.conn.Genid()
	words = map[string][]string{}
	err = errors.Join(err, x.conn.EachTable(func(table Table) error {
		if table.Family == tableid.Inet && strings.HasPrefix(table.Name, "guarded") {
			words[table.Name] = []string{}
		}
		return nil
	}))
	err = errors.Join(err, x.conn.EachChain(tableid.Inet, func(c Chain) error {
		if words[c.Table] != nil {
			words[c.Table] = append(words[c.Table], fmt.Sprint(c.Name, " ", c.Handle, c.Base))
		}
		return nil
	}))
	for table := range words {
		err = errors.Join(err, x.conn.EachRuleIn(tableid.Inet, table, func(m RuleMessage) error {
			words[table] = append(words[table], fmt.Sprintf("%s %d %x", m.Chain, m.Handle, m.Rule))
			return nil
		}))
		slices.Sort(words[table])
	}
	if err != nil {
		t.Fatal(err)
	}
	return words, genid
}

// want fails the test if the mirror differs from the kernel, or has miscounted its rules.
func (x mirrorTest) want(t *testing.T, after string) {
	t.Helper()
	got, at := x.read(t)
	want, genid := x.kernel(t)
	if diff := cmp.Diff(want, got); diff != "" || at != genid {
		t.Fatalf("after %s, at genid %d of %d (-kernel +mirror):\n%s", after, at, genid, diff)
	}
	counted := x.f.kept
	if x.f.trim(); counted != x.f.kept {
		t.Fatalf("after %s: it keeps rules for %d units, and counts %d", after, x.f.kept, counted)
	}
}

// randomChange is one command of nft's for table guarded0, guarded1 or other; it may fail.
func randomChange(r *rand.Rand) string {
	table := []string{"guarded0", "guarded1", "other"}[r.IntN(3)]
	chain := fmt.Sprintf("inet %s c%d", table, r.IntN(6))
	switch r.IntN(17) {
	case 12, 13:
		return fmt.Sprintf("%s rule %s index %d tcp dport %d counter", []string{"add", "insert"}[r.IntN(2)], chain, r.IntN(3), r.IntN(9))
	case 14, 15:
		return fmt.Sprintf("delete rule %s handle %d", chain, 2+r.IntN(60))
	case 16:
		return fmt.Sprintf("replace rule %s handle %d meta mark %d drop", chain, 2+r.IntN(60), r.IntN(4))
	case 0:
		return "add table inet " + table
	case 1:
		return "delete table inet " + table
	case 2:
		return "flush table inet " + table
	case 3:
		return "delete chain " + chain
	case 4:
		return "flush chain " + chain
	case 5:
		return fmt.Sprintf("rename chain %s c%d", chain, r.IntN(6))
	case 6:
		return fmt.Sprintf("add chain %s { type filter hook input priority %d; }", chain, r.IntN(3))
	case 7:
		return fmt.Sprintf("insert rule %s meta mark %d counter accept", chain, r.IntN(4))
	case 8:
		return fmt.Sprintf("add table inet %[1]s; delete table inet %[1]s; add table inet %[1]s; add chain inet %[1]s c%[2]d", table, r.IntN(6))
	default:
		return fmt.Sprintf("add chain %[1]s; add rule %[1]s tcp dport %[2]d counter comment \"r%[3]d\"; add rule %[1]s ct state new", chain, r.IntN(9), r.IntN(3))
	}
}

// follows reports whether the mirror is up to date without a read.
func (x mirrorTest) follows(t *testing.T) bool {
	t.Helper()
	if _, heard, err := x.m.Listen(); err != nil || !heard {
		t.Fatalf("heard all: %t, %v", heard, err)
	}
	return !x.f.stale && !x.f.Dirty()
}

// TestMirrorIsWhatTheKernelHas: after random changes to tables of any family the
// mirror has each chain and rule, by handle and bytes. Few commits make it read.
func TestMirrorIsWhatTheKernelHas(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		x := newMirrorTest(t, nil)
		x.want(t, "nothing")
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		r := rand.New(rand.NewPCG(seed, 0))
		followed, commits := 0, 0
		for range 150 {
			var script []string
			for range 1 + r.IntN(3) {
				script = append(script, randomChange(r))
			}
			text := strings.Join(script, "\n")
			if !strings.Contains(text, "rename") {
				script = []string{text}
			}
			// A transaction that renames a chain and makes a new one of the old
			// name leaves two chains of one name (Linux 6.18). So a rename is a
			// transaction of its own.
			for _, one := range script {
				nstest.CommandInput(t, one, "sh", "-c", "nft -f - 2>/dev/null || true")
			}
			if commits++; x.follows(t) {
				followed++
			}
			x.want(t, text)
		}
		if t.Logf("%d of %d commits were followed", followed, commits); followed < commits/3 {
			t.Error("too few of them: this shows nothing")
		}
	})
}

// TestMirrorAfterAnOverflow: a mirror that missed notifications calls Begun and
// reads everything again.
func TestMirrorAfterAnOverflow(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		x := newMirrorTest(t, nil)
		begun := 0
		x.m.cfg.Begun = func(uint32) { begun++ }
		nstest.Command(t, "nft", "add", "table", "inet", "guarded; add chain inet guarded c")
		x.want(t, "the start")
		if err := x.m.events.conn.SetReadBuffer(1); err != nil { // the kernel's minimum
			t.Fatal(err)
		}
		for i := range 40 {
			nstest.Command(t, "nft", "add", "rule", "inet", "guarded", "c", "tcp", "dport", fmt.Sprint(i+1), "accept")
		}
		x.want(t, "an overflow")
		if begun != 2 {
			t.Errorf("it began %d times, want twice", begun)
		}
	})
}

// TestMirrorTurn: a read waits for its turn as long as its context lasts.
func TestMirrorTurn(t *testing.T) {
	m := NewMirror(nil, MirrorConfig{})
	done, err := m.Turn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Turn(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a second turn: %v", err)
	}
	done()
	if _, err := m.Turn(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestMirrorLeavesOut: the mirror drops rules above the budget, and keeps others.
func TestMirrorLeavesOut(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		x := newMirrorTest(t, NewBudget(10, func(p, q Weighed[Place]) int { return q.Units() - p.Units() }))
		var script strings.Builder
		script.WriteString("add table inet guarded\nadd chain inet guarded small\nadd chain inet guarded large\nadd rule inet guarded small accept\n")
		for i := range 20 {
			fmt.Fprintf(&script, "add rule inet guarded large tcp dport %d accept\n", i+1)
		}
		nstest.CommandInput(t, script.String(), "nft", "-f", "-")
		kept := func(chain string) int {
			x.read(t)
			return len(x.f.Chain(Place{"guarded", chain}).IDs)
		}
		if small, large := kept("small"), kept("large"); small != 1 || large != 0 {
			t.Errorf("it keeps %d and %d rules, want 1 and 0", small, large)
		}
		if raw, found := x.f.RawTable("guarded", 1, nil); !found || raw.Chains.Version("large") != 0 || raw.Chains.Version("small") == 0 {
			t.Errorf("versions of %+v: want none of the chain whose rules are not kept", raw.Chains)
		}
		nstest.Command(t, "nft", "flush", "chain", "inet", "guarded", "large")
		nstest.Command(t, "nft", "add", "rule", "inet", "guarded", "large", "accept")
		if large := kept("large"); large != 1 {
			t.Errorf("of a chain that became small it keeps %d rules, want 1", large)
		}
		x.want(t, "all fits again")
	})
}
