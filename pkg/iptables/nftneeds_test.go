package iptables

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The bytes are the same as iptables-nft-restore 1.8.9 sent (seen by strace),
// except for NLA_F_NESTED where the kernel does not look at it. Headers are in
// the machine's own byte order, values in the network's.
func TestABatchOnTheWire(t *testing.T) {
	u32 := func(v uint32) string { return hex.EncodeToString(binary.NativeEndian.AppendUint32(nil, v)) }
	u16 := func(v uint16) string { return hex.EncodeToString(binary.NativeEndian.AppendUint16(nil, v)) }
	message := func(size uint32, kind, flags uint16, number uint32) string {
		return u32(size) + u16(kind) + u16(flags) + u32(number) + u32(0)
	}
	attribute := func(size, kind uint16) string { return u16(size) + u16(kind) }
	const nested = 0x8000

	b := guardedBatch(1)
	w := directWriter{batch: b}
	p := tablePlan{directWriter: &w, family: rules.IPv4, table: rules.Mangle}
	p.writeChain(&chainPlan{name: "FORWARD"})
	b.Finish()
	want := strings.Join([]string{
		message(28, 0x0010, 0x0001, 1) + "0000000a", // begin
		attribute(8, 1) + "00000001",                // the genid
		message(84, 0x0a03, 0x0401, 2) + "02000000", // NEWCHAIN
		attribute(11, 1) + hex.EncodeToString([]byte("mangle\x00")) + "00",
		attribute(12, 3) + hex.EncodeToString([]byte("FORWARD\x00")),
		attribute(20, 4|nested) + attribute(8, 1) + "00000002" + attribute(8, 2) + "ffffff6a", // the hook and -150
		attribute(8, 5) + "00000001",                                                          // accept
		attribute(11, 7) + hex.EncodeToString([]byte("filter\x00")) + "00",
		message(20, 0x0011, 0x0001, 3) + "0000000a", // end
	}, "")
	if diff := cmp.Diff(want, hex.EncodeToString(b.Wire())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// exprs makes the content of NFTA_RULE_EXPRESSIONS.
func exprs(list ...nft.Expression) []byte {
	var out []byte
	for _, e := range list {
		elem := nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, e.Name, 1)
		elem = nft.AppendAttr(elem, unix.NFTA_EXPR_DATA, e.Data, 0)
		out = nft.AppendAttr(out, unix.NFTA_LIST_ELEM, elem, 0)
	}
	return out
}

// attrsOf makes attributes of big-endian numbers, in pairs of kind and value.
func attrsOf(pairs ...uint32) []byte {
	var out []byte
	for i := 0; i < len(pairs); i += 2 {
		out = nft.AppendAttr(out, uint16(pairs[i]), binary.BigEndian.AppendUint32(nil, pairs[i+1]), 0)
	}
	return out
}

func compare(op uint32, value ...byte) nft.Expression {
	data := nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, value, 0)
	return nft.Expression{Name: "cmp", Data: nft.AppendAttr(attrsOf(unix.NFTA_CMP_OP, op), unix.NFTA_CMP_DATA, data, 0)}
}

func xt(kind, name string) nft.Expression {
	return nft.Expression{Name: kind, Data: nft.AppendAttr(nil, unix.NFTA_MATCH_NAME, name, 1)}
}

func jumpTo(chain string) nft.Expression {
	v := nft.AppendAttr(nil, unix.NFTA_VERDICT_CHAIN, chain, 1)
	return nft.Expression{Name: "immediate", Data: nft.AppendAttr(nil, unix.NFTA_IMMEDIATE_DATA, nft.AppendAttr(nil, unix.NFTA_DATA_VERDICT, v, 0), 0)}
}

var (
	l4proto     = nft.Expression{Name: "meta", Data: attrsOf(unix.NFTA_META_KEY, unix.NFT_META_L4PROTO, unix.NFTA_META_DREG, 1)}
	iifname     = nft.Expression{Name: "meta", Data: attrsOf(unix.NFTA_META_KEY, unix.NFT_META_IIFNAME, unix.NFTA_META_DREG, 1)}
	headerProto = nft.Expression{Name: "payload", Data: attrsOf(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFTA_PAYLOAD_OFFSET, 9, unix.NFTA_PAYLOAD_LEN, 1)}
	hopLimit    = nft.Expression{Name: "payload", Data: attrsOf(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFTA_PAYLOAD_OFFSET, 8, unix.NFTA_PAYLOAD_LEN, 1)}
	counting    = nft.Expression{Name: "counter", Data: nil}
)

