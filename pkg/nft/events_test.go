package nft

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestMutedChanges: of a muted address only the ends of commits arrive, in their order between
// those of others. Its many changes do not overflow the buffer. The address may change.
func TestMutedChanges(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		conn, err := Dial()
		must(t, err)
		defer conn.Close()
		one, two, other := NewPort(), NewPort(), NewPort()
		names := map[uint32]string{one: "one", two: "two", other: "other"}
		made := map[uint32]int{}
		commit := func(port uint32, chains int) {
			b := NewBatch()
			b.Port = port
			b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create, tableid.Inet)
			b.Text(unix.NFTA_TABLE_NAME, names[port])
			b.End()
			for range chains {
				b.Begin(unix.NFT_MSG_NEWCHAIN, netlink.Create, tableid.Inet)
				b.Text(unix.NFTA_CHAIN_TABLE, names[port])
				b.Text(unix.NFTA_CHAIN_NAME, fmt.Sprint("chain-", made[port]))
				b.End()
				made[port]++
			}
			b.Finish()
			must(t, b.Send())
		}
		muted := one
		e, err := OpenEvents(conn.Genid, func(port, _ uint32) bool { return port == one }, func() uint32 { return muted })
		must(t, err)
		defer e.Close()
		must(t, e.conn.SetReadBuffer(64<<10))
		heard := func() (words []string) {
			must(t, e.Drain(func(e Event) {
				switch e.Kind {
				case unix.NFT_MSG_NEWGEN:
					words = append(words, fmt.Sprintf("end of %d, own: %t", e.By.Genid, e.By.Own))
				case unix.NFT_MSG_NEWCHAIN:
					words = append(words, fmt.Sprintf("%s %s", e.Table, e.Chain))
				}
			}))
			return words
		}
		commit(one, 4000)
		commit(other, 1)
		commit(one, 1)
		commit(two, 1)
		want := []string{"end of 2, own: true", "other chain-0", "end of 3, own: false", "end of 4, own: true", "two chain-0", "end of 5, own: false"}
		if diff := cmp.Diff(want, heard()); diff != "" {
			t.Errorf("the first address is muted (-want +got):\n%s", diff)
		}
		muted = two
		if words := heard(); words != nil {
			t.Errorf("nothing was committed, and %v arrived", words)
		}
		commit(two, 4000)
		commit(one, 1)
		want = []string{"end of 6, own: false", "one chain-4001", "end of 7, own: true"}
		if diff := cmp.Diff(want, heard()); diff != "" {
			t.Errorf("the second address is muted (-want +got):\n%s", diff)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
