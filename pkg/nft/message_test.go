package nft

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft/nfttest"
)

func TestParseCommit(t *testing.T) {
	// As received on Linux 6.18: genid 2, pid 10052, "iptables-nft-re".
	data := []byte{0, 0, 0, 2, 8, 0, 1, 0, 0, 0, 0, 2, 8, 0, 2, 0, 0, 0, 0x27, 0x44, 20, 0, 3, 0}
	data = append(data, "iptables-nft-re\x00"...)
	got, err := parseCommit(data)
	if diff := cmp.Diff(Commit{Genid: 2, PID: 10052, Comm: "iptables-nft-re"}, got); diff != "" || err != nil {
		t.Errorf("(-want +got):\n%s%v", diff, err)
	}
	for _, bad := range [][]byte{nil, {0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0, 99, 0, 1, 0}, {0, 0, 0, 0, 5, 0, 1, 0, 1}} {
		if c, err := parseCommit(bad); err == nil {
			t.Errorf("parseCommit(%v) = %v, want an error", bad, c)
		}
	}
}

func TestParseChain(t *testing.T) {
	got, err := ParseChain(nfttest.Message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(unix.NFTA_CHAIN_TABLE, "nat")
		ae.String(unix.NFTA_CHAIN_NAME, "X")
		ae.Uint32(unix.NFTA_CHAIN_USE, 7)
	}))
	if want := (Chain{Table: "nat", Name: "X", Use: 7}); got != want || err != nil {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

// The hand-written encoder writes the same bytes as the library's.
func TestEncodeStrings(t *testing.T) {
	want := nfttest.Message(t, func(ae *netlink.AttributeEncoder) {
		ae.String(1, "mangle")
		ae.String(2, "a")
		ae.String(3, "abc")
	})[nfgenmsgLen:]
	got := Strings(StringAttr{1, "mangle"}, StringAttr{2, "a"}, StringAttr{3, "abc"})
	if !bytes.Equal(want, got) {
		t.Errorf("got % x, want % x", got, want)
	}
}
