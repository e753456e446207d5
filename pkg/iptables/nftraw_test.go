package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

func counterOf(bytes, packets uint64) encode {
	return expression("counter", func(ae *netlink.AttributeEncoder) error {
		ae.Uint64(unix.NFTA_COUNTER_BYTES, bytes)
		ae.Uint64(unix.NFTA_COUNTER_PACKETS, packets)
		return nil
	})
}

func xtTarget(name string) encode {
	return expression("target", func(ae *netlink.AttributeEncoder) error {
		ae.String(unix.NFTA_TARGET_NAME, name)
		ae.Bytes(unix.NFTA_TARGET_INFO, make([]byte, 8))
		return nil
	})
}

func mustParseRaw(t testing.TB, data []byte) RuleMessage {
	t.Helper()
	m, err := ParseRule(data)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestRawRuleLeavesOutWhatWasCounted(t *testing.T) {
	comment := xtMatch("comment", commentInfo("hi"))
	idle := mustParseRaw(t, ruleMessage(t, nil, comment, counterOf(0, 0)))
	busy := mustParseRaw(t, ruleMessage(t, nil, comment, counterOf(1<<40, 7)))
	if string(idle.Table) != "mangle" || string(idle.Chain) != "C" {
		t.Errorf("it stands in %q, %q", idle.Table, idle.Chain)
	}
	if diff := cmp.Diff(idle.Rule, busy.Rule, cmp.AllowUnexported(Rule{})); diff != "" {
		t.Errorf("rules that differ in their counters (-idle +busy):\n%s", diff)
	}
	other := mustParseRaw(t, ruleMessage(t, nil, xtMatch("comment", commentInfo("ho")), counterOf(0, 0)))
	if bytes.Equal(idle.Rule.Expressions, other.Rule.Expressions) {
		t.Error("rules that differ in a comment are the same raw rule")
	}
}

func TestRawRuleIndexed(t *testing.T) {
	for _, c := range []struct {
		name string
		does encode
		want bool
	}{
		{"ipset's match", xtMatch("set", make([]byte, 8)), true},
		{"ipset's target", xtTarget("SET"), true},
		{"native set", expression("lookup", nil), true},
		{"native map", expression("objref", nil), true},
		{"native meter", expression("dynset", nil), true},
		{"comment that says set", xtMatch("comment", commentInfo("set")), false},
		{"another target", xtTarget("DNAT"), false},
		{"verdict", expression("immediate", nil), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := mustParseRaw(t, ruleMessage(t, nil, counterOf(1, 1), c.does)).Rule.indexed(); got != c.want {
				t.Errorf("indexed is %t, want %t", got, c.want)
			}
		})
	}
	if !(Rule{Expressions: []byte{9, 0, 1, 0}}).indexed() {
		t.Error("a rule that cannot be read is no secure identity, but is not indexed")
	}
}

func FuzzRaw(f *testing.F) {
	f.Add(ruleMessage(f, []byte{0, 3, 'h', 'i', 0}, xtMatch("comment", commentInfo("hi")), counterOf(1, 2), xtTarget("SET")))
	f.Add([]byte{2, 0, 0, 0, 8, 0, 1, 0, 0, 0, 0, 2})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, _ = ParseChain(data) // none may panic
		for kind := range uint16(unix.NFT_MSG_MAX) {
			_, _ = parseEvent(unix.NFNL_SUBSYS_NFTABLES<<8|kind, data)
		}
		d := dumper{want: 7, f: func([]byte) error { return nil }}
		_ = d.datagram(data)
		before := slices.Clone(data)
		m, err := ParseRule(data)
		if err != nil {
			return
		}
		m.Rule.indexed()
		shape := m.Rule.shape()
		_ = shape.agrees(rules.Rule{Spec: "-i a -m comment --comment x -j X", Target: "X"})
		if len(data) != len(before) {
			t.Error("the message grew")
		}
		again, err := ParseRule(data)
		if err != nil || !bytes.Equal(again.Rule.Expressions, m.Rule.Expressions) {
			t.Errorf("a rule without counts reads as another one: %v", err)
		}
	})
}

