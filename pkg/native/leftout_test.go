package native_test

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// addresses adds n elements to a set, from the address with that number on.
func addresses(table string, from, n int) string {
	var b strings.Builder
	for i := from; i < from+n; i++ {
		if i%1000 == from%1000 {
			if i > from {
				b.WriteString("}\n")
			}
			fmt.Fprintf(&b, "add element inet %s addresses { ", table)
		}
		fmt.Fprintf(&b, "10.%d.%d.%d, ", i>>16, i>>8&255, i&255)
	}
	b.WriteString("}\n")
	return b.String()
}

// withSet makes tables with an empty set.
func withSet(names ...string) (text string) {
	for _, name := range names {
		text += fmt.Sprintf("table inet %s { set addresses { type ipv4_addr; }\n chain c { ip saddr @addresses drop; }\n }\n", name)
	}
	return text
}

// limited is a Kernel with a limit, in a test of the tables that it leaves out.
type limited struct {
	*native.Kernel
	t *testing.T
}

// wants fails unless Follow keeps exactly the tables of kept, and leaves out the tables of left.
func (k limited) wants(kept, left string) {
	k.t.Helper()
	names := func(all func(func(tableid.TableID) bool)) string {
		var list []string
		for id := range all {
			list = append(list, id.Name)
		}
		slices.Sort(list)
		return strings.Join(list, " ")
	}
	r, err := k.Follow(everything)
	if err != nil {
		k.t.Fatal(err)
	}
	if diff := cmp.Diff([]string{kept, left}, []string{names(maps.Keys(r.Tables)), names(maps.Keys(r.LeftOut))}); diff != "" {
		k.t.Errorf("kept and left out (-want +got)\n%s", diff)
	}
}

// allocated returns the bytes that f allocates in all, freed ones among them.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestATableThatIsTooLarge: canaryd breaks off the read of a table of 200,000 elements, and keeps
// the others. It neither follows the table, nor reads more of it the next time.
func TestATableThatIsTooLarge(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, withSet("large", "small")+addresses("small", 0, 10)+addresses("large", 0, 200_000), "nft", "-f", "-")
		k := limited{openLimited(t, 1000), t}
		for _, read := range []string{"the first", "the next"} {
			start := time.Now()
			took := allocated(func() { k.wants("small", "large") })
			t.Logf("%s read: %d KiB, %v", read, took>>10, time.Since(start))
			if took > 2<<20 { // a read of the whole set allocates 40 MiB
				t.Errorf("%s read allocates %d KiB", read, took>>10)
			}
		}
		nstest.Command(t, "nft", "add element inet large addresses { 11.0.0.1 }")
		k.wants("small", "large")
		nstest.Command(t, "nft", "flush set inet large addresses")
		k.wants("large small", "")
		nstest.CommandInput(t, withSet("large")+addresses("large", 0, 20_000), "nft", "-f", "-")
		k.wants("small", "large")
		nstest.Command(t, "nft", "delete table inet large")
		k.wants("small", "")
	})
}

// TestATableThatGrows: a followed table becomes too large by notifications. canaryd stops following
// it. The table returns at three quarters of the limit. Seven addresses weigh as much as a rule.
func TestATableThatGrows(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, withSet("one", "two")+addresses("one", 0, 7*40)+addresses("two", 0, 7*30), "nft", "-f", "-")
		k := limited{openLimited(t, 100), t}
		k.wants("one two", "")
		r, err := k.Follow(everything)
		if err != nil || !r.Followed(tableid.Inet.Table("two")) {
			t.Fatalf("it is not followed, %v", err)
		}
		nstest.CommandInput(t, addresses("two", 7*30, 5000), "nft", "-f", "-")
		took := allocated(func() { k.wants("one", "two") })
		if t.Logf("%d KiB", took>>10); took > 3<<20 { // without a limit 5 MiB
			t.Errorf("the commit and the read allocate %d KiB", took>>10)
		}
		nstest.CommandInput(t, "flush set inet two addresses\n"+addresses("two", 0, 7*40), "nft", "-f", "-")
		k.wants("one", "two") // all would fit, but not into three quarters
		nstest.CommandInput(t, "flush set inet two addresses\n"+addresses("two", 0, 7*30), "nft", "-f", "-")
		k.wants("one two", "")
		nstest.CommandInput(t, addresses("one", 7*40, 7*40), "nft", "-f", "-")
		k.wants("two", "one") // of two the largest
		nstest.CommandInput(t, addresses("two", 7*30, 5000)+"flush set inet one addresses\n", "nft", "-f", "-")
		k.wants("one", "two")
	})
}

