package native_test

import (
	"errors"
	"fmt"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/owners"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A table is captured and, after a flush, put back and proved. This example needs CAP_NET_ADMIN, so
// it is compiled but not run.
func Example() {
	conn, err := nft.Dial()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	id := tableid.IPv4.Table("kube-proxy")
	wanted := func(t nft.Table) bool { return t.Family.Table(t.Name) == id }
	was, err := native.Capture(conn, wanted)
	if err != nil || was.Tables[id] == nil {
		return
	}
	if err := was.Tables[id].Rehearse(); err != nil {
		fmt.Println("this kernel would not take it again:", err)
	}

	// Then another process flushes.

	now, err := native.Capture(conn, wanted)
	if err != nil || now.Tables[id] != nil {
		return
	}
	batch := nft.NewBatch()
	batch.Guard(now.Genid)
	if _, err := was.Tables[id].Create(batch, native.Options{Age: now.At.Sub(was.At)}); err != nil {
		panic(err)
	}
	batch.Finish()
	if err := batch.Send(); errors.Is(err, nft.ErrStale) {
		fmt.Println("another process wrote meanwhile: read again")
		return
	}
	proof, err := native.Capture(conn, wanted)
	if err != nil {
		return
	}
	fmt.Println(len(native.Diff(was.Tables[id], proof.Tables[id])) == 0)
}

// The judge is a function of the evidence, and reads nothing.
func ExampleJudge() {
	id := tableid.IPv4.Table("kube-proxy")
	was := &native.Table{ID: id, Handle: 7, Chains: []native.Chain{{Name: "services", Rules: make([]native.Rule, 1)}}}
	for _, deed := range []*native.Deed{
		{Deleted: true, WitnessLost: true},
		{Deleted: true},
		{Deleted: true, By: native.NotOwner},
	} {
		f := native.Judge(native.Evidence{Was: was, Deeds: []*native.Deed{deed}, Habits: owners.HabitsOf(id)})
		fmt.Println(f.Verdict, "-", f.Why)
	}
	// Output:
	// table_deleted - the ruleset was flushed: the witness went with it
	// deleted_by_owner_or_unknown - it was deleted alone: the witness is in place
	// table_deleted - a process deleted it that is not its owner
}

// A diff has the changes of each part of a table.
func ExampleDiff() {
	chain := func(rules int) native.Chain { return native.Chain{Name: "services", Rules: make([]native.Rule, rules)} }
	was := &native.Table{ID: tableid.Inet.Table("mine"), Chains: []native.Chain{chain(3)}}
	now := &native.Table{ID: tableid.Inet.Table("mine"), Handle: 9, Chains: []native.Chain{chain(0)}}
	for _, c := range native.Diff(was, now) {
		fmt.Println(c)
	}
	// Output:
	// chain services: 3 rules lost, empty
}
