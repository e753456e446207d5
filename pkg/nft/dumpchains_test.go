package nft

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// newChains returns a transaction that makes chains in a table and then fails: it
// deletes a table that does not exist.
func newChains(table string, count int) *Batch {
	b := NewBatch()
	for i := range count {
		b.Begin(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, tableid.IPv4)
		b.Text(unix.NFTA_CHAIN_TABLE, table)
		b.Text(unix.NFTA_CHAIN_NAME, fmt.Sprintf("new-%d", i))
		b.End()
	}
	b.Begin(unix.NFT_MSG_DELTABLE, 0, tableid.IPv4)
	b.Text(unix.NFTA_TABLE_NAME, "none")
	b.End()
	b.Finish()
	return b
}

// TestChainsNextToATransaction lists a family's chains while transactions under
// way make chains in an earlier table, and are then given up. The list must have
// each existing chain once. The kernel's own dumps repeat some chains then, and
// lack others.
func TestChainsNextToATransaction(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		const standing = 1500 // some datagrams full of them
		text := "add table ip first\nadd table ip second\n"
		for i := range standing {
			text += fmt.Sprintf("add chain ip second c%d\n", i)
		}
		nstest.CommandInput(t, text, "nft", "-f", "-")
		conn, err := Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		want := map[string]int{}
		for i := range standing {
			want[fmt.Sprintf("c%d", i)] = 1
		}

		stop, stopped := make(chan struct{}), make(chan error)
		go func() {
			for {
				select {
				case <-stop:
					stopped <- nil
					return
				default:
				}
				if err := newChains("first", 3000).Send(); err == nil {
					stopped <- fmt.Errorf("a transaction that deletes what does not exist was not refused")
					return
				}
			}
		}()
		raw, interrupted := 0, 0
		check := func(what string, read func(got map[string]int) error) {
			t.Helper()
			got := map[string]int{}
			switch err := read(got); {
			case errors.Is(err, ErrInterrupted):
				interrupted++
			case err != nil:
				t.Fatal(err)
			default:
				if diff := cmp.Diff(want, got); diff != "" {
					t.Fatalf("%s (-want +got)\n%s", what, diff)
				}
			}
		}
		rounds := testkit.Size(40, 200)
		for range rounds {
			listed := 0
			err := conn.dump(unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, tableid.IPv4, nil, func([]byte) error { listed++; return nil })
			if err != nil {
				t.Fatal(err)
			}
			if listed != standing {
				raw++
			}
			check("EachChain", func(got map[string]int) error {
				return conn.EachChain(tableid.IPv4, func(c Chain) error { got[c.Name]++; return nil })
			})
			check("EachObject", func(got map[string]int) error {
				return conn.EachObject(Chains, tableid.IPv4, nil, func(attrs []byte) error {
					got[String(AttrPath(attrs, unix.NFTA_CHAIN_NAME))]++
					return nil
				})
			})
		}
		close(stop)
		if err := <-stopped; err != nil {
			t.Error(err)
		}
		t.Logf("%d of %d dumps were not what stands; %d of twice as many lists were given up", raw, rounds, interrupted)
		if interrupted > rounds/2 {
			t.Error("too many lists were given up: the test shows little")
		}
	})
}
