package terminal

import (
	"encoding/json"
	"errors"
	"strconv"
	"testing"
)

func TestPlain(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"nothing", "", ""},
		{"a rule", `-A X -m comment --comment "a \"b\"" -j Y`, `-A X -m comment --comment "a \"b\"" -j Y`},
		{"other scripts", "größer 東京", "größer 東京"},
		{"a terminal's title", "X\x1b]0;all is well\x07", `X\x1b]0;all is well\a`},
		{"one byte instead of two", "X\u009b2J", `X\u009b2J`},
		{"a line that looks like ours", "X\nipv4    nat     intact", `X\nipv4    nat     intact`},
		{"over what stands there", "lost\rfine", `lost\rfine`},
		{"a column", "a\tb", `a\tb`},
		{"written backwards", "a\u202eb", `a\u202eb`},
		{"no UTF-8", "a\xff\xfeb", `a\xff\xfeb`},
	} {
		if got := Plain(test.text); got != test.want {
			t.Errorf("%s: got %q, want %q", test.name, got, test.want)
		}
	}
}

// FuzzPlain: the result is printable, and printable text is unchanged.
func FuzzPlain(f *testing.F) {
	for _, seed := range []string{"", "KUBE-SERVICES", "a\x1b[2Jb", "\u009b", "\xff", "\U000e0001", "\ufffd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := Plain(text)
		for _, r := range got {
			if !strconv.IsPrint(r) {
				t.Fatalf("%q becomes %q", text, got)
			}
		}
		if again := Plain(got); again != got {
			t.Errorf("%q is not left alone: %q", got, again)
		}
		data, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		var want, back string
		if err := errors.Join(json.Unmarshal(data, &want), json.Unmarshal(PlainJSON(data), &back)); err != nil || want != back {
			t.Errorf("JSON that prints says %q, %v; want %q", back, err, want)
		}
	})
}
