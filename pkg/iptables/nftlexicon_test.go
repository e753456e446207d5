package iptables

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/nft/nfttest"
	"github.com/canaryd/canaryd/pkg/rules"
)

func jump(chain string) nfttest.Encode {
	return nfttest.Expression("immediate", func(ae *netlink.AttributeEncoder) error {
		ae.Nested(unix.NFTA_IMMEDIATE_DATA, func(ae *netlink.AttributeEncoder) error {
			ae.Nested(unix.NFTA_DATA_VERDICT, func(ae *netlink.AttributeEncoder) error {
				ae.Int32(unix.NFTA_VERDICT_CODE, unix.NFT_JUMP)
				ae.String(unix.NFTA_VERDICT_CHAIN, chain)
				return nil
			})
			return nil
		})
		return nil
	})
}

func rawOf(t testing.TB, userdata []byte, expressions ...nfttest.Encode) nft.Rule {
	t.Helper()
	return mustParseRaw(t, nfttest.RuleMessage(t, userdata, expressions...)).Rule
}

func mustIntern(t testing.TB, l *lexicon, raw nft.Rule) nft.RuleID {
	t.Helper()
	id, err := l.Intern(raw)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// text returns what the lexicon knows of one rule.
func (l *lexicon) text(id nft.RuleID) (rules.Rule, bool) {
	found, ok := l.texts([]nft.RuleID{id})
	if !ok {
		return rules.Rule{}, false
	}
	return found[0], true
}

var rawContent = cmp.AllowUnexported(nft.Rule{})

func TestLexiconLearns(t *testing.T) {
	l := newLexicon(rules.IPv4)
	raw := rawOf(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo("hi")), nfttest.Counter(3, 4), jump("X"))
	rule := rules.Rule{Spec: "-m comment --comment hi -j X", Target: "X"}
	id := mustIntern(t, l, raw)
	if got, ok := l.text(id); ok {
		t.Errorf("it knows the text %v, which nobody told", got)
	}
	for _, wrong := range []rules.Rule{
		{Spec: "-m comment --comment hi -j Y", Target: "Y"},
		{Spec: "-m comment --comment ho -j X", Target: "X"},
		{Spec: "-j X", Target: "X"},
	} {
		if err := l.learn(id, wrong); !errors.Is(err, errPair) {
			t.Errorf("it takes %v: %v", wrong, err)
		}
	}
	if err := l.learn(id, rule); err != nil {
		t.Fatal(err)
	}
	if got, ok := l.text(mustIntern(t, l, raw)); !ok || got != rule {
		t.Errorf("text is %v, %t", got, ok)
	}
	got, ok := l.raw(rule, nil)
	if diff := cmp.Diff(raw, got, rawContent); diff != "" || !ok {
		t.Errorf("raw, %t (-want +got):\n%s", ok, diff)
	}
	if got, ok := l.raw(rules.Rule{Spec: "-j X", Target: "X"}, nil); ok {
		t.Errorf("it knows %v", got)
	}
	// The same bytes with user data, even with none in it, are another rule.
	for _, userdata := range [][]byte{{}, {1}, {0, 1}} {
		other := rawOf(t, userdata, nfttest.XTMatch("comment", nfttest.CommentInfo("hi")), nfttest.Counter(3, 4), jump("X"))
		if mustIntern(t, l, other) == id {
			t.Errorf("user data %v makes no difference", userdata)
		}
		if diff := cmp.Diff(other, l.store.Rule(mustIntern(t, l, other), nil), rawContent); diff != "" {
			t.Errorf("built again (-want +got):\n%s", diff)
		}
	}
}

// What has an index, and what was printed in two ways, is never answered.
func TestLexiconDoubts(t *testing.T) {
	l := newLexicon(rules.IPv4)
	indexed := mustIntern(t, l, rawOf(t, nil, nfttest.XTMatch("set", []byte{1, 0, 0, 0}), nfttest.Counter(0, 0), jump("X")))
	double := mustIntern(t, l, rawOf(t, nil, nfttest.Counter(0, 0), jump("X")))
	for _, c := range []struct {
		id    nft.RuleID
		specs []string
	}{
		{indexed, []string{"-m set --match-set a src -j X"}},
		{double, []string{"-j X", "-p all -j X"}},
	} {
		for _, spec := range c.specs {
			if err := l.learn(c.id, rules.Rule{Spec: spec, Target: "X"}); err != nil {
				t.Error(err)
			}
		}
		if got, ok := l.text(c.id); ok {
			t.Errorf("it answers %v", got)
		}
		for _, spec := range c.specs {
			if _, ok := l.raw(rules.Rule{Spec: spec}, nil); ok {
				t.Errorf("it answers %q", spec)
			}
		}
	}
}

func TestLexiconForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLexicon(rules.IPv4)
		raws := map[string]nft.Rule{}
		var held, gone []nft.RuleID
		for i := range 3 * fewEntries {
			raw := rawOf(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo(fmt.Sprint("c", i))), nfttest.Counter(0, 0), jump("X"))
			spec := fmt.Sprintf("-m comment --comment c%d -j X", i)
			id := mustIntern(t, l, raw)
			if err := l.learn(id, rules.Rule{Spec: spec, Target: "X"}); err != nil {
				t.Fatal(err)
			}
			if i%3 == 0 {
				held, raws[spec] = append(held, id), raw
			} else {
				gone = append(gone, id)
			}
		}
		if !l.crowded() {
			t.Error("it is not crowded")
		}
		time.Sleep(remember / 2)
		l.Release(gone[:1], false)
		time.Sleep(remember/2 + 2*time.Second)
		kept, _ := l.text(gone[0])
		raws[kept.Spec] = l.store.Rule(gone[0], nil)
		l.forget([]*[]nft.RuleID{&held})
		if got, want := len(l.entries), 1+len(held)+1; got != want {
			t.Errorf("%d entries are left, want %d", got, want)
		}
		if l.crowded() {
			t.Error("it is crowded still")
		}
		for spec, raw := range raws {
			got, ok := l.raw(rules.Rule{Spec: spec}, nil)
			if diff := cmp.Diff(raw, got, rawContent); diff != "" || !ok {
				t.Fatalf("%s, %t (-want +got):\n%s", spec, ok, diff)
			}
		}
		for i, id := range held {
			if got, ok := l.text(id); !ok || got.Spec != fmt.Sprintf("-m comment --comment c%d -j X", 3*i) {
				t.Fatalf("rule %d is called %v, %t", 3*i, got, ok)
			}
		}
	})
}

// A mark as we write it down is the mark as iptables writes it.
func TestLexiconKnowsMarks(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft")
		conn, err := nft.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		const spec = `-m comment --comment "canaryd-witness-0123456789abcdef"`
		nstest.CommandInput(t, "*nat\n:X - [0:0]\n-A X "+spec+"\nCOMMIT\n", "iptables-nft-restore", "--noflush")
		l := newLexicon(rules.IPv4)
		var found []rules.Rule
		if err := conn.EachRule(rules.IPv4, rules.Nat, "X", func(m nft.RuleMessage) error {
			rule, ok := l.text(mustIntern(t, l, m.Rule))
			if ok {
				found = append(found, rule)
			}
			made, _ := l.raw(rules.Rule{Spec: spec}, nil)
			if diff := cmp.Diff(m.Rule, made, rawContent); diff != "" {
				t.Errorf("as in the kernel and as made (-kernel +made):\n%s", diff)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]rules.Rule{{Spec: spec}}, found); diff != "" {
			t.Errorf("rules (-want +got):\n%s", diff)
		}
	})
	for _, spec := range []string{
		`-m comment --comment "canaryd-x" -j X`, `-m comment --comment "canaryd-\"x"`, `-m comment --comment "other"`, `-m comment --comment canaryd-x`,
	} {
		if _, ok := newLexicon(rules.IPv4).raw(rules.Rule{Spec: spec}, nil); ok {
			t.Errorf("%s counts as a mark", spec)
		}
	}
}

func FuzzLexicon(f *testing.F) {
	f.Add(nfttest.RuleMessage(f, []byte{0, 3, 'h', 'i', 0}, nfttest.XTMatch("comment", nfttest.CommentInfo("canaryd-x")), nfttest.Counter(1, 2), jump("X")), "-j X", "X")
	f.Fuzz(func(t *testing.T, data []byte, spec, target string) {
		m, err := nft.ParseRule(data)
		if err != nil {
			return
		}
		l := newLexicon(rules.IPv4)
		id, err := l.intern(m.Rule)
		if err != nil {
			return
		}
		_ = l.learn(id, rules.Rule{Spec: spec, Target: target}) // must not panic
		again, err := l.intern(l.store.Rule(id, nil))
		if err != nil || again != id {
			t.Errorf("built again it is rule %d, not %d: %v", again, id, err)
		}
	})
}
