package native_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit"
	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// sendPackets sends packets over the loopback device.
func sendPackets(t *testing.T, n int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for range n {
		if err := unix.Sendto(fd, make([]byte, 50), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
}

// TestWhatPacketsAddIsRead: packets add elements without a notification. Refresh must read them,
// and canaryd must follow the sets from there on.
func TestWhatPacketsAddIsRead(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		nstest.Command(t, "ip", "link", "set", "lo", "up")
		nstest.CommandInput(t, `table ip t {
			set seen { type ipv4_addr; flags dynamic,timeout; timeout 1h; }
			set kept { type ipv4_addr; flags timeout; elements = { 10.0.0.1 timeout 2h, 10.0.0.2 }; }
			chain c { type filter hook output priority 0; update @seen { ip daddr }; }
		}`, "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		wantFollowed(t, k, conn)
		id := tableid.IPv4.Table("t")
		follow := func() *native.Ruleset {
			t.Helper()
			r, err := k.Follow(everything)
			if err != nil || !r.Followed(id) {
				t.Fatalf("it is not followed, %v", err)
			}
			return r
		}
		before := follow()
		sendPackets(t, 2)
		if n := len(follow().Tables[id].Sets[0].Elements); n != 0 {
			t.Fatalf("%d elements without a read: this shows nothing", n)
		}
		sets, err := k.Refresh(time.Minute)
		if err != nil || sets != 2 {
			t.Fatalf("%d sets were read, %v", sets, err)
		}
		after := follow()
		if len(after.Tables[id].Sets[0].Elements) != 1 || len(before.Tables[id].Sets[0].Elements) != 0 || after.Digest(id) != before.Digest(id) {
			t.Errorf("after a read %v, before %v", after.Tables[id].Sets[0], before.Tables[id].Sets[0])
		}
		if sets, err = k.Refresh(0); err != nil || sets != 1 {
			t.Errorf("without time %d sets were read, %v", sets, err)
		}
		nstest.Command(t, "nft", "add element ip t kept { 10.0.0.3 timeout 1h }")
		nstest.Command(t, "nft", "delete element ip t kept { 10.0.0.2 }")
		if wantFollowed(t, k, conn) != 1 {
			t.Error("it is not followed any more")
		}
	})
}

// TestTimeoutsOfFollowedElements: an element is added long after the read of its table. The rest of
// its timeout must be right for the table's time.
func TestTimeoutsOfFollowedElements(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, "table ip t { set s { type ipv4_addr; flags timeout; }; }\n", "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		wantFollowed(t, k, conn)
		testkit.Pass(t, 2*time.Second, "that the table was read that long before its element came")
		nstest.Command(t, "nft", "add element ip t s { 10.0.0.1 timeout 1h }")
		id := tableid.IPv4.Table("t")
		left := func(r *native.Ruleset) time.Duration {
			t.Helper()
			for b := r.Tables[id].Sets[0].Elements[0]; len(b) > 0; {
				kind, value, rest, err := nft.NextAttr(b)
				if err != nil {
					t.Fatal(err)
				}
				if kind == unix.NFTA_SET_ELEM_EXPIRATION {
					n, _ := nft.AttrUint64(value)
					return time.Duration(n)*time.Millisecond - time.Since(r.LeftAt(id))
				}
				b = rest
			}
			t.Fatal("no timeout")
			return 0
		}
		r, err := k.Follow(everything)
		if err != nil || !r.Followed(id) {
			t.Fatalf("it is not followed, %v", err)
		}
		if d := left(r) - left(capture(t, conn)); d.Abs() > time.Second {
			t.Errorf("what is left differs by %v from what a read shows", d)
		}
		nstest.Command(t, "nft", "add set ip t d { type ipv4_addr; timeout 1h; }")
		nstest.Command(t, "nft", "add element ip t d { 10.0.0.2 }")
		if r, err = k.Follow(everything); err != nil || !r.Followed(id) {
			t.Fatalf("it is not followed, %v", err)
		}
		if err := r.Tables[id].Rehearse(); err != nil {
			t.Errorf("the kernel would refuse the elements: %v", err)
		}
	})
}

// TestWhatIsMissedIsRead: after an overflow the tables must be read, and followed from then on.
func TestWhatIsMissedIsRead(t *testing.T) {
	t.Parallel()
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, kubeProxy, "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		wantFollowed(t, k, conn)
		if wantFollowed(t, k, conn) != 1 {
			t.Fatal("it is not followed: this shows nothing")
		}
		// This is an owner's storm. Each rule is a notification, and so many do not fit into 8 MiB.
		nstest.CommandInput(t, "add table ip other\nadd chain ip other c\n"+strings.Repeat("add rule ip other c tcp dport 80 accept\n", 45_000)+
			"delete table ip other\ndelete element ip kube-proxy cluster-ips { 172.30.0.2 }\n", "nft", "-f", "-")
		if wantFollowed(t, k, conn) != 0 {
			t.Error("a table was followed over an overflow")
		}
		if _, missed, err := k.Hear(0); !missed || err != nil {
			t.Errorf("nothing was missed, %v", err)
		}
		nstest.Command(t, "nft", "add element ip kube-proxy cluster-ips { 172.30.0.2 }")
		if wantFollowed(t, k, conn) != 1 {
			t.Error("after an overflow nothing is followed")
		}
	})
}

