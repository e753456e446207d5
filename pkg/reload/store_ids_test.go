package reload_test

import (
	"strings"
	"testing"

	"github.com/canaryd/canaryd/pkg/reload"
)

// TestExpandID: the beginning of an ID names it if no other ID begins so.
func TestExpandID(t *testing.T) {
	ids := []string{"0123456789ab", "0123ffffffff", "abcdef012345", "abcdef012345"}
	for _, tt := range []struct{ prefix, want, err string }{
		{"", "", ""},
		{"ab", "abcdef012345", ""},
		{"01234", "0123456789ab", ""},
		{"0123456789ab", "0123456789ab", ""},
		{"0123", "", "0123456789ab, 0123ffffffff"},
		{"77", "77", ""},
		{"../ab", "../ab", ""},
	} {
		got, err := reload.ExpandID(tt.prefix, ids)
		if got != tt.want || (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q is %q, %v; want %q, %q", tt.prefix, got, err, tt.want, tt.err)
		}
	}
}
