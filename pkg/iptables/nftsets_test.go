package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// xtOf returns an xt extension of some revision with data.
func xtOf(kind, name string, revision uint32, info []byte) nft.Expression {
	data := nft.AppendAttr(nil, unix.NFTA_MATCH_NAME, name, 1)
	data = nft.AppendAttr(data, unix.NFTA_MATCH_REV, binary.BigEndian.AppendUint32(nil, revision), 0)
	return nft.Expression{Name: kind, Data: nft.AppendAttr(data, unix.NFTA_MATCH_INFO, info, 0)}
}

// fakeSets maps the numbers of sets to their names.
type fakeSets map[uint16]string

func (f fakeSets) name(number uint16) (string, error) {
	if name, ok := f[number]; ok {
		return name, nil
	}
	return "", ErrNoSet
}

func (f fakeSets) number(name string) (uint16, error) {
	for n, s := range f {
		if s == name {
			return n, nil
		}
	}
	return 0, ErrNoSet
}

// infoWith returns data of that size with numbers at these places, and 7 in all
// other bytes.
func infoWith(size int, numbers map[int]uint16) []byte {
	info := bytes.Repeat([]byte{7}, size)
	for at, n := range numbers {
		binary.NativeEndian.PutUint16(info[at:], n)
	}
	return info
}

// Names replace the numbers in each revision of ipset's extensions. Later numbers
// replace the names. No other byte changes.
func TestNumbersOfIpsetsAreReplacedByNames(t *testing.T) {
	then, now := fakeSets{1: "a", 2: "b c", 3: "d"}, fakeSets{1: "d", 9: "a", 4: "b c"}
	type numbers = map[int]uint16
	for _, c := range []struct {
		kind, name    string
		revision      uint32
		size          int
		before, after numbers
		names         []string
	}{
		{"match", "set", 0, 32, numbers{0: 1}, numbers{0: 9}, []string{"a"}},
		{"match", "set", 1, 8, numbers{0: 2}, numbers{0: 4}, []string{"b c"}},
		{"match", "set", 4, 48, numbers{0: 3}, numbers{0: 1}, []string{"d"}},
		{"target", "SET", 0, 64, numbers{0: 1, 32: 3}, numbers{0: 9, 32: 1}, []string{"a", "d"}},
		{"target", "SET", 2, 16, numbers{0: noSetNumber, 4: 3}, numbers{0: noSetNumber, 4: 1}, []string{"", "d"}},
		{"target", "SET", 3, 24, numbers{0: 1, 4: 2, 8: 3}, numbers{0: 9, 4: 4, 8: 1}, []string{"a", "b c", "d"}},
	} {
		t.Run(fmt.Sprint(c.kind, c.revision), func(t *testing.T) {
			rule := func(n numbers) nft.Rule {
				return nft.Rule{Expressions: exprs(l4proto, xtOf(c.kind, c.name, c.revision, infoWith(c.size, n)), counting), Userdata: []byte("set")}
			}
			known, err := nameSets(rule(c.before), then.name)
			bare, names, has := withoutNames(known)
			if diff := cmp.Diff(c.names, names); err != nil || !has || diff != "" {
				t.Fatalf("%v, has names %t (-want +got):\n%s", err, has, diff)
			}
			if again, err := nameSets(known, then.name); err != nil || !again.Equal(known) {
				t.Errorf("named once more it is %x, %v", again, err)
			}
			if _, err := needsOf(known, rules.IPv4); err != nil {
				t.Errorf("with names: %v", err)
			}
			if _, err := needsOf(bare, rules.IPv4); !errors.Is(err, errNotPortable) {
				t.Errorf("without names: %v", err)
			}
			got, err := numberSets(known, now.number)
			if diff := cmp.Diff(rule(c.after), got); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
			if _, err := numberSets(known, fakeSets{}.number); !errors.Is(err, ErrNoSet) {
				t.Errorf("without the sets: %v", err)
			}
		})
	}
}

// A rule with unknown numbers does not change, and does not count as writable.
func TestNumbersThatAreNotKnown(t *testing.T) {
	sets := fakeSets{1: "a"}
	for name, e := range map[string]nft.Expression{
		"a revision of tomorrow": xtOf("match", "set", 5, infoWith(48, map[int]uint16{0: 1})),
		"a set that is gone":     xtOf("match", "set", 4, infoWith(48, map[int]uint16{0: 2})),
		"data that are short":    xtOf("target", "SET", 3, infoWith(8, map[int]uint16{0: 1, 4: 1})),
		"no data":                xt("match", "set"),
	} {
		r := nft.Rule{Expressions: exprs(e)}
		got, _ := nameSets(r, sets.name)
		if _, err := needsOf(got, 0); !got.Equal(r) || !errors.Is(err, errNotPortable) {
			t.Errorf("%s: %x, %v", name, got, err)
		}
	}
	r := nft.Rule{Expressions: exprs(xtOf("match", "set", 4, infoWith(48, map[int]uint16{0: 1})))}
	for _, names := range [][]string{{"a", "a"}, {}} {
		wrong, _ := withNames(r, names)
		if _, err := numberSets(wrong, sets.number); !errors.Is(err, errNotPortable) {
			t.Errorf("with the names %q: %v", names, err)
		}
	}
}

