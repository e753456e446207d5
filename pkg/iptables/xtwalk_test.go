package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/nft/nfttest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// An xtBuilder writes entries as the kernel does.
type xtBuilder struct {
	layout xtLayout
	data   []byte
}

func ext(name string, data []byte) []byte {
	out := make([]byte, xtExtDataAt, xtExtDataAt+len(data))
	binary.NativeEndian.PutUint16(out, uint16(xtExtDataAt+len(data)))
	copy(out[xtExtNameAt:xtExtNameAt+xtExtNameLen-1], name)
	return append(out, data...)
}

// add appends an entry and returns its offset.
func (b *xtBuilder) add(target []byte, matches ...[]byte) uint32 {
	at := len(b.data)
	entry := make([]byte, b.layout.size)
	for _, m := range matches {
		entry = append(entry, m...)
	}
	binary.NativeEndian.PutUint16(entry[b.layout.targetOffset:], uint16(len(entry)))
	entry = append(entry, target...)
	binary.NativeEndian.PutUint16(entry[b.layout.nextOffset:], uint16(len(entry)))
	for i := range 16 {
		entry[b.layout.counters+i] = 0xaa
	}
	entry[b.layout.comefrom] = 0xbb
	b.data = append(b.data, entry...)
	return uint32(at)
}

func verdict(v int32) []byte {
	return ext("", binary.NativeEndian.AppendUint64(nil, uint64(uint32(v))))
}

func errorTarget(name string) []byte {
	data := make([]byte, 32)
	copy(data, name)
	return ext(xtError, data)
}

// fallThrough appends an entry whose verdict leads to the next entry.
func (b *xtBuilder) fallThrough(matches ...[]byte) {
	size := len(b.data) + b.layout.size + len(verdict(0))
	for _, m := range matches {
		size += len(m)
	}
	b.add(verdict(int32(size)), matches...)
}

// sampleTable has INPUT with two rules, OUTPUT with none and the chain X with
// a comment-only rule.
func sampleTable(family rules.Family) (xtInfo, []byte) {
	b := xtBuilder{layout: xtLayoutOf(family)}
	var info xtInfo
	info.validHooks = 1<<1 | 1<<3
	info.hookEntry[1] = b.add(verdict(-2), ext("comment", nfttest.CommentInfo("drop it")))
	b.fallThrough(ext("tcp", make([]byte, 16)), ext("comment", nfttest.CommentInfo("witness")))
	info.underflow[1] = b.add(verdict(-2)) // policy
	info.hookEntry[3] = b.add(verdict(-2))
	info.underflow[3] = info.hookEntry[3]
	b.add(errorTarget("X"))
	b.fallThrough(ext("comment", nfttest.CommentInfo("nonce")))
	b.add(verdict(-5)) // RETURN
	b.add(errorTarget("EMPTY"))
	b.add(verdict(-5))
	b.add(errorTarget(xtError))
	info.size = uint32(len(b.data))
	return info, b.data
}

