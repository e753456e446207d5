package nft

import (
	"bytes"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft/nfttest"
)

func TestRawRuleLeavesOutWhatWasCounted(t *testing.T) {
	comment := nfttest.XTMatch("comment", nfttest.CommentInfo("hi"))
	idle := mustParse(t, nfttest.RuleMessage(t, nil, comment, nfttest.Counter(0, 0)))
	busy := mustParse(t, nfttest.RuleMessage(t, nil, comment, nfttest.Counter(1<<40, 7)))
	if string(idle.Table) != "mangle" || string(idle.Chain) != "C" {
		t.Errorf("it stands in %q, %q", idle.Table, idle.Chain)
	}
	if diff := cmp.Diff(idle.Rule, busy.Rule, cmp.AllowUnexported(Rule{})); diff != "" {
		t.Errorf("rules that differ in their counters (-idle +busy):\n%s", diff)
	}
	other := mustParse(t, nfttest.RuleMessage(t, nil, nfttest.XTMatch("comment", nfttest.CommentInfo("ho")), nfttest.Counter(0, 0)))
	if bytes.Equal(idle.Rule.Expressions, other.Rule.Expressions) {
		t.Error("rules that differ in a comment are the same raw rule")
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(nfttest.RuleMessage(f, []byte{0, 3, 'h', 'i', 0}, nfttest.XTMatch("comment", nfttest.CommentInfo("hi")), nfttest.Counter(1, 2), nfttest.XTTarget("SET")))
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0, 0, 0, 0, 2})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = ParseChain(data) // none of them may panic
		_, _ = parseTable(data)
		_, _ = parseCommit(data)
		for kind := range uint16(unix.NFT_MSG_MAX) {
			if len(data) >= nfgenmsgLen {
				_, _ = Notification{Kind: kind, Attrs: data[nfgenmsgLen:], message: data}.event()
			}
		}
		d := dumper{want: 7, f: func([]byte) error { return nil }}
		_ = d.datagram(data)
		before := slices.Clone(data)
		m, err := ParseRule(data)
		if err != nil {
			return
		}
		if len(data) != len(before) {
			t.Error("the message grew")
		}
		again, err := ParseRule(data)
		if err != nil || !bytes.Equal(again.Rule.Expressions, m.Rule.Expressions) {
			t.Errorf("a rule without counts reads as another one: %v", err)
		}
	})
}

func mustParse(t testing.TB, data []byte) RuleMessage {
	t.Helper()
	m, err := ParseRule(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}
