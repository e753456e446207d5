package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/nft/nfttest"
	"github.com/canaryd/canaryd/pkg/rules"
)

func mustParseRaw(t testing.TB, data []byte) nft.RuleMessage {
	t.Helper()
	m, err := nft.ParseRule(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMeaningOf(t *testing.T) {
	counter := nfttest.Expression("counter", nil)
	udata := func(kind byte, text string) []byte { return append([]byte{kind, byte(len(text))}, text...) }
	for _, c := range []struct {
		name string
		data []byte
		want ruleMeaning
	}{
		{"empty", nfttest.RuleMessage(t, nil), ruleMeaning{}},
		{"comment", nfttest.RuleMessage(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo("hi there")), counter), ruleMeaning{comment: "hi there", hasComment: true}},
		{"comment without NUL", nfttest.RuleMessage(t, nil, nfttest.XTMatch("comment", []byte("hi"))), ruleMeaning{comment: "hi", hasComment: true}},
		{"empty comment", nfttest.RuleMessage(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo(""))), ruleMeaning{hasComment: true}},
		{"another match", nfttest.RuleMessage(t, nil, nfttest.XTMatch("limit", nfttest.CommentInfo("x"))), ruleMeaning{}},
		{"verdict", nfttest.RuleMessage(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo("hi")), counter, nfttest.Expression("immediate", nil)),
			ruleMeaning{comment: "hi", hasComment: true, target: true}},
		{"xt target", nfttest.RuleMessage(t, nil, counter, nfttest.Expression("target", nil)), ruleMeaning{target: true}},
		{"meta match", nfttest.RuleMessage(t, nil, nfttest.Meta(unix.NFTA_META_DREG), nfttest.Expression("cmp", nil), counter), ruleMeaning{}},
		{"meta set", nfttest.RuleMessage(t, nil, counter, nfttest.Meta(unix.NFTA_META_SREG)), ruleMeaning{target: true}},
		{"unknown expression", nfttest.RuleMessage(t, nil, nfttest.Expression("synproxy", nil)), ruleMeaning{target: true}},
		{"userdata", nfttest.RuleMessage(t, udata(0, "native\x00"), counter), ruleMeaning{comment: "native", hasComment: true}},
		{"userdata behind another", nfttest.RuleMessage(t, append(udata(1, "xxxx"), udata(0, "native\x00")...)), ruleMeaning{comment: "native", hasComment: true}},
		{"userdata cut off", nfttest.RuleMessage(t, []byte{0, 200, 'x'}), ruleMeaning{}},
		{"match before userdata", nfttest.RuleMessage(t, udata(0, "native\x00"), nfttest.XTMatch("comment", nfttest.CommentInfo("xt"))), ruleMeaning{comment: "xt", hasComment: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := meaningOf(mustParseRaw(t, c.data).Rule)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(ruleMeaning{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzMeaning(f *testing.F) {
	f.Add(nfttest.RuleMessage(f, []byte{0, 3, 'h', 'i', 0}, nfttest.XTMatch("comment", nfttest.CommentInfo("hi")), nfttest.Counter(1, 2), nfttest.XTTarget("SET")))
	f.Add(nfttest.RuleMessage(f, nil, nfttest.Meta(unix.NFTA_META_SREG)))
	f.Fuzz(func(_ *testing.T, data []byte) {
		m, err := nft.ParseRule(data)
		if err != nil {
			return
		}
		_, _ = meaningOf(m.Rule) // none may panic
		for _, family := range rules.Families() {
			rule, _ := spell(family, m.Rule)
			rule.Label()
		}
	})
}