func TestXTLook(t *testing.T) {
	for _, family := range rules.Families() {
		t.Run(family.String(), func(t *testing.T) {
			info, data := sampleTable(family)
			at := func(chain string) Place { return Place{Table: rules.Filter, Chain: chain} }
			places := []Place{at("INPUT"), at("OUTPUT"), at("FORWARD"), at("X"), at("EMPTY"), at(xtError), {Table: rules.Nat, Chain: "X"}}
			look := newXTProbe(family, places)
			if err := look.table(rules.Filter, info, data); err != nil {
				t.Fatal(err)
			}
			want := map[Place]Holding{
				at("INPUT"):                    {Presence: Present, Rules: 2, Comments: []string{"witness"}},
				at("OUTPUT"):                   {Presence: Present},
				at("FORWARD"):                  {Presence: NoChain},
				at("X"):                        {Presence: Present, Rules: 1, Comments: []string{"nonce"}},
				at("EMPTY"):                    {Presence: Present},
				at(xtError):                    {Presence: NoChain},
				{Table: rules.Nat, Chain: "X"}: {Presence: NoTable},
			}
			if diff := cmp.Diff(want, look.probed().Holdings); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestXTLookMasksCounters(t *testing.T) {
	digest := func(change func(entry []byte)) uint64 {
		info, data := sampleTable(rules.IPv4)
		change(data)
		look := newXTProbe(rules.IPv4, nil)
		if err := look.table(rules.Filter, info, data); err != nil {
			t.Fatal(err)
		}
		return look.probed().Digest
	}
	layout := xtLayoutOf(rules.IPv4)
	plain := digest(func([]byte) {})
	if got := digest(func(e []byte) { e[layout.counters]++; e[layout.counters+15]++; e[layout.comefrom+3]++ }); got != plain {
		t.Error("counters and comefrom are in the digest")
	}
	if got := digest(func(e []byte) { e[0]++ }); got == plain {
		t.Error("an address is not in the digest")
	}
}

// A shape fits the entries only if it has the policies in their places.
func TestShapesFit(t *testing.T) {
	for _, family := range rules.Families() {
		layout := xtLayoutOf(family)
		for name, c := range map[string]struct {
			change func(info *xtInfo, policy []byte)
			want   bool
		}{
			"as it is":               {func(*xtInfo, []byte) {}, true},
			"it drops":               {func(_ *xtInfo, p []byte) { p[layout.size+xtExtDataAt]++ }, true},
			"a chain less":           {func(info *xtInfo, _ []byte) { info.validHooks, info.underflow[3] = 1<<1, 1 }, true},
			"a rule is there":        {func(info *xtInfo, _ []byte) { info.underflow[1] = info.hookEntry[1] }, false},
			"a head is there":        {func(info *xtInfo, _ []byte) { info.underflow[1] += 2 * uint32(layout.size+xtStandardLen) }, false},
			"the middle of an entry": {func(info *xtInfo, _ []byte) { info.underflow[1] += 8 }, false},
			"nothing is there":       {func(info *xtInfo, _ []byte) { info.underflow[1] = info.size }, false},
			"far behind the end":     {func(info *xtInfo, _ []byte) { info.underflow[1] = 1<<32 - 1 }, false},
			"it returns":             {func(_ *xtInfo, p []byte) { copy(p[layout.size:], verdict(-5)) }, false},
			"it has a condition":     {func(_ *xtInfo, p []byte) { p[0] = 10 }, false},
		} {
			t.Run(family.String()+" "+name, func(t *testing.T) {
				info, data := sampleTable(family)
				c.change(&info, data[info.underflow[1]:])
				if got := info.fits(family, data); got != c.want {
					t.Errorf("it fits: %t, want %t", got, c.want)
				}
			})
		}
	}
}

func TestWalkEntriesMalformed(t *testing.T) {
	layout := xtLayoutOf(rules.IPv4)
	for _, c := range []struct {
		name   string
		change func([]byte) []byte
	}{
		{"cut off", func(d []byte) []byte { return d[:len(d)-1] }},
		{"too short for a struct", func(d []byte) []byte { return d[:50] }},
		{"no step forward", func(d []byte) []byte { d[layout.nextOffset], d[layout.nextOffset+1] = 0, 0; return d }},
		{"a verdict without a number", func(d []byte) []byte {
			short := layout.size + xtExtDataAt
			binary.NativeEndian.PutUint16(d[layout.targetOffset:], uint16(layout.size))
			binary.NativeEndian.PutUint16(d[layout.nextOffset:], uint16(short))
			clear(d[layout.size:short])
			return d[:short]
		}},
		{"target inside the struct", func(d []byte) []byte { d[layout.targetOffset], d[layout.targetOffset+1] = 4, 0; return d }},
	} {
		t.Run(c.name, func(t *testing.T) {
			info, data := sampleTable(rules.IPv4)
			err := walkEntries(rules.IPv4, info, c.change(data), xtVisitor{chain: func(string, int) {}, rule: func(xtRule) {}})
			if !errors.Is(err, errWalk) {
				t.Errorf("got %v, want %v", err, errWalk)
			}
		})
	}
}

func FuzzWalkEntries(f *testing.F) {
	for _, family := range rules.Families() {
		info, data := sampleTable(family)
		f.Add(family == rules.IPv6, info.validHooks, info.hookEntry[1], info.hookEntry[3], data)
	}
	f.Fuzz(func(_ *testing.T, v6 bool, hooks, first, second uint32, data []byte) {
		family := rules.IPv4
		if v6 {
			family = rules.IPv6
		}
		data = bytes.Clone(data) // masked below, but the fuzzer's data must not change
		info := xtInfo{validHooks: hooks, hookEntry: [5]uint32{0, first, 0, second, 0}, underflow: [5]uint32{0, first, 0, second, 0}}
		info.fits(family, data)
		look := newXTProbe(family, []Place{{Table: rules.Filter, Chain: "INPUT"}, {Table: rules.Filter, Chain: "X"}})
		_ = look.table(rules.Filter, info, data) // may fail, must not panic
		l := newLexicon(family, true, nil)
		if table, err := readTable(rules.Filter, info, data, l, nil, nil); err == nil {
			l.show([]xtTable{table}, func(rules.TableName) *rules.Table { return nil })
		}
	})
}

// iptables-legacy fills the unused bytes of a wide IPv4 address in two ways for
// one rule. They must not count.
func TestWideAddresses(t *testing.T) {
	extension := func(name string, revision byte, size int) []byte {
		ext := bytes.Repeat([]byte{0xff}, xtExtDataAt+size)
		clear(ext[xtExtNameAt:xtExtDataAt])
		copy(ext[xtExtNameAt:], name)
		ext[xtExtDataAt-1] = revision
		return ext
	}
	for _, test := range []struct {
		name     string
		revision byte
		size     int
		zeroes   int
	}{
		{"recent", 1, 232, 12},
		{"recent", 0, 212, 0},
		{"connlimit", 1, 32, 12},
		{"conntrack", 3, 168, 8 * 12},
		{"policy", 0, 312, 16 * 12},
		{"HMARK", 0, 64, 2 * 12},
		{"tcp", 0, 16, 0},
		{"conntrack", 3, 20, 12}, // cut off
	} {
		ext := extension(test.name, test.revision, test.size)
		maskWide(ext)
		if got := bytes.Count(ext[xtExtDataAt:], []byte{0}); got != test.zeroes {
			t.Errorf("%s of revision %d: %d bytes are cleared, want %d", test.name, test.revision, got, test.zeroes)
		}
	}
}
