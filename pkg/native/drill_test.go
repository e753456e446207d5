package native_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestDrillTables: the kernel takes a drill's table in each family. Each way of taking it is heard
// as another process's commit, is judged as a loss, and is repaired. nft can print the table and
// load it again.
func TestDrillTables(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		k := openKernel(t)
		genid := func() uint32 {
			t.Helper()
			now, err := k.Genid()
			if err != nil {
				t.Fatal(err)
			}
			return now
		}
		write := func(r native.Repair) {
			t.Helper()
			if _, err := k.Write(genid(), []native.Repair{r}, nil); err != nil || !r.Whole() {
				t.Fatalf("%s: %v, whole %t", r.Want.ID.NFT(), err, r.Whole())
			}
		}
		read := func(id tableid.TableID) *native.Table {
			t.Helper()
			r, err := k.Follow(func(t nft.Table) bool { return native.IsDrill(t.Family.Table(t.Name)) })
			if err != nil {
				t.Fatal(err)
			}
			return r.Tables[id]
		}
		for _, family := range []tableid.Family{tableid.IPv4, tableid.IPv6, tableid.Inet, tableid.ARP, tableid.Bridge, tableid.Netdev} {
			id := family.Table(native.DrillName)
			write(native.NewRepair(native.ByCreate, native.NewDrillTable(family, "0123456789abcdef"), nil, 0))
			want := read(id)
			if want == nil || want.Empty() {
				t.Fatalf("%s: it is %+v", id.NFT(), want)
			}
			text := nstest.Command(t, "nft", "list", "table", family.NFT(), native.DrillName)
			if !strings.Contains(text, `comment "canaryd drill 0123456789abcdef"`) || !strings.Contains(text, "elements = { 80 : goto canary }") || strings.Contains(text, "hook") {
				t.Errorf("nft prints\n%s", text)
			}
			for _, kind := range native.DrillKinds() {
				if _, _, err := k.Hear(genid()); err != nil {
					t.Fatal(err)
				}
				if _, err := k.TakeDrill(genid(), []*native.Table{want}, kind); err != nil {
					t.Fatalf("%s, %s: %v", id.NFT(), kind, err)
				}
				commits, missed, err := k.Hear(genid())
				if err != nil || missed || len(commits) != 1 || commits[0].Own || commits[0].Deeds[id] == nil {
					t.Fatalf("%s, %s: it is heard as %+v, missed %t, %v", id.NFT(), kind, commits, missed, err)
				}
				deed := *commits[0].Deeds[id]
				deed.By = native.NotOwner
				now := read(id)
				f := native.Judge(native.Evidence{Was: want, Now: now, Deeds: []*native.Deed{&deed}})
				if f.Verdict != kind || f.Remedy == native.NoRemedy {
					t.Fatalf("%s, %s: it is judged as %+v", id.NFT(), kind, f)
				}
				repair := native.NewRepair(f.Remedy, want, now, 0)
				write(repair)
				if now = read(id); !repair.Repaired(now, false) || now.Digest() != want.Digest() {
					t.Errorf("%s, %s: after the repair it differs: %v", id.NFT(), kind, native.Diff(want, now))
				}
				want = now
			}
			nstest.Command(t, "nft", "delete", "table", family.NFT(), native.DrillName)
			nstest.CommandInput(t, text, "nft", "-f", "-")
		}
		nstest.Command(t, "nft", "delete", "table", "ip", native.DrillName)
		nstest.Command(t, "nft", "add", "table", "ip", native.DrillName)
		if err := native.RemoveDrills(nft.NewPort()); err != nil {
			t.Error(err)
		}
		if left := nstest.Command(t, "nft", "list", "tables"); left != "table ip canaryd-drill\n" {
			t.Errorf("of six drills' tables, and one of another process, these are left:\n%s", left)
		}
	})
}

// TestADrillTakesNoPlace: as many rules are guarded as the limit allows. A drill's table must not
// make the largest table too large.
func TestADrillTakesNoPlace(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, "table ip full {\n chain a {\n"+strings.Repeat("  counter accept\n", 20)+" }\n}\n", "nft", "-f", "-")
		units := capture(t, dial(t)).Tables[tableid.IPv4.Table("full")].Weight().Units()
		k := openLimited(t, units)
		if _, err := k.Follow(everything); err != nil {
			t.Fatal(err)
		}
		genid, err := k.Genid()
		if err == nil {
			_, err = k.Write(genid, []native.Repair{native.NewRepair(native.ByCreate, native.NewDrillTable(tableid.IPv4, "0123456789abcdef"), nil, 0)}, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // read, and then followed
			r, err := k.Follow(everything)
			if err != nil || len(r.Tables) != 2 || len(r.LeftOut) != 0 {
				t.Fatalf("of %d units these are left out: %v, %v", units, r.LeftOut, err)
			}
			nstest.Command(t, "nft", "add", "chain", "ip", native.DrillName, "more")
		}
	})
}
