package native

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nat"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// sampleAttrs are messages with the attributes that the decoder looks into.
func sampleAttrs() [][]byte {
	text := func(kind uint16, s string) []byte { return nft.AppendAttr(nil, kind, s, 1) }
	join := func(all ...[]byte) (out []byte) {
		for _, b := range all {
			out = append(out, b...)
		}
		return out
	}
	expression := func(name string, data ...[]byte) []byte {
		return appendNested(nil, unix.NFTA_LIST_ELEM, join(text(unix.NFTA_EXPR_NAME, name), appendNested(nil, unix.NFTA_EXPR_DATA, join(data...))))
	}
	verdict := appendNested(nil, unix.NFTA_DATA_VERDICT, text(unix.NFTA_VERDICT_CHAIN, "b"))
	list := join(expression("counter"), expression("quota", appendNumber(nil, unix.NFTA_QUOTA_FLAGS, 2)),
		expression("lookup", text(unix.NFTA_LOOKUP_SET, "s")), expression("exthdr"), expression("osf", appendNumber(nil, osfFlags, 0)),
		expression("dynset", text(unix.NFTA_DYNSET_SET_NAME, "s"), milliseconds(unix.NFTA_DYNSET_TIMEOUT, 0),
			appendNested(nil, dynsetExpressions, expression("last"))),
		expression("immediate", appendNested(nil, immediateData, verdict)))
	element := appendNested(nil, unix.NFTA_LIST_ELEM, join(
		appendNested(nil, unix.NFTA_SET_ELEM_KEY, nft.AppendAttr(nil, unix.NFTA_DATA_VALUE, []byte{10, 0, 0, 1}, 0)),
		appendNested(nil, unix.NFTA_SET_ELEM_DATA, verdict), milliseconds(unix.NFTA_SET_ELEM_EXPIRATION, 1000),
		appendNested(nil, elemExpressions, list)))
	return [][]byte{
		join(text(1, "t"), appendNumber(nil, 2, 2), milliseconds(tableHandle, 7)),
		join(text(1, "t"), text(3, "b"), text(unix.NFTA_CHAIN_TYPE, "nat"), appendNumber(nil, chainFlags, chainBinding),
			appendNested(nil, unix.NFTA_CHAIN_HOOK, appendNumber(nil, unix.NFTA_HOOK_HOOKNUM, 0))),
		join(text(1, "t"), text(2, "b"), appendNested(nil, unix.NFTA_RULE_EXPRESSIONS, list)),
		join(text(1, "t"), text(2, "s"), appendNumber(nil, 3, setAnonymous), appendNested(nil, setExpressions, list)),
		join(text(1, "t"), text(2, "s"), appendNested(nil, unix.NFTA_SET_ELEM_LIST_ELEMENTS, element)),
		join(text(1, "t"), text(2, "q"), appendNumber(nil, unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_QUOTA), appendNested(nil, unix.NFTA_OBJ_DATA, appendNumber(nil, unix.NFTA_QUOTA_FLAGS, 3))),
	}
}

// FuzzDecode feeds hostile messages to the decoder, and the decoded objects to all code behind it.
// No message may cause a panic or an endless loop. Each decoded table must equal itself, and it
// must be possible to write it.
func FuzzDecode(f *testing.F) {
	for i, sample := range sampleAttrs() {
		f.Add(uint8(i), sample, sampleAttrs()[(i+2)%6])
	}
	f.Fuzz(func(t *testing.T, kind uint8, one, two []byte) {
		table := &Table{ID: tableid.Inet.Table("t")}
		for i, b := range [][]byte{one, two, one} {
			takeAny(table, (int(kind)+2*i)%6, b)
		}
		table.Digest()
		if changes := Diff(table, table); len(changes) != 0 {
			t.Errorf("a table differs from itself: %v", changes)
		}
		Diff(table, &Table{ID: table.ID})
		if lost, got := Difference(table, table); len(lost)+len(got) > 0 || len(slices.Collect(table.Lines())) == 0 {
			t.Errorf("a table differs from itself in words: %v, %v", lost, got)
		}
		for range table.jumps() {
		}
		renumbered := *table
		renumbered.Chains = slices.Clone(table.Chains)
		for i := range renumbered.Chains {
			renumbered.Chains[i].Rules = slices.Clone(renumbered.Chains[i].Rules)
			for j := range renumbered.Chains[i].Rules {
				renumbered.Chains[i].Rules[j].Handle += 7
			}
		}
		var entries []Entry
		NewListing(&renumbered).Each(func(e *Entry) { entries = append(entries, *e) })
		NewListing(table).Each(func(e *Entry) {
			other := entries[0]
			entries = entries[1:]
			for i := range e.Len() {
				if e.Digest(i) != other.Digest(i) || e.Text(i) == "" {
					t.Errorf("%s %s: other handles change a digest, or it has no words", e.Kind, e.Name)
				}
			}
		})
		lacks := func(_ nft.ObjectKind, name string) bool { return name == "eth0" }
		if _, err := table.Create(nft.NewBatch(), Options{Age: 1e9, Lacks: lacks}); err != nil {
			t.Errorf("what was read cannot be written: %v", err)
		}
		if _, err := table.Refill(nft.NewBatch(), &Table{ID: table.ID, Sets: table.Sets}, Options{}); err != nil {
			t.Errorf("what was read cannot be put back: %v", err)
		}
		flow := nat.Flow{Protocol: nat.TCP, Source: netip.MustParseAddrPort("10.0.0.1:1"), Destination: netip.MustParseAddrPort("10.0.0.2:2")}
		nat.New(noSite{}, NatHooks([]*Table{table}, tableid.IPv4)).Translates(flow)
		var r Recorder
		for message := uint16(0); message < 25; message++ {
			_ = r.Take(message, tableid.Inet, one)
		}
		deeds := []*Deed{r.End(nft.Commit{})[table.ID]}
		if deeds[0] == nil {
			deeds = nil
		}
		Judge(Evidence{Was: table, Deeds: deeds})
		Judge(Evidence{Was: table, Now: &Table{ID: table.ID}, Deeds: deeds})
		comment(one)
	})
}

