package iptables

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// TestRiders: the transaction of the tables contains another realm's additions,
// or they are not written at all. In every case the tables are back.
func TestRiders(t *testing.T) {
	type came struct {
		Asked, Rode bool
		Answer      string // the error that Sent got, shortened
		Moved       uint64 // transactions
		Back        bool   // the tables are back
	}
	add := func(b *nft.Batch, table string, flags netlink.HeaderFlags) {
		b.Begin(unix.NFT_MSG_NEWTABLE, flags, unix.NFPROTO_INET)
		b.Text(unix.NFTA_TABLE_NAME, table)
		b.End()
	}
	ours := func(b *nft.Batch) error { add(b, "ours", netlink.Create); return nil }
	for _, test := range []struct {
		name   string
		cfg    Config
		genid  int // of the rider, relative to the tables'
		append func(*nft.Batch) error
		meet   func(t *testing.T) // before the write
		want   came
	}{
		{name: "taken", append: ours, want: came{true, true, "", 1, true}},
		{name: "it rests on another read", genid: -1, append: ours, want: came{false, false, "", 1, true}},
		{name: "it cannot be written", append: func(b *nft.Batch) error { add(b, "ours", netlink.Create); return errors.New("not to be had") },
			want: came{true, false, "not to be had", 1, true}},
		{name: "the kernel refuses it", append: func(b *nft.Batch) error {
			add(b, "ours", netlink.Create)
			add(b, "ours", netlink.Create|netlink.Excl)
			return nil
		}, want: came{true, false, "the kernel refused", 1, true}},
		{name: "another process wrote since the read", append: ours, meet: func(t *testing.T) {
			nstest.Command(t, "nft", "add", "table", "arp", "other")
		}, want: came{false, false, "", 1, false}},
		{name: "another process writes while the rider is", append: func(b *nft.Batch) error {
			add(b, "ours", netlink.Create)
			nstest.Command(t, "nft", "add", "table", "arp", "other")
			return nil
		}, want: came{true, false, "stale", 1, false}},
		{name: "as text", cfg: Config{Replay: ReplayText}, append: ours, want: came{false, false, "", 4, true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			onNamespace(t, func(t *testing.T) {
				n := newLossyNode(t, test.cfg, lossyRules)
				s := n.read(t)
				before := mustStamp(t, n.kernel, rules.IPv4).Value
				if test.meet != nil {
					test.meet(t)
				}
				var got came
				s.Carry(&Rider{Genid: uint32(before) + uint32(test.genid), Append: func(b *nft.Batch) error {
					got.Asked = true
					return test.append(b)
				}, Sent: func(err error) {
					var refused *nft.RefusedError
					switch {
					case errors.As(err, &refused):
						got.Answer = "the kernel refused"
					case errors.Is(err, nft.ErrStale):
						got.Answer = "stale"
					case err != nil:
						got.Answer = err.Error()
					}
				}})
				s.Restore(t.Context(), n.payload(t, lossyRules))
				got.Moved = mustStamp(t, n.kernel, rules.IPv4).Value - before
				got.Rode = strings.Contains(nstest.Command(t, "nft", "list", "tables"), "inet ours")
				got.Back = saveNFT(t, rules.IPv4) == n.saved[rules.IPv4] && saveNFT(t, rules.IPv6) == n.saved[rules.IPv6]
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("(-want +got)\n%s", diff)
				}
				// The rider was for one write only.
				got.Asked = false
				for _, family := range rules.Families() {
					mustRead(t, s, family)
				}
				s.Restore(t.Context(), n.payload(t, "*nat\n:LATER - [0:0]\nCOMMIT\n"))
				if got.Asked {
					t.Error("it rode twice")
				}
			})
		})
	}
}

// TestRidersGoWithTheLastStage: a replay in two stages takes the rider along with
// the second stage.
func TestRidersGoWithTheLastStage(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n := newLossyNode(t, Config{}, lossyRules)
		s := n.read(t)
		mangle, nat, _ := strings.Cut(lossyRules, "*nat")
		before := mustStamp(t, n.kernel, rules.IPv4).Value
		stood, sent := "", errors.New("never")
		s.Carry(&Rider{Genid: uint32(before), Append: func(b *nft.Batch) error {
			stood = nstest.Command(t, "nft", "list", "tables")
			b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create, unix.NFPROTO_INET)
			b.Text(unix.NFTA_TABLE_NAME, "ours")
			b.End()
			return nil
		}, Sent: func(err error) { sent = err }})
		s.Restore(t.Context(), n.payload(t, mangle), n.payload(t, "*nat"+nat))
		if !strings.Contains(stood, "ip mangle") || strings.Contains(stood, "ip nat") || sent != nil {
			t.Errorf("the rider was written when these tables stood:\n%sand the answer is %v", stood, sent)
		}
		if moved := mustStamp(t, n.kernel, rules.IPv4).Value - before; moved != 2 {
			t.Errorf("%d transactions, want 2", moved)
		}
		n.wantSaved(t, n.saved)
	})
}

// TestRidersOfRefusedTables: the kernel refuses the tables, so iptables-restore
// writes the tables that it can. The rider is not written, and its sender gets
// the error.
func TestRidersOfRefusedTables(t *testing.T) {
	onNamespace(t, func(t *testing.T) {
		n, loop := newLoopingNode(t)
		s := n.read(t)
		var sent []error
		s.Carry(&Rider{Genid: uint32(mustStamp(t, n.kernel, rules.IPv4).Value), Append: func(b *nft.Batch) error {
			b.Begin(unix.NFT_MSG_NEWTABLE, netlink.Create, unix.NFPROTO_INET)
			b.Text(unix.NFTA_TABLE_NAME, "ours")
			b.End()
			return nil
		}, Sent: func(err error) { sent = append(sent, err) }})
		s.Restore(t.Context(), n.payload(t, lossyRules+loop))
		var refused *nft.RefusedError
		if len(sent) != 1 || !errors.As(sent[0], &refused) {
			t.Errorf("the rider was answered %v", sent)
		}
		if stands := nstest.Command(t, "nft", "list", "tables"); strings.Contains(stands, "ours") || !strings.Contains(stands, "ip nat") {
			t.Errorf("these tables stand:\n%s", stands)
		}
	})
}
