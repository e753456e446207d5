package ruleset_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/ruleset"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A printed rule has a rule's bytes and the text that versions of iptables print for it.
type printed struct {
	versions string // such as 1.8.7,1.8.9
	family   tableid.Family
	bytes    []byte
	text     string
}

// recorded returns rules as iptables 1.8.7, 1.8.9, 1.8.11 and 1.8.13 wrote them to Linux 6.18
// and printed them. They are rules of kube-proxy, kubelet, Docker and CNI plugins, and have
// each option of the extensions that Words knows. pkg/iptables compares with the versions
// themselves.
func recorded(t testing.TB) []printed {
	t.Helper()
	f, err := os.Open("testdata/printed.txt.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all []printed
	lines := bufio.NewScanner(z)
	for lines.Scan() {
		field := strings.SplitN(lines.Text(), " ", 4)
		p := printed{versions: field[0], family: tableid.IPv4, text: field[3]}
		if field[1] == "ipv6" {
			p.family = tableid.IPv6
		}
		if p.bytes, err = hex.DecodeString(field[2]); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if err := lines.Err(); err != nil || len(all) < 1000 {
		t.Fatalf("%d rules: %v", len(all), err)
	}
	return all
}

// TestWordsAreAsPrinted: Words must return the text that each version of iptables prints.
func TestWordsAreAsPrinted(t *testing.T) {
	known, unknown := 0, 0
	for _, p := range recorded(t) {
		words, ok := ruleset.Words(p.family, p.bytes, nil, nil)
		if !ok {
			unknown++
			continue
		}
		known++
		if diff := cmp.Diff(p.text, words); diff != "" {
			t.Errorf("iptables %s, %v (-want +got):\n%s", p.versions, p.family, diff)
		}
	}
	if known < 850 || unknown < 50 {
		t.Errorf("Words knows %d rules, and does not know %d", known, unknown)
	}
}

// TestWordsKnowTheWholeRule: Words must return false for a rule with user data, with bytes
// behind its end, or cut short.
func TestWordsKnowTheWholeRule(t *testing.T) {
	for _, p := range recorded(t) {
		words, ok := ruleset.Words(p.family, p.bytes, nil, nil)
		if !ok {
			continue
		}
		if _, ok := ruleset.Words(p.family, p.bytes, []byte{}, nil); ok {
			t.Errorf("%q has words with user data", words)
		}
		for n := range 9 {
			if _, ok := ruleset.Words(p.family, append(bytes.Clone(p.bytes), make([]byte, n+1)...), nil, nil); ok {
				t.Errorf("%q has words with %d bytes behind it", words, n+1)
			}
			if got, ok := ruleset.Words(p.family, p.bytes[:len(p.bytes)-n-1], nil, nil); ok {
				t.Errorf("%q without its last %d bytes is %q", words, n+1, got)
			}
		}
	}
}

// TestEachByteIsInTheWords: if a byte of a rule changes, the words must change.
func TestEachByteIsInTheWords(t *testing.T) {
	tried := map[string]bool{}
	for _, p := range recorded(t) {
		words, ok := ruleset.Words(p.family, p.bytes, nil, nil)
		if key := p.family.String() + string(p.bytes); !ok || tried[key] {
			continue
		} else {
			tried[key] = true
		}
		changed := bytes.Clone(p.bytes)
		for at, was := range p.bytes {
			for _, flip := range []byte{1, 2, 4, 8, 0x10, 0x20, 0x40, 0x80, 0xff} {
				changed[at] = was ^ flip
				if got, ok := ruleset.Words(p.family, changed, nil, nil); ok && got == words {
					t.Fatalf("%q has byte %d of %x or %x:\n%x", words, at, was, changed[at], p.bytes)
				}
			}
			changed[at] = was
		}
	}
}

// TestWordsAreOfOneRule: two rules with the same words must be spellings of one rule. Versions
// of iptables write other expressions for the same words, but never other bytes in the same
// expressions.
func TestWordsAreOfOneRule(t *testing.T) {
	type rule struct {
		family tableid.Family
		words  string
	}
	met := map[rule][]printed{}
	for _, p := range recorded(t) {
		words, ok := ruleset.Words(p.family, p.bytes, nil, nil)
		if !ok {
			continue
		}
		at := rule{p.family, words}
		for _, other := range met[at] {
			if len(other.bytes) == len(p.bytes) && !bytes.Equal(other.bytes, p.bytes) && strings.Contains(other.versions, p.versions) {
				t.Errorf("%q is\n%x and\n%x", words, other.bytes, p.bytes)
			}
		}
		met[at] = append(met[at], p)
	}
}

func FuzzWords(f *testing.F) {
	for i, p := range recorded(f) {
		if i%7 == 0 {
			f.Add(p.bytes, p.family == tableid.IPv6)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, six bool) {
		family := tableid.IPv4
		if six {
			family = tableid.IPv6
		}
		words, ok := ruleset.Words(family, data, nil, nil)
		if !ok {
			if words != "" {
				t.Errorf("no words are %q", words)
			}
			return
		}
		if _, ok := ruleset.Words(family, append(bytes.Clone(data), 8, 0, 1, 0, 0, 0, 0, 0), nil, nil); ok {
			t.Error("it has words with an expression behind its end")
		}
		rule, err := rules.ParseRule(words)
		if reason, opaque := rule.Opaque(); opaque || err != nil {
			t.Errorf("%q cannot be read: %s %v", words, reason, err)
		}
	})
}
