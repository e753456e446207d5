package iptables

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

// message builds the data of a netlink message: an nfgenmsg and attributes.
func message(t testing.TB, attrs func(*netlink.AttributeEncoder)) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	attrs(ae)
	data, err := ae.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, data...)
}

type encode = func(*netlink.AttributeEncoder) error

// ruleMessage builds a rule in mangle's chain C of the given expressions.
func ruleMessage(t testing.TB, userdata []byte, expressions ...encode) []byte {
	return message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_RULE_TABLE, "mangle")
		ae.String(unix.NFTA_RULE_CHAIN, "C")
		ae.Nested(unix.NFTA_RULE_EXPRESSIONS, func(list *netlink.AttributeEncoder) error {
			for _, e := range expressions {
				list.Nested(unix.NFTA_LIST_ELEM, e)
			}
			return nil
		})
		if userdata != nil {
			ae.Bytes(unix.NFTA_RULE_USERDATA, userdata)
		}
	})
}

func expression(name string, data encode) encode {
	return func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_EXPR_NAME, name)
		if data != nil {
			ae.Nested(unix.NFTA_EXPR_DATA, data)
		}
		return nil
	}
}

func xtMatch(name string, info []byte) encode {
	return expression("match", func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_MATCH_NAME, name)
		ae.Uint32(unix.NFTA_MATCH_REV, 0)
		ae.Bytes(unix.NFTA_MATCH_INFO, info)
		return nil
	})
}

func commentInfo(text string) []byte {
	info := make([]byte, 256)
	copy(info, text)
	return info
}

func meta(register uint16) encode {
	return expression("meta", func(ae *netlink.AttributeEncoder) error {
		ae.Uint32(register, 1)
		return nil
	})
}

func TestParseRule(t *testing.T) {
	place := Place{rules.Mangle, "C"}
	counter := expression("counter", nil)
	udata := func(kind byte, text string) []byte { return append([]byte{kind, byte(len(text))}, text...) }
	for _, c := range []struct {
		name string
		data []byte
		want nftRule
	}{
		{"empty", ruleMessage(t, nil), nftRule{place: place}},
		{"comment", ruleMessage(t, nil, xtMatch("comment", commentInfo("hi there")), counter), nftRule{place: place, comment: "hi there", hasComment: true}},
		{"comment without NUL", ruleMessage(t, nil, xtMatch("comment", []byte("hi"))), nftRule{place: place, comment: "hi", hasComment: true}},
		{"empty comment", ruleMessage(t, nil, xtMatch("comment", commentInfo(""))), nftRule{place: place, hasComment: true}},
		{"another match", ruleMessage(t, nil, xtMatch("limit", commentInfo("x"))), nftRule{place: place}},
		{"verdict", ruleMessage(t, nil, xtMatch("comment", commentInfo("hi")), counter, expression("immediate", nil)),
			nftRule{place: place, comment: "hi", hasComment: true, target: true}},
		{"xt target", ruleMessage(t, nil, counter, expression("target", nil)), nftRule{place: place, target: true}},
		{"meta match", ruleMessage(t, nil, meta(unix.NFTA_META_DREG), expression("cmp", nil), counter), nftRule{place: place}},
		{"meta set", ruleMessage(t, nil, counter, meta(unix.NFTA_META_SREG)), nftRule{place: place, target: true}},
		{"unknown expression", ruleMessage(t, nil, expression("synproxy", nil)), nftRule{place: place, target: true}},
		{"userdata", ruleMessage(t, udata(0, "native\x00"), counter), nftRule{place: place, comment: "native", hasComment: true}},
		{"userdata behind another", ruleMessage(t, append(udata(1, "xxxx"), udata(0, "native\x00")...)), nftRule{place: place, comment: "native", hasComment: true}},
		{"userdata cut off", ruleMessage(t, []byte{0, 200, 'x'}), nftRule{place: place}},
		{"match before userdata", ruleMessage(t, udata(0, "native\x00"), xtMatch("comment", commentInfo("xt"))), nftRule{place: place, comment: "xt", hasComment: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseRule(c.data)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(nftRule{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseCommit(t *testing.T) {
	// As received on Linux 6.18: genid 2, pid 10052, "iptables-nft-re".
	data := []byte{0, 0, 0, 2, 8, 0, 1, 0, 0, 0, 0, 2, 8, 0, 2, 0, 0, 0, 0x27, 0x44, 20, 0, 3, 0}
	data = append(data, "iptables-nft-re\x00"...)
	got, err := ParseCommit(data)
	if diff := cmp.Diff(Commit{Genid: 2, PID: 10052, Comm: "iptables-nft-re"}, got); diff != "" || err != nil {
		t.Errorf("(-want +got):\n%s%v", diff, err)
	}
	for _, bad := range [][]byte{nil, {0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0, 99, 0, 1, 0}, {0, 0, 0, 0, 5, 0, 1, 0, 1}} {
		if c, err := ParseCommit(bad); err == nil {
			t.Errorf("parseCommit(%v) = %v, want an error", bad, c)
		}
	}
}

func TestParseChain(t *testing.T) {
	got, err := parseChain(message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, "nat")
		ae.String(unix.NFTA_CHAIN_NAME, "X")
		ae.Uint32(unix.NFTA_CHAIN_USE, 7)
	}))
	if want := (nftChain{place: Place{rules.Nat, "X"}, use: 7}); got != want || err != nil {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

// The hand-written encoder says what the library's says.
func TestEncodeStrings(t *testing.T) {
	want := message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(1, "mangle")
		ae.String(2, "a")
		ae.String(3, "abc")
	})[nfgenmsgLen:]
	got := Strings(StringAttr{1, "mangle"}, StringAttr{2, "a"}, StringAttr{3, "abc"})
	if !bytes.Equal(want, got) {
		t.Errorf("got % x, want % x", got, want)
	}
}

func FuzzNetlinkMessages(f *testing.F) {
	f.Add(ruleMessage(f, []byte{0, 3, 'h', 'i', 0}, xtMatch("comment", commentInfo("hi")), meta(unix.NFTA_META_SREG)))
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0, 0, 0, 0, 2})
	f.Fuzz(func(_ *testing.T, data []byte) {
		_, _ = parseRule(data) // none may panic
		_, _ = parseChain(data)
		_, _ = ParseCommit(data)
	})
}
