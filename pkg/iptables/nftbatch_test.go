package iptables

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// The bytes are those that iptables-nft-restore 1.8.9 sent for the same (seen
// by strace), but for NLA_F_NESTED where the kernel does not look at it.
// Headers are in the machine's own byte order, values in the network's.
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
	if diff := cmp.Diff(want, hex.EncodeToString(bytes.Join(b.chunks, nil))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if b.bytes != len(want)/2 {
		t.Errorf("the batch counts %d bytes and has %d", b.bytes, len(want)/2)
	}
}

// A batch that was cut back is as if the rest had never been written, across
// chunks, too.
func TestABatchIsCutBack(t *testing.T) {
	fill := func(b *Batch, n int) {
		for range n {
			b.Begin(unix.NFT_MSG_NEWRULE, 0, rules.IPv6)
			b.Blob(unix.NFTA_RULE_EXPRESSIONS, make([]byte, 60_000))
			b.End()
		}
	}
	for _, n := range []int{1, 15, 16, 17, 18, 40} {
		a, b := guardedBatch(7), guardedBatch(7)
		fill(a, n)
		fill(b, n)
		mark := b.Mark()
		fill(b, 33)
		b.Cut(mark)
		fill(a, 20)
		fill(b, 20)
		a.Finish()
		b.Finish()
		if !bytes.Equal(bytes.Join(a.chunks, nil), bytes.Join(b.chunks, nil)) || a.bytes != b.bytes {
			t.Errorf("behind %d messages: not the same batch", n)
		}
		for _, chunk := range b.chunks {
			if len(chunk) > batchChunk {
				t.Errorf("a chunk of %d bytes", len(chunk))
			}
		}
	}
}

// complaintBytes is what the kernel sends about message 2 of a batch.
func complaintBytes(code int32) []byte {
	m := binary.NativeEndian.AppendUint32(nil, 36)
	m = binary.NativeEndian.AppendUint16(m, unix.NLMSG_ERROR)
	m = binary.NativeEndian.AppendUint16(m, 0x100) // NLM_F_CAPPED
	m = binary.NativeEndian.AppendUint32(m, 2)
	m = binary.NativeEndian.AppendUint32(m, 4711)
	m = binary.NativeEndian.AppendUint32(m, uint32(code))
	return append(m, make([]byte, 16)...)
}

func TestParseComplaint(t *testing.T) {
	for _, test := range []struct {
		name  string
		data  []byte
		errno unix.Errno
		bad   bool
	}{
		{"ERESTART", complaintBytes(-85), unix.ERESTART, false},
		{"ENOENT", complaintBytes(-2), unix.ENOENT, false},
		{"an acknowledgement", complaintBytes(0), 0, false},
		{"no error of Linux's", complaintBytes(-5000), 0, true},
		{"not negative", complaintBytes(2), 0, true},
		{"cut off", complaintBytes(-2)[:18], 0, true},
		{"a notification", append([]byte{20, 0, 0, 0, 0x06, 0x0a}, make([]byte, 14)...), 0, true},
		{"nothing", nil, 0, true},
	} {
		about, errno, err := parseComplaint(test.data)
		if errno != test.errno || (err != nil) != test.bad || !test.bad && about != 2 {
			t.Errorf("%s: message %d, %v, %v", test.name, about, errno, err)
		}
	}
}

func FuzzComplaint(f *testing.F) {
	b := guardedBatch(1)
	b.Begin(unix.NFT_MSG_NEWRULE, 0, rules.IPv6)
	b.Text(unix.NFTA_RULE_TABLE, "nat")
	b.Text(unix.NFTA_RULE_CHAIN, "X")
	b.End()
	b.Finish()
	f.Add(complaintBytes(-2))
	f.Add(complaintBytes(-5000))
	f.Fuzz(func(t *testing.T, data []byte) {
		about, errno, err := parseComplaint(data)
		switch what := b.describe(about); {
		case err != nil && errno != 0:
			t.Errorf("an error and an errno: %v, %v", err, errno)
		case (about == 2) != (what == "a rule of chain X of ipv6 nat"):
			t.Errorf("message %d is %s", about, what)
		}
	})
}

// exprs makes the content of NFTA_RULE_EXPRESSIONS.
func exprs(list ...Expression) []byte {
	var out []byte
	for _, e := range list {
		elem := AppendAttr(nil, unix.NFTA_EXPR_NAME, e.Name, 1)
		elem = AppendAttr(elem, unix.NFTA_EXPR_DATA, e.Data, 0)
		out = AppendAttr(out, unix.NFTA_LIST_ELEM, elem, 0)
	}
	return out
}

