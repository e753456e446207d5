package kubeproxy

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nodetest"
	"github.com/canaryd/canaryd/pkg/iptables"
)

// TestReplayWithinFullSync: kube-proxy in nftables mode reads its sets one by one, and canaryd puts
// its table back in between. kube-proxy takes the first set for missing, and does not know the
// address of a removed service that is in it again. By itself it would find that address in its
// next full sync, an hour later. canaryd makes it do a full sync, and leaves nothing behind.
func TestReplayWithinFullSync(t *testing.T) {
	t.Parallel()
	needProxy(t)
	nodetest.In(t, iptables.NFT, func(n *nodetest.Node) {
		all := newSpaces(n.T, iptables.NFT, "node", "calm")
		reading := holdList(n.T, all[0], "ip kube-proxy service-ips")
		a := newAPI()
		town := newTown(a, rand.New(rand.NewPCG(seed(n.T), 4)), 12)
		a.serve(n.T, all...)
		node, calm := startProxy(n.T, all[0], inNFTables), startProxy(n.T, all[1], inNFTables)
		guardNode(n)
		equal := func() error {
			want, err := calm.space.read(n.Context(), inNFTables)
			n.Must(err)
			got, err := node.space.read(n.Context(), inNFTables)
			n.Must(err)
			if d := compare(want, got); !d.none() {
				return errors.New(d.String())
			}
			return nil
		}
		settle := func(state string) {
			testkit.Until(n.T, state, func() error {
				if err := equal(); err != nil {
					town.synced(n.T, node, calm)
					return err
				}
				return nil
			})
		}
		settle("the rules of both kube-proxies to be the same")
		n.Polled(4) // until the last change is learned
		n.Want(0, "pause")
		_, err := all[0].run(n.Context(), "", "nft", "flush", "ruleset")
		n.Must(err)
		town.removeService(0)
		reading.begin()
		testkit.Until(n.T, "kube-proxy to be within a full sync", func() error { // its next sync fails before
			town.ring()
			return reading.held()
		})
		n.Want(0, "resume")
		n.Until("canaryd to be ready", nodetest.Ready)
		reading.end()
		before := node.syncs()
		settle("the removed service to be gone")
		n.Logf("%d full syncs of %d until the removed service is gone", node.syncs().full-before.full, node.syncs().all-before.all)
		n.Until("canaryd to be ready", nodetest.Ready)
	})
}

// A hold makes one of kube-proxy's reads of its table wait.
type hold struct {
	t    *testing.T
	file string // exists: the read waits; file + ".held" exists: it does so now
}

// holdList puts a program nft before the real one in the namespace's PATH. Its list command with
// these last words waits while the hold is on.
func holdList(t *testing.T, s *space, words string) hold {
	t.Helper()
	dir := t.TempDir()
	h := hold{t, filepath.Join(dir, "hold")}
	nft, err := exec.LookPath("nft")
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *'%s') while [ -e %[2]s ]; do : >%[2]s.held; sleep 0.05; done ;; esac\nexec %s \"$@\"\n", words, h.file, nft)
	if err := os.WriteFile(filepath.Join(dir, "nft"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	for i, v := range s.env {
		if rest, ok := strings.CutPrefix(v, "PATH="); ok {
			s.env[i] = "PATH=" + dir + ":" + rest
		}
	}
	return h
}

func (h hold) begin() {
	if err := os.WriteFile(h.file, nil, 0o600); err != nil {
		h.t.Fatal(err)
	}
}

func (h hold) end() {
	if err := os.Remove(h.file); err != nil {
		h.t.Fatal(err)
	}
}

func (h hold) held() error {
	_, err := os.Stat(h.file + ".held")
	return err
}