// TestWhatATableWasBefore: a suspected commit must have its tables as they were before it.
func TestWhatATableWasBefore(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, kubeProxy, "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		k.Suspect(func(c native.Commit) bool {
			for _, d := range c.Deeds {
				if d.MayTake() {
					return true
				}
			}
			return false
		})
		wantFollowed(t, k, conn)
		id := tableid.IPv4.Table("kube-proxy")
		nstest.Command(t, "nft", "add rule ip kube-proxy services counter") // not suspected
		was := capture(t, conn)
		nstest.Command(t, "nft", "delete element ip kube-proxy cluster-ips { 172.30.0.2 }")
		between := capture(t, conn)
		nstest.Command(t, "nft", "flush", "ruleset")
		commits, missed, err := k.Hear(capture(t, conn).Genid)
		if err != nil || missed || len(commits) != 3 || len(commits[0].Before) != 0 {
			t.Fatalf("heard %+v, missed %t, %v", commits, missed, err)
		}
		for i, want := range []*native.Ruleset{was, between} {
			before := commits[i+1].Before[id]
			if before.Table == nil || before.Genid != want.Genid || before.Digest != want.Tables[id].Digest() || len(native.Diff(want.Tables[id], before.Table)) > 0 {
				t.Errorf("before commit %d it was %+v, want genid %d and %s", i+1, before, want.Genid, want.Tables[id].Digest())
			}
		}
	})
}

// TestDestroyedIsDeleted: canaryd must hear of objects that "nft destroy" deletes as deleted,
// although its messages have numbers of their own.
func TestDestroyedIsDeleted(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		nstest.CommandInput(t, kubeProxy, "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		wantFollowed(t, k, conn)
		if _, _, err := k.Hear(0); err != nil {
			t.Fatal(err)
		}
		destroy := func(message uint16, attrs ...nft.StringAttr) []native.Commit {
			t.Helper()
			b := nft.NewBatch()
			b.Begin(message, 0, tableid.IPv4)
			for _, a := range attrs {
				b.Text(a.Kind, a.Value)
			}
			b.End()
			b.Finish()
			switch err := b.Send(); {
			case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
				nstest.Need(t, "the messages of nft destroy, of Linux 6.3 and newer", err)
			case err != nil:
				t.Fatal(err)
			}
			commits, missed, err := k.Hear(capture(t, conn).Genid)
			if err != nil || missed || len(commits) != 1 {
				t.Fatalf("heard %+v, %v", commits, err)
			}
			return commits
		}
		id := tableid.IPv4.Table("kube-proxy")
		const destroyTable, destroyRule = 26, 28
		d := destroy(destroyRule, nft.StringAttr{Kind: unix.NFTA_RULE_TABLE, Value: id.Name}, nft.StringAttr{Kind: unix.NFTA_RULE_CHAIN, Value: "services"})[0].Deeds[id]
		if d.Rules["services"] == 0 || d.New != 0 || wantFollowed(t, k, conn) != 1 {
			t.Errorf("the rules of a chain were destroyed: %+v", d)
		}
		d = destroy(destroyTable, nft.StringAttr{Kind: unix.NFTA_TABLE_NAME, Value: id.Name})[0].Deeds[id]
		if !d.Deleted || d.New != 0 {
			t.Errorf("the table was destroyed: %+v", d)
		}
	})
}

// TestAQuotaIsNoDeed: the kernel notifies that packets have used up a quota. That must not count as
// a deed.
func TestAQuotaIsNoDeed(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "ip")
		nstest.Command(t, "ip", "link", "set", "lo", "up")
		nstest.CommandInput(t, `table ip t { quota q { over 10 bytes; }; chain c { type filter hook output priority 0; quota name q; }; }`, "nft", "-f", "-")
		conn, k := dial(t), openKernel(t)
		wantFollowed(t, k, conn)
		sendPackets(t, 2)
		nstest.Command(t, "nft", "flush", "table", "ip", "t")
		commits, missed, err := k.Hear(capture(t, conn).Genid)
		if err != nil || missed || len(commits) != 1 {
			t.Fatalf("heard %+v, missed %t, %v", commits, missed, err)
		}
		if d := commits[0].Deeds[tableid.IPv4.Table("t")]; d.New != 0 || d.Rules["c"] != 1 {
			t.Errorf("a flush of the table did %+v", d)
		}
		id := tableid.IPv4.Table("t")
		r, err := k.Follow(everything)
		if err != nil || !r.Followed(id) || r.Digest(id) != capture(t, conn).Tables[id].Digest() {
			t.Errorf("it is not followed any more, %v", err)
		}
	})
}
