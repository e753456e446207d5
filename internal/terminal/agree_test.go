package terminal

import (
	"context"
	"io"
	"strings"
	"testing"
)

// TestAgreed: only a line with a yes is a yes.
func TestAgreed(t *testing.T) {
	never, stop := io.Pipe()
	defer stop.Close()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		name   string
		ctx    context.Context
		in     io.Reader
		want   bool
		prints string
	}{
		{"y", t.Context(), strings.NewReader("y\n"), true, "Go on? [y/N] "},
		{"Yes, with spaces", t.Context(), strings.NewReader(" Yes \nno\n"), true, "Go on? [y/N] "},
		{"an empty line", t.Context(), strings.NewReader("\n"), false, "Go on? [y/N] "},
		{"no line", t.Context(), strings.NewReader(""), false, "Go on? [y/N] "},
		{"another word", t.Context(), strings.NewReader("yeah\n"), false, "Go on? [y/N] "},
		{"no terminal", t.Context(), nil, false, ""},
		{"interrupted", ended, never, false, "Go on? [y/N] \n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			if got := Agreed(tt.ctx, tt.in, &out, "Go on?"); got != tt.want || out.String() != tt.prints {
				t.Errorf("%t after %q, want %t after %q", got, out.String(), tt.want, tt.prints)
			}
		})
	}
}