// TestOneGrowsWhileAnotherShrinks: one transaction makes a large table small and a small table
// large. canaryd reads both, and leaves out the second only.
func TestOneGrowsWhileAnotherShrinks(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, withSet("one", "two", "idle")+addresses("one", 0, 7*70)+addresses("two", 0, 7*10), "nft", "-f", "-")
		k := limited{openLimited(t, 100), t}
		k.wants("idle one two", "")
		for range 2 {
			nstest.CommandInput(t, "flush set inet one addresses\n"+addresses("one", 0, 7*10)+addresses("two", 7*10, 7*60), "nft", "-f", "-")
			k.wants("idle one two", "")
			nstest.CommandInput(t, "flush set inet two addresses\n"+addresses("two", 0, 7*10)+addresses("one", 7*10, 7*60), "nft", "-f", "-")
			k.wants("idle one two", "")
		}
		nstest.CommandInput(t, "flush set inet one addresses\n"+addresses("two", 7*10, 5000), "nft", "-f", "-")
		k.wants("idle one", "two")
		nstest.CommandInput(t, "flush set inet two addresses\n"+addresses("one", 0, 5000), "nft", "-f", "-")
		k.wants("idle two", "one")
		nstest.Command(t, "nft", "flush ruleset")
		k.wants("", "")
	})
}

// TestPacketsMakeATableTooLarge: packets add elements without a commit, and Refresh reads them.
func TestPacketsMakeATableTooLarge(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		nstest.Command(t, "ip", "link", "set", "lo", "up")
		nstest.CommandInput(t, withSet("one")+`table ip grows {
			set seen { type inet_service; flags dynamic; size 9999; }
			chain c { type filter hook output priority 0; update @seen { udp sport }; }
		}`, "nft", "-f", "-")
		k := limited{openLimited(t, 8), t}
		k.wants("grows one", "")
		for range 100 {
			sendPackets(t, 1) // each from a port of its own
		}
		k.wants("grows one", "")
		if _, err := k.Refresh(time.Minute); err != nil {
			t.Fatal(err)
		}
		k.wants("one", "grows")
	})
}

// TestElementsOfATableExpire: a table is left out because of elements with timeouts. Follow says
// that it may fit again without a commit, and takes it up when they have expired.
func TestElementsOfATableExpire(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, withSet("lasting")+"add table inet brief\nadd set inet brief addresses { type ipv4_addr; timeout 2s; }\n"+
			addresses("lasting", 0, 5000)+addresses("brief", 0, 5000), "nft", "-f", "-")
		k := openLimited(t, 100)
		testkit.Until(t, "the table is taken up", func() error {
			r, err := k.Follow(everything)
			brief, lasting := tableid.Inet.Table("brief"), tableid.Inet.Table("lasting")
			switch {
			case err != nil:
				return err
			case !r.Fleeting[brief] || r.Fleeting[lasting]:
				t.Fatalf("packets or time change %v", r.Fleeting)
			case r.Tables[brief] == nil:
				return fmt.Errorf("left out are %v", r.LeftOut)
			}
			return nil
		})
	})
}

// TestManyChainsAreTooMuch: a table is too large by chains without rules, and by long rules.
func TestManyChainsAreTooMuch(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		var chains, long strings.Builder
		for i := range 1000 {
			fmt.Fprintf(&chains, "add chain inet chains c%d\n", i)
		}
		for range 40 {
			fmt.Fprintf(&long, "add rule inet long c %s accept\n", strings.Repeat("counter ", 100))
		}
		nstest.CommandInput(t, withSet("chains", "long", "small")+chains.String()+long.String(), "nft", "-f", "-")
		limited{openLimited(t, 100), t}.wants("small", "chains long")
		limited{openKernel(t), t}.wants("chains long small", "")
	})
}

// TestABrokenOffDump: the next answer on the same connection belongs to the next request.
func TestABrokenOffDump(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, withSet("large", "small")+addresses("large", 0, 5000), "nft", "-f", "-")
		conn := dial(t)
		calls := 0 // each with the many elements of a datagram
		asked := []nft.StringAttr{{Kind: unix.NFTA_SET_ELEM_LIST_TABLE, Value: "large"}, {Kind: unix.NFTA_SET_ELEM_LIST_SET, Value: "addresses"}}
		err := conn.EachObject(nft.Elements, tableid.Inet, asked, func([]byte) error { calls++; return nft.ErrEnough })
		if !errors.Is(err, nft.ErrEnough) || calls != 1 {
			t.Errorf("%d calls, %v", calls, err)
		}
		if n := len(capture(t, conn).Tables); n != 2 {
			t.Errorf("%d tables", n)
		}
	})
}
