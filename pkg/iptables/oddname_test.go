package iptables

import (
	"strings"
	"testing"
)

func TestOddExtensions(t *testing.T) {
	at := func(size, offset int, text string) []byte {
		data := make([]byte, size)
		copy(data[offset:], text)
		return data
	}
	pattern := func(text string) []byte {
		data := at(168, 20, text)
		copy(data[4:], "bm")
		data[148] = byte(len(text))
		return data
	}
	for _, c := range []struct {
		name     string
		revision byte
		data     []byte
		want     string
	}{
		{"comment", 0, at(256, 0, "a b"), ""},
		{"comment", 0, at(256, 0, "a\tb"), ""},
		{"comment", 0, at(256, 0, "a\nb"), "line break"},
		{"LOG", 0, at(32, 2, "a\nb"), "line break"},
		{"recent", 1, at(240, 10, "a b"), "a space"},
		{"recent", 1, at(240, 10, "-h"), ""},
		{"recent", 1, at(240, 10, "!a"), "negation"},
		{"hashlimit", 1, at(80, 0, "a\tb"), "a space"},
		{"hashlimit", 1, at(80, 20, "a b"), ""},  // numbers
		{"hashlimit", 3, at(320, 20, "a b"), ""}, // after the end of the name
		{"physdev", 0, at(72, 32, `a"`), "a quote"},
		{"string", 1, pattern("a b"), ""},
		{"string", 1, pattern(`a\b`), "backslash"},
		{"string", 1, pattern(`ab\`), ""}, // as hexadecimal numbers
		{"string", 1, pattern("a\\\n"), ""},
		{"helper", 0, at(36, 4, "a b"), ""}, // in quotes
		{"helper", 0, at(36, 4, "a\nb"), "line break"},
		{"LED", 0, at(48, 0, "netfilter-a b"), ""},
		{"LED", 0, at(48, 0, "netfilter-a\nb"), "line break"},
		{"SECMARK", 0, at(264, 8, "a b"), "a space"},
		{"SECMARK", 1, at(264, 1, "a b"), "a space"},
		{"bpf", 0, at(528, 2, "a b c d e f g h"), ""}, // a program
		{"bpf", 1, at(528, 8, "a b"), ""},
		{"bpf", 1, append([]byte{1, 0, 0, 0, 0, 0, 0, 0}, "/a b"...), "a space"},
		{"cgroup", 0, at(8, 0, "a b"), ""}, // a class
		{"cgroup", 2, append([]byte{1, 0, 0, 0}, "a b\nc"...), "line break"},
		{"cgroup", 2, append([]byte{0, 1, 0, 0}, "a\n b"...), ""}, // a class
		// These numbers look like text.
		{"tcp", 0, []byte("a b c d"), ""},
		{"time", 0, []byte("a b c d"), ""},
		{"esp", 0, []byte("a b c d"), ""},
		{"policy", 0, []byte("a b c d"), ""},
		{"u32", 0, []byte("a b c d"), ""},
		{"SNPT", 0, []byte("a b c d"), ""},
		{"HMARK", 0, []byte("a b c d"), ""},
		{"unheard-of", 0, []byte{1, 0, 97, 32, 45, 104, 0}, "a -h"},
		{"unheard-of", 0, []byte{10, 0, 32, 97, 0, 97, 98, 99, 0}, ""},
		{"unheard-of", 0, []byte("a\nb\x00"), "without quotes"},
		{"recent", 1, nil, ""},
		{"string", 1, []byte("bm"), ""},
	} {
		got := oddExtension(c.name, c.revision, c.data)
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s with %.40q: %q, want %q", c.name, c.data, got, c.want)
		}
	}
}

// FuzzOddExtension: no bytes may cause a panic, and the output is one line.
func FuzzOddExtension(f *testing.F) {
	for _, name := range []string{"comment", "recent", "hashlimit", "physdev", "string", "CT", "u32"} {
		f.Add(name, byte(1), []byte("a b\nc"))
	}
	f.Fuzz(func(t *testing.T, name string, revision byte, data []byte) {
		if reason := oddExtension(name, revision, data); strings.Contains(reason, "\n") && !strings.Contains(name, "\n") {
			t.Errorf("%q", reason)
		}
	})
}