func TestWhatARuleNeeds(t *testing.T) {
	const v4, v6 = rules.IPv4, rules.IPv6
	for _, test := range []struct {
		name   string
		family rules.Family
		list   []nft.Expression
		want   needs
		bad    bool
	}{
		{"-j ACCEPT", v4, []nft.Expression{counting, jumpTo("")}, needs{jump: []byte{}}, false},
		{"-p tcp", v4, []nft.Expression{l4proto, compare(unix.NFT_CMP_EQ, 6), counting}, needs{compat: nft.Compat{Protocol: 6}}, false},
		{"-p tcp -m multiport", v4, []nft.Expression{l4proto, compare(unix.NFT_CMP_EQ, 6), xt("match", "multiport"), counting}, needs{compat: nft.Compat{Wanted: true, Protocol: 6}}, false},
		{"! -p icmpv6 -j MARK", v6, []nft.Expression{iifname, compare(unix.NFT_CMP_EQ, 'l', 'o', 0), l4proto, compare(unix.NFT_CMP_NEQ, 58), counting, xt("target", "MARK")}, needs{compat: nft.Compat{Wanted: true, Protocol: 58, Inverted: true}}, false},
		{"-p all -m comment -j X", v6, []nft.Expression{xt("match", "comment"), counting, jumpTo("X")}, needs{compat: nft.Compat{Wanted: true}, jump: []byte("X")}, false},
		{"the protocol in IPv4's header", v4, []nft.Expression{headerProto, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{compat: nft.Compat{Wanted: true, Protocol: 17}}, false},
		{"the same byte of IPv6's", v6, []nft.Expression{headerProto, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{compat: nft.Compat{Wanted: true}}, false},
		{"another byte", v4, []nft.Expression{hopLimit, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{compat: nft.Compat{Wanted: true}}, false},
		{"a comparison of something else", v4, []nft.Expression{l4proto, counting, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{compat: nft.Compat{Wanted: true}}, false},
		{"a set", v4, []nft.Expression{xt("match", "set")}, needs{}, true},
		{"what adds to a set", v4, []nft.Expression{xt("target", "SET")}, needs{}, true},
		{"a file descriptor", v4, []nft.Expression{xt("match", "bpf")}, needs{}, true},
		{"nft's set", v4, []nft.Expression{l4proto, {Name: "lookup"}}, needs{}, true},
		{"nft's object", v4, []nft.Expression{{Name: "objref"}}, needs{}, true},
		{"a set that packets change", v4, []nft.Expression{{Name: "dynset"}}, needs{}, true},
		{"what nobody knows", v4, []nft.Expression{{Name: "osf"}}, needs{}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := needsOf(nft.Rule{Expressions: exprs(test.list...)}, test.family)
			if (err != nil) != test.bad || test.bad && !errors.Is(err, errNotPortable) {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(needs{}), cmpopts.IgnoreUnexported(nft.Compat{})); !test.bad && diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzWhatARuleNeeds(f *testing.F) {
	f.Add(true, exprs(l4proto, compare(unix.NFT_CMP_NEQ, 6), xt("match", "multiport"), counting, jumpTo("X")))
	f.Add(false, exprs(headerProto, compare(unix.NFT_CMP_EQ, 6), xt("target", "SET")))
	f.Fuzz(func(t *testing.T, v6 bool, data []byte) {
		family := rules.IPv4
		if v6 {
			family = rules.IPv6
		}
		rule := nft.Rule{Expressions: data}
		_, err := needsOf(rule, family)
		_ = rule.Each(func(e nft.Expression) error {
			if err == nil && slices.Contains([]string{"lookup", "dynset", "objref"}, e.Name) {
				t.Errorf("a rule with %s passes", e.Name)
			}
			return nil
		})
	})
}
