package rules_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/canaryd/canaryd/pkg/rules"
)

func parseSharing(t testing.TB, text string, known rules.Ruleset) rules.Ruleset {
	t.Helper()
	set, _, err := rules.ParseSome(strings.NewReader(text), func(name rules.TableName) *rules.Table { return known[name] }, nil)
	if err != nil {
		t.Fatal(err)
	}
	return set
}

func TestWhatIsTheSameTextIsTheSameRules(t *testing.T) {
	const before = "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n"
	for _, tt := range []struct {
		name, text string
		shared     []string // chains
	}{
		{"the same again", before, []string{"A", "B"}},
		{"a space behind each rule", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B \n-A A -j ACCEPT \n-A B -j RETURN \nCOMMIT\n", []string{"A", "B"}},
		{"a chain changed", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A A -j DROP\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"a rule more", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A A -j ACCEPT\n-A A -j DROP\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"a rule less", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"the first rule gone", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"a rule before", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j DROP\n-A A -j B\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"with counters", "*nat\n:A - [0:0]\n:B - [0:0]\n[1:2] -A A -j B\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n", []string{"B"}},
		{"chains mixed", "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A B -j RETURN\n-A A -j ACCEPT\nCOMMIT\n", []string{"A", "B"}},
		{"a chain between", "*nat\n:A - [0:0]\n:AA - [0:0]\n:B - [0:0]\n-A A -j B\n-A A -j ACCEPT\n-A AA -j B\n-A B -j RETURN\nCOMMIT\n", []string{"A", "B"}},
		{"declared late", "*nat\n:A - [0:0]\n-A A -j B\n:B - [0:0]\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n", []string{"A", "B"}},
		{"another table", "*filter\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A A -j ACCEPT\n-A B -j RETURN\nCOMMIT\n", nil},
		{"its name between", "*filter\n:A - [0:0]\n-A A -j B\nCOMMIT\n" + before, []string{"A", "B"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			known := parseSharing(t, before, nil)
			set := parseSharing(t, tt.text, known)
			if d := cmp.Diff(parseSharing(t, tt.text, nil), set, exactly); d != "" {
				t.Errorf("what is read depends on what was known (-alone +sharing):\n%s", d)
			}
			if d := cmp.Diff(parseSharing(t, before, nil), known, exactly); d != "" {
				t.Errorf("what was known is changed (-before +after):\n%s", d)
			}
			var shared []string
			for _, c := range []string{"A", "B"} {
				was, is := known[rules.Nat].Chain(c), set[rules.Nat].Chain(c)
				if is != nil && len(was.Rules) == len(is.Rules) && &was.Rules[0] == &is.Rules[0] {
					shared = append(shared, c)
				}
			}
			if d := cmp.Diff(tt.shared, shared); d != "" {
				t.Errorf("chains that share their rules (-want +got):\n%s", d)
			}
		})
	}
}

// FuzzParseSome: the result must not depend on the known tables.
func FuzzParseSome(f *testing.F) {
	const text = "*nat\n:A - [0:0]\n:B - [0:0]\n-A A -j B\n-A A\n-A B -j RETURN\nCOMMIT\n"
	f.Add(text, text)
	f.Add(text, strings.ReplaceAll(text, "\n", "\r\n"))
	f.Add(text, "*nat\nCOMMIT\n")
	f.Add(text, "*nat\n:OUTPUT - [0:0]\n:A ACCEPT [0:0]\n:B -\n:B\nCOMMIT\n")
	f.Add(text, "*nat\n:A - [0:0]\n-A A -j B\r\r\n-A A \n-A A\nCOMMIT\n")
	f.Add(text, "*nat\n:A - [0:0]\n-A A -j B\n:A - [0:0]\n-A A -j B\n-A A -j [unsupported revision]\nCOMMIT\n")
	f.Fuzz(func(t *testing.T, before, text string) {
		known, _, err := rules.Parse(strings.NewReader(before))
		if err != nil {
			return
		}
		want, _, wantErr := rules.Parse(strings.NewReader(text))
		got, _, gotErr := rules.ParseSome(strings.NewReader(text), func(name rules.TableName) *rules.Table { return known[name] }, nil)
		if (wantErr == nil) != (gotErr == nil) || wantErr != nil && wantErr.Error() != gotErr.Error() {
			t.Fatalf("alone: %v; sharing: %v", wantErr, gotErr)
		}
		if d := cmp.Diff(want, got, exactly, cmpopts.EquateEmpty()); d != "" {
			t.Errorf("what is read depends on what was known (-alone +sharing):\n%s", d)
		}
		again, _, _ := rules.Parse(strings.NewReader(before))
		if d := cmp.Diff(again, known, exactly); d != "" {
			t.Errorf("what was known is changed (-before +after):\n%s", d)
		}
	})
}
