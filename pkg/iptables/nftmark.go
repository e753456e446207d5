package iptables

import (
	"strings"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The lexicon translates canaryd's own marks (canaries and witnesses) without having met them.
// Each has its own nonce, and planting or probing them must not execute a process each time.

const (
	// markStart and markEnd surround a mark's comment in the output of iptables-save.
	markStart = `-m comment --comment "`
	markEnd   = `"`
	// markPrefix begins the comment of every mark.
	markPrefix = "canaryd-"
	// commentSize is XT_MAX_COMMENT_LEN of linux/netfilter/xt_comment.h.
	commentSize = 256
)

// cutMark returns the comment of a rule that is nothing but a mark; false for any other rule.
// spec is a rule as iptables-save prints it, without -A CHAIN. The lexicon calls it to make a
// mark's bytes. Kernel.named calls it to leave a refused mark out of the refused rules.
func cutMark(spec string) (string, bool) {
	comment, start := strings.CutPrefix(spec, markStart)
	comment, end := strings.CutSuffix(comment, markEnd)
	return comment, start && end && isMarkComment(comment)
}

// isMarkComment reports whether a comment may be a mark's, which needs no escape. Only for such
// a comment do cutMark, markOf and xtRule.mark know text and bytes without a read.
func isMarkComment(comment string) bool {
	if !strings.HasPrefix(comment, markPrefix) || len(comment) >= commentSize {
		return false
	}
	for _, c := range []byte(comment) {
		if c != '-' && c != ':' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// markOf returns a raw rule's comment if the rule is nothing but a mark; false for any other
// rule. spell makes the text from it, and takings note deleted marks by it.
func markOf(raw nft.Rule) (string, bool) {
	var comment string
	err := raw.Each(func(e nft.Expression) error {
		if e.Name != "match" {
			return nil
		}
		info, err := nft.AttrOf(e.Data, unix.NFTA_MATCH_INFO)
		comment = nft.String(info)
		return err
	})
	if err != nil || raw.Userdata != nil || !isMarkComment(comment) {
		return "", false
	}
	mark := markRule(comment)
	if isEntry(raw) {
		mark = markEntry(rules.IPv4, comment)
		if len(raw.Expressions) != len(mark.Expressions) {
			mark = markEntry(rules.IPv6, comment)
		}
	}
	return comment, string(raw.Expressions) == string(mark.Expressions)
}

// markRule builds a mark as iptables-nft 1.8.9 writes it and Linux 6.18 reports it: match
// "comment" revision 0, counter. lexicon.raw writes it, and markOf compares with it.
func markRule(comment string) nft.Rule {
	info := make([]byte, commentSize)
	copy(info, comment)
	data := nft.AppendAttr(nil, unix.NFTA_MATCH_NAME, "comment", 1)
	data = nft.AppendAttr(data, unix.NFTA_MATCH_REV, make([]byte, 4), 0)
	data = nft.AppendAttr(data, unix.NFTA_MATCH_INFO, info, 0)
	match := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "match", 1)
	match = nft.AppendAttr(match, unix.NFTA_EXPR_DATA, data, 0)
	data = nft.AppendAttr(nil, unix.NFTA_COUNTER_BYTES, make([]byte, 8), 0)
	data = nft.AppendAttr(data, unix.NFTA_COUNTER_PACKETS, make([]byte, 8), 0)
	counter := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "counter", 1)
	counter = nft.AppendAttr(counter, unix.NFTA_EXPR_DATA, data, 0)
	list := nft.AppendAttr(nil, unix.NFTA_LIST_ELEM, match, 0)
	return nft.Rule{Expressions: nft.AppendAttr(list, unix.NFTA_LIST_ELEM, counter, 0)}
}
