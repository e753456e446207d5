package kube

import (
	"encoding/json"
	"testing"
)

// TestTextsOfHostileBytes: the types that keep text are exported, and other callers than
// encoding/json may pass bytes. Bytes that are no JSON value are an error, and never a panic.
func TestTextsOfHostileBytes(t *testing.T) {
	for _, text := range []string{"", "\"", "{", "[", "1e", "\"\\u", "\x00", "-", "\"1Mi"} {
		for name, into := range map[string]json.Unmarshaler{"Time": new(Time), "Quantity": new(Quantity), "IntOrString": new(IntOrString)} {
			if err := into.UnmarshalJSON([]byte(text)); err == nil {
				t.Errorf("%s reads %q as %v", name, text, into)
			}
		}
	}
}
