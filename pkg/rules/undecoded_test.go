package rules

import "testing"

// TestACommentHidesNoExtension: a comment that looks like the beginning of an extension must
// not hide an extension behind it.
func TestACommentHidesNoExtension(t *testing.T) {
	for label, want := range map[string]bool{
		`-m cpu [00000000] -j ACCEPT`:                                              true,
		`-m bpf [00000000] -j ACCEPT`:                                              false,
		`-m comment --comment "x -m cpu [00000000" -m bpf [11111111] -j ACCEPT`:    false,
		`-m comment --comment "a \" -m cpu [00000000" -m bpf [11111111] -j ACCEPT`: false,
		`-m set [00000000 "a] -m b"] -m bpf [11111111] -j ACCEPT`:                  false,
		`-m comment --comment "x -m cpu [00000000" [meta 11111111] -j ACCEPT`:      false,
		`-m comment --comment "x -m cpu [00000000" -m cpu [11111111] -j ACCEPT`:    true,
	} {
		r := OpaqueBytes([]byte{1}, nil, "ACCEPT", Decoded(label, true))
		text, known := r.decoded(markExtensions...)
		if known != want {
			t.Errorf("%s is decoded %t as %s", label, known, text.Spec)
		}
		if _, err := text.Words(); err != nil {
			t.Errorf("%s: %s: %v", label, text.Spec, err)
		}
	}
}
