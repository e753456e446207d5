package main

import (
	"testing"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/watch"
)

// TestSigns: each backend is watched by its own sign; a node with iptables-legacy alone does not
// subscribe to commits.
func TestSigns(t *testing.T) {
	for backend, want := range map[iptables.Backend]watch.Signs{
		iptables.NFT:    {Commits: true},
		iptables.Legacy: {Lock: true},
	} {
		if got := signsOf(backend); got != want {
			t.Errorf("%s is watched by %+v, want %+v", backend, got, want)
		}
	}
}
