package main

import (
	"testing"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestSigns: each backend is watched by its own sign, and native tables by their commits. A node
// with iptables-legacy alone does not subscribe to commits.
func TestSigns(t *testing.T) {
	for _, test := range []struct {
		backend iptables.Backend
		native  bool
		want    watch.Signs
	}{
		{iptables.NFT, false, watch.Signs{Commits: true}},
		{iptables.NFT, true, watch.Signs{Commits: true}},
		{iptables.Legacy, false, watch.Signs{Lock: true}},
		{iptables.Legacy, true, watch.Signs{Commits: true, Lock: true}},
	} {
		if got := signsOf(test.backend, test.native); got != test.want {
			t.Errorf("%s, native tables %t: watched by %+v, want %+v", test.backend, test.native, got, test.want)
		}
	}
}
