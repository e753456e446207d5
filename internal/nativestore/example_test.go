package nativestore_test

import (
	"fmt"
	"os"
	"time"

	"github.com/canaryd/canaryd/internal/nativestore"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A daemon saves the tables that ought to be in force, and the next one loads them.
func ExampleStore() {
	dir, err := os.MkdirTemp("", "state")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	here := nativestore.Identity{BootID: "b", NetNS: "n", Release: "6.18"}
	table := &native.Table{ID: tableid.IPv4.Table("kube-proxy"), Chains: []native.Chain{{Name: "services"}}}
	row := nativestore.Row{
		Verdict:    native.Intact,
		Generation: nativestore.GenerationOf(table, table.Digest(), reload.MadeAtStart, time.Now(), time.Hour),
	}
	if err := nativestore.New(dir, here).Save(nativestore.Stored{Tables: []nativestore.Row{row}}); err != nil {
		panic(err)
	}

	stored, err := nativestore.New(dir, here).Load()
	for _, r := range stored.Tables {
		fmt.Println(r.Generation.Table.ID.NFT(), r.Generation.Chains, "chain", r.Verdict, err)
	}
	// Output:
	// ip kube-proxy 1 chain intact <nil>
}
