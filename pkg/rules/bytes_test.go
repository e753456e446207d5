package rules

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestAnOpaqueRuleHoldsItsBytes: an opaque rule that holds its bytes must return any bytes
// unchanged, and only if they match its digest. The label for people must not contain them.
func TestAnOpaqueRuleHoldsItsBytes(t *testing.T) {
	zeros := make([]byte, 700)
	for _, tt := range []struct {
		name                  string
		expressions, userdata []byte
	}{
		{"text", []byte("abc"), nil},
		{"nothing", nil, nil},
		{"an empty user data", []byte("abc"), []byte{}},
		{"zeros at the end", append([]byte{1}, zeros...), nil},
		{"zeros all over", append(append([]byte{0, 7, 0, 0}, zeros...), 9, 0), append([]byte{0, 3}, zeros[:256]...)},
		{"every byte", everyByte(), everyByte()},
		{"as many as the kernel takes", bytes.Repeat(everyByte(), 256)[:64<<10-1], everyByte()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rule := OpaqueBytes(tt.expressions, tt.userdata, "KUBE-SERVICES", "it says = and to X: y")
			expressions, userdata, sets, ok := rule.Bytes()
			if !ok || sets != nil || !bytes.Equal(expressions, tt.expressions) || !bytes.Equal(userdata, tt.userdata) || (userdata == nil) != (tt.userdata == nil) {
				t.Errorf("%q holds %x and %x, %t", rule.Spec, expressions, userdata, ok)
			}
			again, err := ParseRule(rule.Spec)
			if err != nil || again != rule || again.Target != "KUBE-SERVICES" {
				t.Errorf("read again it is %+v, %v", again, err)
			}
			plain := IdentityOf(tt.expressions, tt.userdata).OpaqueRule("KUBE-SERVICES", "it says = and to X: y")
			if diff := cmp.Diff(plain.Spec, rule.Label()); diff != "" {
				t.Errorf("the label (-want +got):\n%s", diff)
			}
			if reason, opaque := rule.Opaque(); !opaque || reason != "it says = and to X: y" {
				t.Errorf("the reason is %q", reason)
			}
		})
	}
}

func everyByte() []byte {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	return all
}

// TestOtherBytesThanTheDigestNamesAreRefused: a file may have any content. Bytes that do not
// match the digest are refused, and so is a text that encodes no bytes.
func TestOtherBytesThanTheDigestNamesAreRefused(t *testing.T) {
	rule := OpaqueBytes([]byte("abcdefghi"), nil, "", "odd")
	other := OpaqueBytes([]byte("abcdefghj"), nil, "", "odd")
	_, bytesOf, _ := strings.Cut(other.Spec, "=")
	digest, _, _ := strings.Cut(rule.Spec, "=")
	for _, spec := range []string{
		digest + "=" + bytesOf,
		strings.Replace(rule.Spec, "=", "=!", 1),
		strings.Replace(rule.Spec, "=", "=A", 1),
		digest + "=: odd",
		digest + "=" + strings.Repeat("AP8A", 3000) + ": odd",
	} {
		if got, err := ParseRule(spec); err == nil {
			t.Errorf("%.80q is taken for %.80q", spec, got.Spec)
		}
		if _, _, _, ok := (Rule{Spec: spec}).Bytes(); ok {
			t.Errorf("%.80q has bytes", spec)
		}
	}
}

// TestAnOpaqueRuleHasTheNamesOfItsIpsets: an opaque rule that names ipsets has their names,
// with any characters, next to its bytes. It depends on them, and with other names it is
// another rule.
func TestAnOpaqueRuleHasTheNamesOfItsIpsets(t *testing.T) {
	names := []string{"a b", "", "c\nd to X: @=", `"`, strings.Repeat("x", 31)}
	rule := OpaqueSets([]byte("abc"), nil, names, "DROP", "odd")
	_, _, sets, ok := rule.Bytes()
	if diff := cmp.Diff(names, sets); !ok || diff != "" {
		t.Errorf("%q: ok %t (-want +got):\n%s", rule.Spec, ok, diff)
	}
	again, err := ParseRule(rule.Spec)
	if err != nil || again != rule || again.Target != "DROP" || !again.HasBytes() {
		t.Errorf("read again it is %+v, %v", again, err)
	}
	if diff := cmp.Diff([]string{"a b", "c\nd to X: @=", `"`, strings.Repeat("x", 31)}, rule.Needs().Sets); diff != "" {
		t.Errorf("it depends on (-want +got):\n%s", diff)
	}
	if label := rule.Label(); strings.ContainsAny(label, "@=") || !strings.HasSuffix(label, " to DROP: odd") {
		t.Errorf("the label is %q", label)
	}
	for _, other := range []Rule{
		OpaqueSets([]byte("abc"), nil, []string{"a b", "", "c", `"`, "x"}, "DROP", "odd"),
		OpaqueSets([]byte("abc"), nil, names[:1], "DROP", "odd"), OpaqueBytes([]byte("abc"), nil, "DROP", "odd"),
	} {
		if rule.Equal(other) {
			t.Errorf("it is equal to %q", other.Spec)
		}
	}
	before, after, _ := strings.Cut(rule.Spec, "@")
	_, after, _ = strings.Cut(after, " ")
	for _, text := range []string{"", "!", "YQ", "AAAA" + strings.Repeat("YWFh", 30000) + "AA"} {
		if got, err := ParseRule(before + "@" + text + " " + after); err == nil {
			t.Errorf("the names %.20q are taken: %.80q", text, got.Spec)
		}
	}
}

// TestOpaqueRulesAreEqualByTheirDigest: only the digest identifies an opaque rule. The reason
// why it has no text, and the presence of its bytes, have no influence.
func TestOpaqueRulesAreEqualByTheirDigest(t *testing.T) {
	a := OpaqueBytes([]byte("a"), nil, "ACCEPT", "odd")
	for _, tt := range []struct {
		other Rule
		want  bool
	}{
		{OpaqueBytes([]byte("a"), nil, "ACCEPT", "its chain cannot be printed"), true},
		{OpaqueRule([]byte("a"), "ACCEPT", "odd"), true},
		{OpaqueBytes([]byte("b"), nil, "ACCEPT", "odd"), false},
		{Rule{Spec: "-j ACCEPT", Target: "ACCEPT"}, false},
	} {
		if a.Equal(tt.other) != tt.want || tt.other.Equal(a) != tt.want || (a.Meaning() == tt.other.Meaning()) != tt.want {
			t.Errorf("equal to %q: want %t", tt.other.Label(), tt.want)
		}
	}
}