// attrsOf makes attributes of big-endian numbers, in pairs of kind and value.
func attrsOf(pairs ...uint32) []byte {
	var out []byte
	for i := 0; i < len(pairs); i += 2 {
		out = AppendAttr(out, uint16(pairs[i]), binary.BigEndian.AppendUint32(nil, pairs[i+1]), 0)
	}
	return out
}

func compare(op uint32, value ...byte) Expression {
	data := AppendAttr(nil, unix.NFTA_DATA_VALUE, value, 0)
	return Expression{"cmp", AppendAttr(attrsOf(unix.NFTA_CMP_OP, op), unix.NFTA_CMP_DATA, data, 0)}
}

func xt(kind, name string) Expression {
	return Expression{kind, AppendAttr(nil, unix.NFTA_MATCH_NAME, name, 1)}
}

func jumpTo(chain string) Expression {
	v := AppendAttr(nil, unix.NFTA_VERDICT_CHAIN, chain, 1)
	return Expression{"immediate", AppendAttr(nil, unix.NFTA_IMMEDIATE_DATA, AppendAttr(nil, unix.NFTA_DATA_VERDICT, v, 0), 0)}
}

var (
	l4proto     = Expression{"meta", attrsOf(unix.NFTA_META_KEY, unix.NFT_META_L4PROTO, unix.NFTA_META_DREG, 1)}
	iifname     = Expression{"meta", attrsOf(unix.NFTA_META_KEY, unix.NFT_META_IIFNAME, unix.NFTA_META_DREG, 1)}
	headerProto = Expression{"payload", attrsOf(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFTA_PAYLOAD_OFFSET, 9, unix.NFTA_PAYLOAD_LEN, 1)}
	hopLimit    = Expression{"payload", attrsOf(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFTA_PAYLOAD_OFFSET, 8, unix.NFTA_PAYLOAD_LEN, 1)}
	counting    = Expression{"counter", nil}
)

func TestWhatARuleNeeds(t *testing.T) {
	const v4, v6 = rules.IPv4, rules.IPv6
	for _, test := range []struct {
		name   string
		family rules.Family
		list   []Expression
		want   needs
		bad    bool
	}{
		{"-j ACCEPT", v4, []Expression{counting, jumpTo("")}, needs{jump: []byte{}}, false},
		{"-p tcp", v4, []Expression{l4proto, compare(unix.NFT_CMP_EQ, 6), counting}, needs{protocol: 6}, false},
		{"-p tcp -m multiport", v4, []Expression{l4proto, compare(unix.NFT_CMP_EQ, 6), xt("match", "multiport"), counting}, needs{xt: true, protocol: 6}, false},
		{"! -p icmpv6 -j MARK", v6, []Expression{iifname, compare(unix.NFT_CMP_EQ, 'l', 'o', 0), l4proto, compare(unix.NFT_CMP_NEQ, 58), counting, xt("target", "MARK")}, needs{xt: true, protocol: 58, inverted: true}, false},
		{"-p all -m comment -j X", v6, []Expression{xt("match", "comment"), counting, jumpTo("X")}, needs{xt: true, jump: []byte("X")}, false},
		{"the protocol in IPv4's header", v4, []Expression{headerProto, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{xt: true, protocol: 17}, false},
		{"the same byte of IPv6's", v6, []Expression{headerProto, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{xt: true}, false},
		{"another byte", v4, []Expression{hopLimit, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{xt: true}, false},
		{"a comparison of something else", v4, []Expression{l4proto, counting, compare(unix.NFT_CMP_EQ, 17), xt("match", "sctp")}, needs{xt: true}, false},
		{"a set", v4, []Expression{xt("match", "set")}, needs{}, true},
		{"what adds to a set", v4, []Expression{xt("target", "SET")}, needs{}, true},
		{"a file descriptor", v4, []Expression{xt("match", "bpf")}, needs{}, true},
		{"nft's set", v4, []Expression{l4proto, {"lookup", nil}}, needs{}, true},
		{"nft's object", v4, []Expression{{"objref", nil}}, needs{}, true},
		{"a set that packets change", v4, []Expression{{"dynset", nil}}, needs{}, true},
		{"what nobody knows", v4, []Expression{{"osf", nil}}, needs{}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Rule{Expressions: exprs(test.list...)}.inspect(test.family)
			if (err != nil) != test.bad || test.bad && !errors.Is(err, errNotPortable) {
				t.Errorf("error %v", err)
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(needs{})); !test.bad && diff != "" {
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
		rule := Rule{Expressions: data}
		if _, err := rule.inspect(family); err == nil && rule.indexed() {
			t.Error("a rule with a number of the kernel's passes")
		}
	})
}
