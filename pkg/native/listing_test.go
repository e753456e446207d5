package native_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
)

// listingTable has each kind of entry, with counted values and elements.
const listingTable = `table inet t {
	set ips { type ipv4_addr; elements = { 10.0.0.1 } }
	map verdicts { type ipv4_addr : verdict; elements = { 10.0.0.1 : jump other } }
	counter hits { packets 7 bytes 70 }
	quota most { over 10 mbytes used 5 mbytes }
	chain input {
		type filter hook input priority filter; policy accept
		counter packets 1 bytes 2 jump services comment "in"
	}
	chain other { accept; }
	chain services {
		ip saddr @ips accept
		tcp dport { 1, 2 } drop
		ip saddr vmap @verdicts
		jump { counter packets 3 bytes 4 drop; }
	}
}
`

// digests returns the digests of a table's entries, by kind, name and place.
func digests(table *native.Table) map[string]native.Digest {
	all := map[string]native.Digest{}
	native.NewListing(table).Each(func(e *native.Entry) {
		for i := range e.Len() {
			all[fmt.Sprint(strings.TrimSpace(e.Kind+" "+e.Name), " ", i)] = e.Digest(i)
		}
	})
	return all
}

// TestListing: rules and declarations have digests. Handles, counted values and elements of named
// sets change none of these.
func TestListing(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		read := func(text string) map[string]native.Digest {
			nstest.CommandInput(t, text, "nft", "-f", "-")
			all := digests(capture(t, conn).InOrder()[0])
			nstest.Command(t, "nft", "flush", "ruleset")
			return all
		}
		was := read(listingTable)
		if len(was) != 11 {
			t.Fatalf("the entries are %v", was)
		}
		for _, test := range []struct {
			name, old, replacement string
			want                   []string // entries that differ
		}{
			{"the same, with other handles", "", "", nil},
			{"more handles", "chain other { accept; }", "chain gone { }\n\tchain other { accept; }", nil},
			{"counters", "packets 1 bytes 2", "packets 8 bytes 9", nil},
			{"counters of an inner chain", "packets 3 bytes 4", "packets 8 bytes 9", nil},
			{"a named counter", "packets 7 bytes 70", "packets 8 bytes 9", nil},
			{"a used quota", "used 5 mbytes", "used 1 mbytes", nil},
			{"elements", "elements = { 10.0.0.1 } ", "elements = { 10.0.0.2, 10.0.0.3 } ", nil},
			{"elements of a verdict map", "10.0.0.1 : jump other", "10.0.0.1 : drop", nil},
			{"the order of an anonymous set", "{ 1, 2 }", "{ 2, 1 }", nil},
			{"an anonymous set", "{ 1, 2 }", "{ 1, 3 }", []string{"services 1"}},
			{"an inner chain", "bytes 4 drop", "bytes 4 accept", []string{"services 3"}},
			{"a comment", `comment "in"`, `comment "out"`, []string{"input 0"}},
			{"a policy", "policy accept", "policy drop", []string{"base chain input 0"}},
			{"a priority", "priority filter", "priority -5", []string{"base chain input 0"}},
			{"another type", "set ips { type ipv4_addr;", "set ips { type ipv4_addr; flags interval;", []string{"set ips 0"}},
			{"a limit of a quota", "over 10 mbytes", "over 20 mbytes", []string{"quota most 0"}},
			{"a verdict", "chain other { accept; }", "chain other { drop; }", []string{"other 0"}},
			{"a map of addresses", "type ipv4_addr : verdict", "typeof ip saddr : verdict", []string{"map verdicts 0"}},
		} {
			now := read(strings.Replace(listingTable, test.old, test.replacement, 1))
			var got []string
			for name, d := range was {
				if now[name] != d {
					got = append(got, name)
				}
			}
			slices.Sort(got)
			if len(now) != len(was) || !slices.Equal(got, test.want) {
				t.Errorf("%s: %d entries; %q differ, want %q", test.name, len(now), got, test.want)
			}
		}
	})
}

// TestListingOfEachStatement: a replay changes no digest, and each entry has the words of Lines.
func TestListingOfEachStatement(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		loadCorpus(t)
		nstest.CommandInput(t, services(t, services100), "nft", "-f", "-")
		conn := dial(t)
		was := capture(t, conn)
		nstest.Command(t, "nft", "flush", "ruleset")
		replay(t, conn, was)
		now := capture(t, conn)
		for id, table := range was.Tables {
			if d := cmp.Diff(digests(table), digests(now.Tables[id])); d != "" {
				t.Errorf("%s (-want +got):\n%s", id, d)
			}
			var want, got []string
			for l := range table.Lines() {
				base := l.Kind == nft.Chains && strings.Contains(l.Text, " hook ")
				if base || l.Kind != nft.Tables && l.Kind != nft.Elements && l.Kind != nft.Chains {
					want = append(want, l.Text)
				}
			}
			native.NewListing(table).Each(func(e *native.Entry) {
				for i := range e.Len() {
					got = append(got, e.Text(i))
				}
				if kind, name := native.CutKey(e.Key()); kind != e.Kind || name != e.Name {
					t.Errorf("the key %q is of %q %q", e.Key(), kind, name)
				}
			})
			slices.Sort(want)
			slices.Sort(got)
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("words of %s (-want +got):\n%s", id, d)
			}
		}
	})
}
