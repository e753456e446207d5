package nft

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/tableid"
)

// A refused transaction names the object of the kernel's complaint.
func TestAMessageIsDescribed(t *testing.T) {
	for _, c := range []struct {
		kind  ObjectKind
		names []string
		want  string
	}{
		{Tables, []string{"nat"}, "table inet nat"},
		{Chains, []string{"nat"}, "chain  of inet nat"},
		{Sets, []string{"nat", "ips"}, "set ips of inet nat"},
		{Elements, []string{"nat", "ips"}, "elements of set ips of inet nat"},
		{Elements, []string{"nat"}, "elements of a set of inet nat"},
		{Objects, []string{"nat", "q"}, "stateful object q of inet nat"},
		{Flowtables, []string{"nat", "f"}, "flowtable f of inet nat"},
		{unix.NFT_MSG_TRACE, nil, "a transaction"},
	} {
		b := NewBatch()
		b.Begin(uint16(c.kind), netlink.Create, tableid.Inet)
		var attrs []byte
		for i, name := range c.names {
			attrs = AppendAttr(attrs, uint16(i+1), name, 1)
		}
		b.Raw(attrs)
		b.End()
		if got := b.describe(uint32(b.Messages())); got != c.want {
			t.Errorf("%s: %q, want %q", c.kind, got, c.want)
		}
	}
}
