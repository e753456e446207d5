package nft_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A connection sends requests to the kernel; no request creates anything. This
// example needs CAP_NET_ADMIN, so it is compiled and not run.
func ExampleDial() {
	conn, err := nft.Dial()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	genid, err := conn.Genid()
	switch {
	case errors.Is(err, nft.ErrNone):
		fmt.Println("this kernel has no nf_tables")
		return
	case err != nil: // unknown is not empty
		panic(err)
	}
	fmt.Println("at genid", genid)
	err = conn.EachTable(func(t nft.Table) error {
		fmt.Println(t.Family.NFT(), t.Name)
		return nil
	})
	if errors.Is(err, nft.ErrInterrupted) {
		fmt.Println("another process committed meanwhile: ask again")
	}
}

// A batch is written message by message, and consists of bytes until it is sent.
func ExampleBatch() {
	b := nft.NewBatch()
	b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, tableid.Inet)
	b.Text(unix.NFTA_TABLE_NAME, "mine")
	b.End()
	mark := b.Mark()
	b.Begin(unix.NFT_MSG_DELTABLE, 0, tableid.IPv4)
	b.Text(unix.NFTA_TABLE_NAME, "another")
	b.End()
	b.Cut(mark) // on second thoughts
	b.Finish()
	fmt.Println(len(b.Wire()), "bytes")
	for _, name := range []string{"mine", "another"} {
		fmt.Println(name, bytes.Contains(b.Wire(), []byte(name)))
	}
	// Output:
	// 80 bytes
	// mine true
	// another false
}

// A guarded write becomes stale when another process commits between the read and
// the write: the kernel itself refuses it. This example needs CAP_NET_ADMIN, so
// it is compiled and not run.
func ExampleBatch_Guard() {
	conn, err := nft.Dial()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	genid, err := conn.Genid()
	if err != nil {
		panic(err)
	}
	if there, err := conn.HasTable(tableid.Inet, "mine"); err != nil || there {
		return
	}
	b := nft.NewBatch()
	b.Guard(genid)
	b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, tableid.Inet)
	b.Text(unix.NFTA_TABLE_NAME, "mine")
	b.End()
	b.Finish()
	var refused *nft.RefusedError
	switch err := b.Send(); {
	case errors.Is(err, nft.ErrStale):
		fmt.Println("nothing was written: read again")
	case errors.As(err, &refused):
		fmt.Println("nothing was written: the kernel refuses", refused.What)
	case err == nil:
		fmt.Println("the genid is", nft.Following(genid))
	}
}

// A subscription receives the end of each commit, with the process that made it.
// This example needs CAP_NET_ADMIN, so it is compiled and not run.
func ExampleSubscribe() {
	subscription, err := nft.Subscribe(func(port, pid uint32) bool { return false })
	if err != nil {
		panic(err)
	}
	defer subscription.Close()
	for {
		commit, err := subscription.Receive()
		switch {
		case errors.Is(err, nft.ErrOverflow):
			fmt.Println("commits were missed: subscribe again, and then look at everything")
			return
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			panic(err)
		default:
			fmt.Println(commit.Genid, commit.PID, commit.Comm)
		}
	}
}

// A mirror holds whole tables, of any family, and reads again only the chains that commits
// touched. This example needs CAP_NET_ADMIN, so it is compiled and not run.
func ExampleMirror() {
	conn, err := nft.Dial()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	mirror := nft.NewMirror(conn, nft.MirrorConfig{Genid: conn.Genid, Own: func(port, pid uint32) bool { return false }})
	defer mirror.Close()
	bytesOf := nft.NewRuleStore()
	netavark := mirror.Add(nft.FamilyConfig{
		Family: tableid.Inet,
		Tables: func(name string) bool { return name == "netavark" },
		Rules:  &bytesOf,
	})
	ctx := context.Background()
	done, err := mirror.Turn(ctx)
	if err != nil {
		panic(err)
	}
	defer done()
	genid, err := mirror.Read(ctx, netavark) // again later: it reads the changes only
	if err != nil {
		panic(err)
	}
	for _, name := range netavark.Chains("netavark") {
		for _, id := range netavark.Chain(nft.Place{Table: "netavark", Chain: name}).IDs {
			fmt.Println(genid, name, bytesOf.Rule(id, nil).Expressions)
		}
	}
}
