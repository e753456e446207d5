package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/rules"
)

func TestPlatformWarnings(t *testing.T) {
	with := func(chosen iptables.Backend, there ...iptables.Backend) iptables.Evidence {
		counts := map[iptables.Backend]iptables.Count{}
		for _, b := range there {
			counts[b] = iptables.Count{}
		}
		return iptables.Evidence{Backend: chosen, Counts: map[rules.Family]map[iptables.Backend]iptables.Count{rules.IPv4: counts, rules.IPv6: {}}}
	}
	const noNFT = "this kernel has no nf_tables: canaryd would have nothing to guard"
	for _, c := range []struct {
		release  string
		evidence iptables.Evidence
		want     []string
	}{
		{"6.18.44", with(iptables.NFT, iptables.NFT, iptables.Legacy), nil},
		{"4.18.0-553.el8_10.x86_64", with(iptables.Legacy, iptables.Legacy), nil},
		{"10.0-rc1", with(iptables.NFT, iptables.NFT), nil},
		{"4.17.19", with(iptables.NFT, iptables.NFT), []string{"Linux 4.17.19 is older than any that canaryd was tried on (4.18)"}},
		{"3.10.0-1160.el7.x86_64", with(iptables.NFT), []string{"Linux 3.10.0-1160.el7.x86_64 is older than any that canaryd was tried on (4.18)", noNFT}},
		{"6.1.0", with(iptables.NFT, iptables.Legacy), []string{noNFT}},
		{"starnix", with(iptables.NFT, iptables.NFT), []string{`the kernel calls itself "starnix", which is no release of Linux that canaryd was tried on`}},
	} {
		if diff := cmp.Diff(c.want, platformWarnings(c.release, c.evidence)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.release, diff)
		}
	}
}

// TestDetectWarns: detect warns of a kernel without either backend, and its output is
// unchanged.
func TestDetectWarns(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := nstest.Without(append(nstest.LackLegacy(), nstest.LackNFT())...); err != nil {
				t.Error(err)
			}
			code, stdout, stderr := call(t, "detect")
			const warning = "canaryd: warning: this kernel has no legacy iptables, or its modules are not loaded: canaryd would have nothing to guard\n"
			if code != exitOK || stderr != warning || !strings.Contains(stdout, "not in this kernel") {
				t.Errorf("exit code %d, %q, %q; want %d and %q", code, stdout, stderr, exitOK, warning)
			}
		}()
		<-done
	})
}
