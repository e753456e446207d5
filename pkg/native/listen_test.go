package native_test

import (
	"encoding/binary"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A listener hears of commits, as the loop does.
type listener struct {
	conn  *netlink.Conn
	rec   native.Recorder
	heard uint32 // the genid up to which it heard
}

func listen(t *testing.T, genid uint32) *listener {
	t.Helper()
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetReadBuffer(8 << 20); err != nil {
		t.Fatal(err)
	}
	if err := conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		t.Fatal(err)
	}
	return &listener{conn: conn, heard: genid}
}

// upTo returns the deeds of each commit up to a genid.
func (l *listener) upTo(t *testing.T, genid uint32) []map[tableid.TableID]*native.Deed {
	t.Helper()
	var all []map[tableid.TableID]*native.Deed
	for l.heard != genid {
		messages, err := l.conn.Receive()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range messages {
			kind, family, attrs := uint16(m.Header.Type)&0xff, tableid.Family(m.Data[0]), m.Data[4:]
			if kind != unix.NFT_MSG_NEWGEN {
				if err := l.rec.Take(kind, family, attrs); err != nil {
					t.Fatal(err)
				}
				continue
			}
			now := binary.BigEndian.Uint32(nft.AttrPath(attrs, unix.NFTA_GEN_ID))
			all = append(all, l.rec.End(nft.Commit{Genid: now}))
			l.heard = now
		}
	}
	return all
}
