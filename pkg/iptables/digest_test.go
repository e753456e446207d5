package iptables

import (
	"testing"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/rules"
)

// The kernel does not write every byte of GET_ENTRIES' answer. Tables of
// different sizes read into one buffer must not change each other's digest.
func TestLegacyDigestOfReusedBuffer(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy-restore")
		nstest.CommandInput(t, "*nat\n:X - [0:0]\n-A X\nCOMMIT\n*filter\nCOMMIT\n", "iptables-legacy-restore")
		k := openKernel(t, Config{Backend: Legacy})
		first := mustProbe(t, k, rules.IPv4).Digest
		for range 3 {
			if again := mustProbe(t, k, rules.IPv4).Digest; again != first {
				t.Fatalf("the digest is %#x and then %#x though nobody wrote", first, again)
			}
		}
	})
}