// answer builds one netlink message of the kernel's.
func answer(kind, flags uint16, sequence uint32, data []byte) []byte {
	var m []byte
	m = binary.NativeEndian.AppendUint32(m, uint32(unix.SizeofNlMsghdr+len(data)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, flags)
	m = binary.NativeEndian.AppendUint32(m, sequence)
	m = binary.NativeEndian.AppendUint32(m, 0)
	m = append(m, data...)
	return append(m, make([]byte, -len(m)&3)...)
}

func TestDumper(t *testing.T) {
	const kind = 0xa06
	fine := make([]byte, 4)
	refused := binary.NativeEndian.AppendUint32(nil, ^uint32(unix.EPERM)+1)
	for _, c := range []struct {
		name   string
		stream [][]byte
		got    string
		done   bool
		want   error // of result
	}{
		{"complete", [][]byte{answer(kind, unix.NLM_F_MULTI, 5, []byte("a")), answer(kind, unix.NLM_F_MULTI, 5, []byte("b")), answer(unix.NLMSG_DONE, unix.NLM_F_MULTI, 5, fine)}, "ab", true, nil},
		{"not at its end", [][]byte{answer(kind, unix.NLM_F_MULTI, 5, []byte("a"))}, "a", false, nil},
		{"interrupted", [][]byte{answer(kind, unix.NLM_F_DUMP_INTR, 5, []byte("a")), answer(unix.NLMSG_DONE, 0, 5, fine)}, "a", true, ErrInterrupted},
		// The rules that are missing were deleted before the dump came to them.
		{"interrupted at its very end", [][]byte{answer(kind, 0, 5, []byte("a")), answer(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 5, fine)}, "a", true, ErrInterrupted},
		{"refused", [][]byte{answer(unix.NLMSG_ERROR, 0, 5, refused)}, "", true, unix.EPERM},
		{"failed half-way", [][]byte{answer(kind, 0, 5, []byte("a")), answer(unix.NLMSG_DONE, 0, 5, refused)}, "a", true, unix.EPERM},
		{"an older answer", [][]byte{answer(kind, 0, 4, []byte("x")), answer(unix.NLMSG_DONE, 0, 4, fine), answer(kind, 0, 5, []byte("a"))}, "a", false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []byte
			d := dumper{want: kind, sequence: 5, f: func(data []byte) error { got = append(got, data...); return nil }}
			if err := d.datagram(slices.Concat(c.stream...)); err != nil {
				t.Fatal(err)
			}
			if string(got) != c.got || d.done != c.done || !errors.Is(d.result(), c.want) {
				t.Errorf("got %q, done %t, %v; want %q, %t, %v", got, d.done, d.result(), c.got, c.done, c.want)
			}
		})
	}
	for _, bad := range [][]byte{{1}, answer(kind, 0, 5, nil)[:10], answer(99, 0, 5, nil), answer(unix.NLMSG_DONE, 0, 5, nil)} {
		d := dumper{want: kind, sequence: 5, f: func([]byte) error { return nil }}
		if d.datagram(bad) == nil {
			t.Errorf("no error for % x", bad)
		}
	}
}

// handles returns the handles of a chain's rules.
func handles(t *testing.T, conn *Conn, family rules.Family, place Place) []uint64 {
	t.Helper()
	var found []uint64
	if err := conn.EachRule(family, place, func(m RuleMessage) error {
		found = append(found, m.Handle)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

func TestRawDump(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-nft", "ip6tables-nft", "nft")
		conn, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		place := Place{rules.Filter, "X"}
		if got := handles(t, conn, rules.IPv4, place); got != nil {
			t.Errorf("a table that does not exist has rules %v", got)
		}
		payload := "*filter\n:X - [0:0]\n:Y - [0:0]\n-A X -p tcp -j ACCEPT\n-A X -p udp -j Y\n-A Y -j RETURN\n-I OUTPUT -j X\n-P OUTPUT DROP\nCOMMIT\n"
		nstest.CommandInput(t, payload, "iptables-nft-restore", "--noflush")
		nstest.Command(t, "nft", "add table ip other; add chain ip other Z; add rule ip other Z accept")
		if got := handles(t, conn, rules.IPv4, place); len(got) != 2 || got[0] >= got[1] {
			t.Errorf("handles %v, want two ascending ones", got)
		}
		if got := handles(t, conn, rules.IPv6, place); got != nil {
			t.Errorf("the other family has rules %v", got)
		}
		var chains []Chain
		if err := conn.EachChain(rules.IPv4, func(c Chain) error { chains = append(chains, c); return nil }); err != nil {
			t.Fatal(err)
		}
		want := []Chain{
			{place: Place{rules.Filter, "OUTPUT"}, Base: true, Kind: "filter", Hook: unix.NF_INET_LOCAL_OUT, Priority: 0, Policy: 0, Use: 1},
			{place: Place{rules.Filter, "X"}, Use: 3},
			{place: Place{rules.Filter, "Y"}, Use: 2},
		}
		byName := func(a, b Chain) int { return bytes.Compare([]byte(a.place.Chain), []byte(b.place.Chain)) }
		slices.SortFunc(chains, byName)
		for i := range chains {
			if chains[i].Handle == 0 {
				t.Errorf("chain %v has no handle", chains[i].place)
			}
			chains[i].Handle = 0 // which one is the kernel's affair
		}
		if diff := cmp.Diff(want, chains, cmp.AllowUnexported(Chain{})); diff != "" {
			t.Errorf("chains (-want +got):\n%s", diff)
		}
		// An error of the caller's leaves the connection usable.
		stop := errors.New("enough")
		if err := conn.EachRule(rules.IPv4, place, func(RuleMessage) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("got %v, want %v", err, stop)
		}
		conn.torn = true
		if err := conn.whole(); err != nil {
			t.Error(err)
		}
		if got := handles(t, conn, rules.IPv4, place); len(got) != 2 {
			t.Errorf("afterwards: handles %v", got)
		}
	})
}
