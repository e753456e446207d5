package rules_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/rules"
)

func TestSplitReadsIptablesQuotingAndNotAShells(t *testing.T) {
	tests := []struct {
		name, line string
		want       []string
	}{
		{"nothing is no word", "", nil},
		{"blanks are no word", "  \t ", nil},
		{"blanks of any number separate", " -j \t X ", []string{"-j", "X"}},
		{"double quotes hold blanks together", `--comment "a b" -j X`, []string{"--comment", "a b", "-j", "X"}},
		{"an empty word is a word", `--comment ""`, []string{"--comment", ""}},
		{"a single quote is a letter", `it's 'a b'`, []string{"it's", "'a", "b'"}},
		{"inside quotes too", `"it's" x`, []string{"it's", "x"}},
		{"# and ; are letters", `"a" # ; b`, []string{"a", "#", ";", "b"}},
		{"a backslash escapes inside quotes", `"\"q\" \\ it\'s"`, []string{`"q" \ it's`}},
		{"and stands for itself outside", `a\ b\n`, []string{`a\`, `b\n`}},
		{"quotes may begin inside a word", `a"b c"d`, []string{"ab cd"}},
		{"$ and ` are letters", "\"$HOME `id`\"", []string{"$HOME `id`"}},
		{"options inside quotes are one word", `"-j X"`, []string{"-j X"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got, err := rules.Split(test.line)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Errorf("Split(%s) (-want +got):\n%s", test.line, d)
			}
		})
	}
}

func TestSplitRefusesAnOpenQuote(t *testing.T) {
	for _, line := range []string{`"`, `-m comment --comment "a b`, `"a\"`, `"a\`} {
		if words, err := rules.Split(line); err == nil {
			t.Errorf("Split(%s) = %q, want an error", line, words)
		}
	}
}

func TestQuoteLeavesPlainWordsAlone(t *testing.T) {
	tests := []struct{ word, want string }{
		{"KUBE-SERVICES", "KUBE-SERVICES"},
		{"0x4000/0x4000", "0x4000/0x4000"},
		{"", `""`},
		{"a b", `"a b"`},
		{"a\tb", "\"a\tb\""},
		{`say "no"`, `"say \"no\""`},
		{`C:\`, `"C:\\"`},
		{"it's", `"it's"`},
	}
	for _, test := range tests {
		if got := rules.Quote(test.word); got != test.want {
			t.Errorf("Quote(%q) = %s, want %s", test.word, got, test.want)
		}
	}
}

func FuzzSplitQuote(f *testing.F) {
	for _, seed := range [][2]string{
		{"", ""}, {"a b", "it's"}, {`"`, `\`}, {`\"`, "\t"}, {"\n", "\x00"}, {"-j", "X"}, {"ä", "\xff"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		line := rules.Quote(a) + " " + rules.Quote(b)
		got, err := rules.Split(line)
		if err != nil {
			t.Fatalf("Split(%q): %v", line, err)
		}
		if d := cmp.Diff([]string{a, b}, got); d != "" {
			t.Errorf("%q does not come back from %q (-want +got):\n%s", []string{a, b}, line, d)
		}
	})
}
