package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// answer builds one netlink message like the kernel's.
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
		// The missing rules were deleted before the dump reached them.
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
func handles(t *testing.T, conn *Conn, family tableid.Family, table, chain string) []uint64 {
	t.Helper()
	var found []uint64
	if err := conn.EachRule(family, table, chain, func(m RuleMessage) error {
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
		if got := handles(t, conn, tableid.IPv4, "filter", "X"); got != nil {
			t.Errorf("a table that does not exist has rules %v", got)
		}
		payload := "*filter\n:X - [0:0]\n:Y - [0:0]\n-A X -p tcp -j ACCEPT\n-A X -p udp -j Y\n-A Y -j RETURN\n-I OUTPUT -j X\n-P OUTPUT DROP\nCOMMIT\n"
		nstest.CommandInput(t, payload, "iptables-nft-restore", "--noflush")
		nstest.Command(t, "nft", "add table ip other; add chain ip other Z; add rule ip other Z accept")
		if got := handles(t, conn, tableid.IPv4, "filter", "X"); len(got) != 2 || got[0] >= got[1] {
			t.Errorf("handles %v, want two ascending ones", got)
		}
		if got := handles(t, conn, tableid.IPv6, "filter", "X"); got != nil {
			t.Errorf("the other family has rules %v", got)
		}
		var chains []Chain
		if err := conn.EachChain(tableid.IPv4, func(c Chain) error {
			if c.Table != "other" {
				chains = append(chains, c)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		want := []Chain{
			{Table: "filter", Name: "OUTPUT", Base: true, Kind: "filter", Hook: unix.NF_INET_LOCAL_OUT, Priority: 0, Policy: 0},
			{Table: "filter", Name: "X"},
			{Table: "filter", Name: "Y"},
		}
		byName := func(a, b Chain) int { return bytes.Compare([]byte(a.Name), []byte(b.Name)) }
		slices.SortFunc(chains, byName)
		for i := range chains {
			if chains[i].Handle == 0 {
				t.Errorf("chain %v has no handle", chains[i].Name)
			}
			chains[i].Handle, chains[i].Use = 0, 0 // the kernel chooses the numbers
		}
		if diff := cmp.Diff(want, chains, cmp.AllowUnexported(Chain{})); diff != "" {
			t.Errorf("chains (-want +got):\n%s", diff)
		}
		// An error of the caller leaves the connection usable.
		stop := errors.New("enough")
		if err := conn.EachRule(tableid.IPv4, "filter", "X", func(RuleMessage) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("got %v, want %v", err, stop)
		}
		conn.torn = true
		if err := conn.whole(); err != nil {
			t.Error(err)
		}
		if got := handles(t, conn, tableid.IPv4, "filter", "X"); len(got) != 2 {
			t.Errorf("afterwards: handles %v", got)
		}
	})
}