// Two kinds of match bpf can be written by their bytes: bytecode, and a path,
// without the number of the writer's open file.
func TestWhatOfBPFIsWritten(t *testing.T) {
	info := func(mode uint16, file byte) []byte {
		return append(binary.NativeEndian.AppendUint16(nil, mode), append([]byte{1, 0, file, 0, 0, 0}, "/path\x00"...)...)
	}
	for _, c := range []struct {
		name      string
		e, want   nft.Expression
		written   bool
		pathsWant []string
	}{
		{"revision 0", xtOf("match", "bpf", 0, info(3, 5)), xtOf("match", "bpf", 0, info(3, 5)), true, nil},
		{"bytecode", xtOf("match", "bpf", 1, info(0, 5)), xtOf("match", "bpf", 1, info(0, 5)), true, nil},
		{"a path", xtOf("match", "bpf", 1, info(1, 5)), xtOf("match", "bpf", 1, info(1, 0)), true, []string{"/path"}},
		{"an open file", xtOf("match", "bpf", 1, info(2, 5)), xtOf("match", "bpf", 1, info(2, 5)), false, nil},
		{"a revision of tomorrow", xtOf("match", "bpf", 2, info(0, 5)), xtOf("match", "bpf", 2, info(0, 5)), false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := nameSets(nft.Rule{Expressions: exprs(c.e)}, fakeSets{}.name)
			if diff := cmp.Diff(nft.Rule{Expressions: exprs(c.want)}, got); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
			if _, err := needsOf(got, 0); (err == nil) != c.written {
				t.Errorf("written: %v", err)
			}
			if diff := cmp.Diff(c.pathsWant, pinnedPaths(got)); diff != "" {
				t.Errorf("paths (-want +got):\n%s", diff)
			}
		})
	}
}

// FuzzNumbersOfIpsets: no content of a rule may cause a panic. Replacing numbers
// by names and back must yield the same bytes, except for numbers of files.
func FuzzNumbersOfIpsets(f *testing.F) {
	for revision := range uint32(6) {
		f.Add(exprs(xtOf("match", "set", revision, infoWith(64, map[int]uint16{0: 1}))), uint16(9))
		f.Add(exprs(xtOf("target", "SET", revision, infoWith(64, map[int]uint16{0: 1, 4: noSetNumber}))), uint16(9))
	}
	f.Add(exprs(xtOf("match", "bpf", 1, infoWith(600, map[int]uint16{0: 1}))), uint16(9))
	f.Add(exprs(nft.Expression{Name: setNames, Data: []byte{9, 0, 1}}, xt("match", "set")), uint16(1))
	f.Fuzz(func(t *testing.T, data []byte, other uint16) {
		r := nft.Rule{Expressions: data}
		name := func(n uint16) (string, error) { return fmt.Sprint("n", n), nil }
		number := func(name string) (uint16, error) {
			var n uint16
			_, err := fmt.Sscanf(name, "n%d", &n)
			return n, err
		}
		spell(rules.IPv4, r)
		if _, _, mine := withoutNames(r); mine {
			_, _ = numberSets(r, number)
			return
		}
		known, err := nameSets(r, name)
		if err != nil {
			return
		}
		back, err := numberSets(known, number)
		if err != nil {
			t.Fatalf("it is not written again: %v", err)
		}
		if files := bytes.Contains(data, []byte("bpf")); !files && !bytes.Equal(back.Expressions, data) {
			t.Errorf("%x comes back as %x", data, back.Expressions)
		}
		elsewhere, err := numberSets(known, func(string) (uint16, error) { return other, nil })
		if err != nil || len(elsewhere.Expressions) != len(data) {
			t.Fatalf("with another number: %x, %v", elsewhere, err)
		}
		if again, err := nameSets(elsewhere, func(uint16) (string, error) { return "n", nil }); err == nil && other != noSetNumber {
			bare, _, _ := withoutNames(again)
			want, _, _ := withoutNames(known)
			if !bytes.Contains(data, []byte("bpf")) && !bytes.Equal(bare.Expressions, want.Expressions) {
				t.Errorf("other bytes than the number's changed: %x to %x", want, bare)
			}
		}
	})
}