// TestNothingGoesInCircles: an anonymous set names itself many times. It must cost no more than a
// set that does not.
func TestNothingGoesInCircles(t *testing.T) {
	lookup := appendNested(nil, unix.NFTA_LIST_ELEM, append(nft.AppendAttr(nil, unix.NFTA_EXPR_NAME, "lookup", 1),
		appendNested(nil, unix.NFTA_EXPR_DATA, nft.AppendAttr(nil, unix.NFTA_LOOKUP_SET, "s", 1))...))
	attrs := appendNested(nil, setExpressions, bytes.Repeat(lookup, 500))
	rule := Rule{Attrs: appendNested(nil, unix.NFTA_RULE_EXPRESSIONS, lookup)}
	table := &Table{Chains: []Chain{{Name: "c", Rules: []Rule{rule}}}, Sets: []Set{{Name: "s", Flags: setAnonymous, Attrs: attrs}}}
	other := *table
	other.Chains = []Chain{{Name: "c"}}
	if table.Digest() == other.Digest() {
		t.Error("one digest of two tables")
	}
}

// takeAny decodes a message as an object of one kind, and adds it to the table.
func takeAny(table *Table, kind int, b []byte) {
	switch kind {
	case 0:
		_, _ = decodeTable(tableid.Inet, b)
	case 1:
		if d, err := decode(nft.Chains, b); err == nil {
			table.Chains = append(table.Chains, d.chain(b))
		}
	case 2:
		if d, err := decode(nft.Rules, b); err == nil && len(table.Chains) > 0 {
			c := &table.Chains[len(table.Chains)-1]
			c.Rules = append(c.Rules, Rule{d.handle, d.attrs})
		}
	case 3:
		if d, err := decode(nft.Sets, b); err == nil {
			table.Sets = append(table.Sets, d.set(b))
		}
	case 4:
		if n := len(table.Sets); n > 0 {
			s := &table.Sets[n-1]
			_ = decodeElements(b, func(e Element) { s.Elements = append(s.Elements, e) })
			s.sort()
		}
	case 5:
		if d, err := decode(nft.Objects, b); err == nil {
			table.Objects = append(table.Objects, d.object(b))
		}
	}
}

// sampleCommits are the attributes of notifications that fit together. They are a chain, a rule
// with a set of its own, a map that leads to the chain, and an object.
func sampleCommits() [][]byte {
	text := func(kind uint16, s string) []byte { return nft.AppendAttr(nil, kind, s, 1) }
	handle := func(kind uint16, n uint64) []byte { return milliseconds(kind, n) }
	samples := sampleAttrs()
	return [][]byte{
		slices.Concat(text(1, "t"), text(3, "b"), handle(unix.NFTA_CHAIN_HANDLE, 1)),
		slices.Concat(samples[2], handle(unix.NFTA_RULE_HANDLE, 3)),
		slices.Concat(samples[3], handle(setHandle, 2)),
		samples[4],
		slices.Concat(samples[5], handle(objHandle, 4)),
	}
}

// FuzzFollow feeds hostile notifications to a follower. No notification may cause a panic, and the
// follower's digest must always be the digest of the value.
func FuzzFollow(f *testing.F) {
	samples := sampleCommits()
	f.Add([]byte{0x03, 0x29, 0x4c, 0x86, 0x08, 0x86}, samples[0], samples[2], samples[3], samples[1])
	f.Add([]byte{0x83, 0x45, 0x83, 0x92, 0xb4, 0x02, 0x80}, samples[0], samples[4], samples[1], samples[3])
	f.Fuzz(func(t *testing.T, script, one, two, three, four []byte) {
		id := tableid.Inet.Table("t")
		var all follower
		all.seed(&Table{ID: id}, 1, time.Time{})
		genid, now := uint32(1), time.Time{}
		for _, b := range script {
			now = now.Add(time.Second)
			attrs := [][]byte{one, two, three, four}[b>>5&3]
			all.take(nft.Notification{Kind: uint16(b & 0x1f), Family: tableid.Inet, Attrs: attrs, Append: b&1 != 0})
			if b&0x80 == 0 {
				continue
			}
			genid++
			all.end(genid, now)
			table, digest := all.value(id)
			if table == nil {
				continue
			}
			if digest != table.Digest() {
				t.Fatalf("digest %s, and that of the value is %s", digest, table.Digest())
			}
			if changes := Diff(table, table.Timeless()); len(changes) != 0 {
				t.Fatalf("it differs from its copy: %v", changes)
			}
		}
	})
}

// noSite is a node without addresses.
type noSite struct{}

func (noSite) Local(netip.Addr) bool          { return false }
func (noSite) Beyond(string, netip.Addr) bool { return false }
