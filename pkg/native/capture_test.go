package native_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// TestACaptureIsOneState: a process writes all the time. A capture must show a single genid, or
// none. Each commit writes the same number into a set and into two chains.
func TestACaptureIsOneState(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		owner := nstest.StartNFT(t)
		conn := dial(t)
		state := func(n int) string {
			return fmt.Sprintf("flush table ip t\nflush set ip t s\nadd element ip t s { %d }\nadd rule ip t a meta mark %d\nadd rule ip t b meta mark %d\n", n, n, n)
		}
		owner.Run("table ip t { set s { type mark; }; chain a { }; chain b { }; }")
		owner.Run(state(1))
		writing, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- write(writing, owner, state)
			stop()
		}()
		states, interrupted := map[uint32]bool{}, 0
		for len(states) < testkit.Size(30, 150) && writing.Err() == nil {
			r, err := native.Capture(conn, everything)
			if errors.Is(err, nft.ErrInterrupted) {
				interrupted++
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			states[r.Genid] = true
			table := r.Tables[tableid.IPv4.Table("t")]
			elements, a, b := table.Sets[0].Elements, table.Chain("a").Rules, table.Chain("b").Rules
			if len(elements) != 1 || len(a) != 1 || len(b) != 1 || string(a[0].Attrs) != string(b[0].Attrs) ||
				!strings.Contains(string(a[0].Attrs), string(elements[0][len(elements[0])-4:])) { // the mark
				t.Fatal("a mixture of two states")
			}
		}
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		t.Logf("%d states were read, %d captures were interrupted", len(states), interrupted)
	})
}

// write commits one state after the other.
func write(ctx context.Context, owner *nstest.NFT, state func(int) string) error {
	for n := 2; ctx.Err() == nil; n++ {
		if err := owner.Try(state(n)); err != nil {
			return err
		}
	}
	return nil
}

// TestOwnedTablesAreImmune: a table with an owner is read, but never written.
func TestOwnedTablesAreImmune(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		conn := dial(t)
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		b := nft.NewBatch()
		b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, tableid.Inet)
		b.Text(unix.NFTA_TABLE_NAME, "owned")
		b.Number(unix.NFTA_TABLE_FLAGS, 2)
		b.End()
		b.Finish()
		if err := b.SendOver(fd); err != nil {
			t.Fatal(err)
		}
		owned := capture(t, conn).Tables[tableid.Inet.Table("owned")]
		if owned == nil || !owned.Immune() {
			t.Fatalf("read %v, want an immune table", owned)
		}
		if _, err := owned.Create(nft.NewBatch(), native.Options{}); !errors.Is(err, native.ErrImmune) {
			t.Errorf("to be created: %v", err)
		}
		if _, err := owned.Refill(nft.NewBatch(), owned, native.Options{}); !errors.Is(err, native.ErrImmune) {
			t.Errorf("to be refilled: %v", err)
		}
		if err := owned.Rehearse(); !errors.Is(err, native.ErrImmune) {
			t.Errorf("to be rehearsed: %v", err)
		}
	})
}

// TestADeviceThatIsGoneIsLeftOut: a table's device is deleted. The rest of the table must come
// back.
func TestADeviceThatIsGoneIsLeftOut(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		conn := dial(t)
		nstest.Command(t, "ip", "link", "add", "short", "type", "veth", "peer", "name", "other")
		nstest.CommandInput(t, `table netdev t { chain c { type filter hook ingress devices = { lo, short } priority 0; policy accept; drop; }; }`, "nft", "-f", "-")
		was := capture(t, conn).Tables[tableid.Netdev.Table("t")]
		nstest.Command(t, "nft", "flush", "ruleset")
		nstest.Command(t, "ip", "link", "delete", "short")
		b := nft.NewBatch()
		left, err := was.Create(b, native.Options{Lacks: func(_ nft.ObjectKind, device string) bool { return device == "short" }})
		if err != nil || len(left) != 1 || left[0] != "short" {
			t.Fatalf("left out %v, %v", left, err)
		}
		b.Finish()
		if err := b.Send(); err != nil {
			t.Fatal(err)
		}
		if got := nstest.Command(t, "nft", "list", "ruleset"); !strings.Contains(got, "lo") || strings.Contains(got, "short") || !strings.Contains(got, "drop") {
			t.Errorf("nft lists\n%s", got)
		}
	})
}

// TestADeviceThatComesBack: a chain's device is gone at the replay. If the kernel accepts the
// chain, it must work again once the device is back. Else the device is left out and reported.
func TestADeviceThatComesBack(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		k := openKernel(t)
		id := tableid.Netdev.Table("t")
		addVeth := func() {
			nstest.Command(t, "ip", "link", "add", "short", "type", "veth", "peer", "name", "other")
			nstest.Command(t, "ip", "link", "set", "short", "up")
			nstest.Command(t, "ip", "link", "set", "other", "up")
		}
		capture := func() *native.Ruleset {
			r, err := k.Capture(func(nft.Table) bool { return true })
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		addVeth()
		nstest.CommandInput(t, `table netdev t { chain c { type filter hook ingress devices = { lo, short } priority 0; policy accept; counter; }; }`, "nft", "-f", "-")
		listed := nstest.Command(t, "nft", "-s", "list", "ruleset")
		want := capture().Tables[id]
		nstest.Command(t, "nft", "flush", "ruleset")
		nstest.Command(t, "ip", "link", "delete", "short")

		seen := capture()
		left, err := k.Write(seen.Genid, []native.Repair{{Remedy: native.ByCreate, Want: want}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		try := exec.CommandContext(t.Context(), "nft", "add table netdev x; add chain netdev x c { type filter hook ingress device absent priority 0; }; delete table netdev x")
		if err := try.Run(); err != nil {
			if d := cmp.Diff([]string{"short"}, left); d != "" {
				t.Errorf("left out (-want +got):\n%s", d)
			}
			return
		}
		if len(left) > 0 {
			t.Errorf("left out %v, which the kernel takes", left)
		}
		addVeth()
		if got := nstest.Command(t, "nft", "-s", "list", "ruleset"); got != listed {
			t.Errorf("nft lists\n%s\nwant\n%s", got, listed)
		}
		for strings.Contains(nstest.Command(t, "nft", "list", "ruleset"), "packets 0") {
			// Each device looks for its neighbours when it is set up: these packets are counted.
		}
	})
}

// TestAnUsedUpQuotaComesBack: packets use up a quota, and the kernel does not accept its flag for
// that. The quota must come back.
func TestAnUsedUpQuotaComesBack(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		conn := dial(t)
		nstest.CommandInput(t, "table ip t { quota q { over 10 bytes; }; chain c { type filter hook output priority 0; quota until 10 bytes accept; quota name q accept; }; }", "nft", "-f", "-")
		before := capture(t, conn)
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		for range 3 {
			if err := unix.Sendto(fd, make([]byte, 50), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatal(err)
			}
		}
		was := capture(t, conn)
		id := tableid.IPv4.Table("t")
		if changes := native.Diff(before.Tables[id], was.Tables[id]); len(changes) != 0 {
			t.Errorf("packets changed the content: %v", changes)
		}
		if !strings.Contains(nstest.Command(t, "nft", "list", "ruleset"), "used") {
			t.Fatal("no packet was counted")
		}
		nstest.Command(t, "nft", "flush", "ruleset")
		replay(t, conn, was)
		sameRaw(t, was, capture(t, conn))
	})
}
