package daemon

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestTablesOfSeveralOwnersGo: no owner deletes another one's tables with its own, so such a
// commit is a flush, or another process's deed. For a table without a known owner the family's
// witness decides, if it exists.
func TestTablesOfSeveralOwnersGo(t *testing.T) {
	var (
		nat    = tableid.IPv4.Table("nat")
		nat6   = tableid.IPv6.Table("nat")
		proxy6 = tableid.IPv6.Table("kube-proxy")
		fw     = tableid.Inet.Table("fw")
		fw2    = tableid.Inet.Table("fw2")
		ours   = tableid.IPv4.Table("canaryd-standby")
	)
	for _, test := range []struct {
		name    string
		table   tableid.TableID
		deleted []tableid.TableID
		stands  bool // the family's witness
		want    string
	}{
		{"alone", proxyTable, []tableid.TableID{proxyTable}, true, ""},
		{"both tables of one owner", proxyTable, []tableid.TableID{proxyTable, proxy6}, true, ""},
		{"with iptables' tables", proxyTable, []tableid.TableID{nat6, proxyTable, nat}, true, "ip nat"},
		{"with another owner's", proxyTable, []tableid.TableID{proxyTable, dockerTable}, true, "ip docker-bridges"},
		{"with one whose owner is not known", proxyTable, []tableid.TableID{proxyTable, fw}, true, "inet fw"},
		{"with canaryd's own", proxyTable, []tableid.TableID{proxyTable, ours}, true, ""},
		{"its owner is not known, while the witness stands", fw, []tableid.TableID{fw, nat}, true, ""},
		{"its owner is not known, and no witness stands", fw, []tableid.TableID{fw, nat}, false, "ip nat"},
		{"neither owner is known, and no witness stands", fw, []tableid.TableID{fw, fw2}, false, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := nativeRealm{witness: map[tableid.Family]native.Witness{}}
			if test.stands {
				r.witness[test.table.Family] = native.NewWitness("0123", false)
			}
			c := native.Commit{Deeds: map[tableid.TableID]*native.Deed{}}
			for _, id := range test.deleted {
				c.Deeds[id] = &native.Deed{Deleted: true}
			}
			if got := r.strangerOf(test.table, c); got != test.want {
				t.Errorf("with %q, want %q", got, test.want)
			}
		})
	}
}

// TestTablesGoWithAStrangers: a commit deletes a native table together with another owner's.
// The table is restored although the witness exists, and the record has the reason.
func TestTablesGoWithAStrangers(t *testing.T) {
	nativeNode(t, setup{}, func(t *testing.T, r *rig, k *fakeNative) {
		k.commit(false, func(deed func(tableid.TableID) *native.Deed, _ *native.Commit) {
			deed(tableid.IPv4.Table("nat")).Deleted = true
			deed(proxyTable).Deleted = true
			delete(k.tables, proxyTable)
		})
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a", "b"))
		k.wantNative(t, tableOf(dockerTable, "c"))
		r.wantOneFlush("table_deleted", reload.Proved)
		r.wantReady()
	})
}

// TestTheWitnesssNameIsTaken: another process has a table with the witness's name. The witness
// gets another name, and status and a metric say that it exists.
func TestTheWitnesssNameIsTaken(t *testing.T) {
	k := newFakeNative(tableOf(proxyTable, "a"))
	k.taken = true
	nativeNode(t, setup{guarded: k}, func(t *testing.T, r *rig, k *fakeNative) {
		table := r.d.Status().Native[0].Witness
		if !strings.HasPrefix(table, native.WitnessName+"-") {
			t.Errorf("the witness is %q", table)
		}
		if got := r.metrics("native_witness")["native_witness{family=ip,table=ip kube-proxy}"]; got != 1 {
			t.Errorf("the metric is %v of %v", got, r.metrics("native_witness"))
		}
		if n := strings.Count(r.log.String(), "Another process owns a table with the witness's name"); n != 1 {
			t.Errorf("it is logged %d times", n)
		}
		k.flushRuleset()
		r.settled()
		k.wantNative(t, tableOf(proxyTable, "a"))
		r.wantOneFlush("table_deleted", reload.Proved)
	})
}
