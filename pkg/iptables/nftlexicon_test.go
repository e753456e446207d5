package iptables

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strings"
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

// commented returns a match comment as iptables-nft writes it.
func commented(text string) nft.Expression {
	return xtOf("match", "comment", 0, nfttest.CommentInfo(text))
}

// counting0 and goes are a counter and a jump as the kernel returns them.
var counting0 = nft.Expression{Name: "counter", Data: slices.Concat(
	nft.AppendAttr(nil, unix.NFTA_COUNTER_BYTES, make([]byte, 8), 0), nft.AppendAttr(nil, unix.NFTA_COUNTER_PACKETS, make([]byte, 8), 0))}

func goes(chain string) nft.Expression {
	verdict := nft.AppendAttr(nil, unix.NFTA_VERDICT_CODE, binary.BigEndian.AppendUint32(nil, 0xfffffffd), 0) // NFT_JUMP
	verdict = nft.AppendAttr(verdict, unix.NFTA_VERDICT_CHAIN, chain, 1)
	data := nft.AppendAttr(nil, unix.NFTA_IMMEDIATE_DREG, make([]byte, 4), 0)
	return nft.Expression{Name: "immediate", Data: nft.AppendAttr(data, unix.NFTA_IMMEDIATE_DATA, nft.AppendAttr(nil, unix.NFTA_DATA_VERDICT, verdict, 0), 0)}
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

// text returns one rule as a value.
func (l *lexicon) text(id nft.RuleID) rules.Rule { return l.texts([]nft.RuleID{id}, nil)[0] }

var rawContent = cmp.AllowUnexported(nft.Rule{})

// The lexicon has words for a rule that it can spell, and its bytes for these
// words.
func TestLexiconSpells(t *testing.T) {
	l := newLexicon(rules.IPv4, false, nil)
	raw := nft.Rule{Expressions: exprs(commented("hi"), counting0, goes("X"))}
	rule := rules.Rule{Spec: "-m comment --comment hi -j X", Target: "X"}
	if got := l.text(mustIntern(t, l, raw)); got != rule {
		t.Errorf("the rule is %v", got)
	}
	if err := l.name(raw, rules.Rule{Spec: "-j Y -m comment --comment hi", Target: "Y"}); err != nil || l.text(mustIntern(t, l, raw)) != rule {
		t.Errorf("another text takes the place of its words: %v", err)
	}
	for _, spec := range []string{rule.Spec, "-j Y -m comment --comment hi"} {
		got, ok := l.raw(rules.Rule{Spec: spec}, nil)
		if diff := cmp.Diff(raw, got, rawContent); diff != "" || !ok {
			t.Errorf("raw of %s, %t (-want +got):\n%s", spec, ok, diff)
		}
	}
	if got, ok := l.raw(rules.Rule{Spec: "-j X", Target: "X"}, nil); ok {
		t.Errorf("it knows %v", got)
	}
	// The same bytes with user data, even empty user data, are another rule.
	id := mustIntern(t, l, raw)
	for _, userdata := range [][]byte{{}, {1}, {0, 1}} {
		other := nft.Rule{Expressions: raw.Expressions, Userdata: userdata}
		if mustIntern(t, l, other) == id {
			t.Errorf("user data %v makes no difference", userdata)
		}
		if diff := cmp.Diff(other, l.store.Rule(mustIntern(t, l, other), nil), rawContent); diff != "" {
			t.Errorf("built again (-want +got):\n%s", diff)
		}
	}
}

// A rule that cannot be spelled is opaque: it has its bytes and a label. Once
// iptables-restore has made the same bytes from a text, the rule has that text.
func TestLexiconKeepsBytes(t *testing.T) {
	l := newLexicon(rules.IPv4, false, nil)
	raw := nft.Rule{Expressions: exprs(commented("hi"), xtOf("match", "unheardof", 0, []byte{1, 2, 3, 4}), counting0, goes("X"))}
	id := mustIntern(t, l, raw)
	rule := l.text(id)
	label := regexp.MustCompile(`^-m comment --comment hi -m unheardof \[[0-9a-f]{8}\] -j X$`)
	if !label.MatchString(rule.Label()) || rule.Target != "X" || !rule.HasBytes() {
		t.Errorf("the rule is %v with the label %q", rule, rule.Label())
	}
	got, ok := l.raw(rule, nil)
	if diff := cmp.Diff(raw, got, rawContent); diff != "" || !ok {
		t.Errorf("raw, %t (-want +got):\n%s", ok, diff)
	}
	named := rules.Rule{Spec: "-m comment --comment hi -m unheardof --of 1 -j X", Target: "X"}
	if err := l.name(raw, named); err != nil || l.text(id) != named {
		t.Errorf("it is %v: %v", l.text(id), err)
	}
	for _, r := range []rules.Rule{rule, named} {
		got, ok := l.raw(r, nil)
		if diff := cmp.Diff(raw, got, rawContent); diff != "" || !ok || l.text(id) != named {
			t.Errorf("raw of %v, %t (-want +got):\n%s", r, ok, diff)
		}
	}
}

// An earlier version saved an opaque rule. It is read with the words that its
// bytes have now. Once its text is known, it has that text, too.
func TestAnOpaqueRuleIsReadAnew(t *testing.T) {
	l := newLexicon(rules.IPv4, false, nil)
	held := func(e ...nft.Expression) rules.Rule {
		return rules.OpaqueBytes(exprs(e...), nil, "X", "an earlier version had no words")
	}
	spelled, odd := held(commented("hi"), counting0, goes("X")), held(xtOf("match", "unheardof", 0, []byte{1, 2, 3, 4}), counting0, goes("X"))
	words := rules.Rule{Spec: "-m comment --comment hi -j X", Target: "X"}
	if got, shown := Reread(rules.IPv4, spelled), l.shown(spelled); got != words || shown != words {
		t.Errorf("it is read as %v and shown as %v", got, shown)
	}
	if got := l.shown(odd); got != odd {
		t.Errorf("without a text it is shown as %v", got)
	}
	if got := Reread(rules.IPv4, odd); !got.HasBytes() || !strings.HasSuffix(got.Label(), "] -j X") {
		t.Errorf("its label is %q", got.Label())
	}
	raw, _ := heldBytes(odd)
	named := rules.Rule{Spec: "-m unheardof --of 1 -j X", Target: "X"}
	if err := l.name(raw, named); err != nil || l.shown(odd) != named {
		t.Errorf("with a text it is shown as %v: %v", l.shown(odd), err)
	}
	for _, r := range []rules.Rule{words, rules.OpaqueRule([]byte("x"), "X", "no bytes")} {
		if got, shown := Reread(rules.IPv4, r), l.shown(r); got != r || shown != r {
			t.Errorf("%v is read as %v and shown as %v", r, got, shown)
		}
	}
}

// A rule that contains a number of the kernel's is opaque and has no bytes.
func TestLexiconKeepsNoNumbers(t *testing.T) {
	for name, e := range map[string]nfttest.Encode{
		"ipset's match": nfttest.XTMatch("set", make([]byte, 8)), "ipset's target": nfttest.XTTarget("SET"), "a set of nft's": nfttest.Expression("lookup", nil),
		"a map of nft's": nfttest.Expression("objref", nil), "a meter of nft's": nfttest.Expression("dynset", nil),
	} {
		l := newLexicon(rules.IPv4, false, nil)
		rule := l.text(mustIntern(t, l, rawOf(t, nil, e, nfttest.Counter(0, 0), jump("X"))))
		if _, opaque := rule.Opaque(); !opaque || rule.HasBytes() || !strings.Contains(rule.Spec, errNotPortable.Error()) {
			t.Errorf("%s: %v", name, rule)
		}
		if _, ok := l.raw(rule, nil); ok {
			t.Errorf("%s has bytes", name)
		}
	}
}

func TestLexiconForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLexicon(rules.IPv4, false, nil)
		raws := map[string]nft.Rule{}
		var held, gone []nft.RuleID
		for i := range 3 * fewEntries {
			raw := nft.Rule{Expressions: exprs(commented(fmt.Sprint("c", i)), counting0, goes("X"))}
			spec := fmt.Sprintf("-m comment --comment c%d -j X", i)
			id := mustIntern(t, l, raw)
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
		raws[l.text(gone[0]).Spec] = l.store.Rule(gone[0], nil)
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
			if got := l.text(id); got.Spec != fmt.Sprintf("-m comment --comment c%d -j X", 3*i) {
				t.Fatalf("rule %d is called %v", 3*i, got)
			}
		}
	})
}

// canaryd writes a mark with the same bytes as iptables.
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
		l := newLexicon(rules.IPv4, false, nil)
		var found []rules.Rule
		if err := conn.EachRule(rules.IPv4, rules.Nat, "X", func(m nft.RuleMessage) error {
			found = append(found, l.text(mustIntern(t, l, m.Rule)))
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
		if _, ok := newLexicon(rules.IPv4, false, nil).raw(rules.Rule{Spec: spec}, nil); ok {
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
		l := newLexicon(rules.IPv4, false, nil)
		id, err := l.intern(m.Rule)
		if err != nil {
			return
		}
		_ = l.name(m.Rule, rules.Rule{Spec: spec, Target: target}) // must not panic
		again, err := l.intern(l.store.Rule(id, nil))
		if err != nil || again != id {
			t.Errorf("built again it is rule %d, not %d: %v", again, id, err)
		}
	})
}
