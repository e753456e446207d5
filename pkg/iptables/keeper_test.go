package iptables

import (
	"errors"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/versions"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

// keeperTables returns the lines of nft that name a keeper's table.
func keeperTables(t *testing.T) []string {
	t.Helper()
	var found []string
	for line := range strings.Lines(nstest.Command(t, "nft", "list", "tables")) {
		if strings.Contains(line, KeeperTable) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

func mustKeep(t *testing.T, k *Keeper, families ...rules.Family) {
	t.Helper()
	for _, f := range families {
		if err := k.Keep(f); err != nil {
			t.Fatalf("keeping %s: %v", f, err)
		}
	}
}

func wantKeeperTables(t *testing.T, want ...string) {
	t.Helper()
	for i, family := range want {
		want[i] = "table " + family + " " + KeeperTable
	}
	if diff := cmp.Diff(want, keeperTables(t), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("tables (-want +got):\n%s", diff)
	}
}

// TestKeeperTables: Keep makes the tables, also when called twice, and no flusher
// can delete them. Release deletes one table, and the end of the socket deletes
// all.
func TestKeeperTables(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		var k Keeper
		if err := errors.Join(k.Release(rules.IPv4), k.Close()); err != nil {
			t.Error(err)
		}
		mustKeep(t, &k, rules.IPv4, rules.IPv6, rules.IPv4)
		wantKeeperTables(t, "ip", "ip6")
		nstest.Command(t, "nft", "flush", "ruleset")
		for _, args := range []string{"delete table ip canaryd-keeper", "flush table ip canaryd-keeper", "add chain ip canaryd-keeper more"} {
			if out, err := exec.CommandContext(t.Context(), "nft", strings.Fields(args)...).CombinedOutput(); err == nil {
				t.Errorf("nft %s is done: %s", args, out)
			}
		}
		wantKeeperTables(t, "ip", "ip6")
		for range 2 {
			if err := k.Release(rules.IPv4); err != nil {
				t.Error(err)
			}
		}
		wantKeeperTables(t, "ip6")
		mustKeep(t, &k, rules.IPv4)
		wantKeeperTables(t, "ip6", "ip")
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		wantKeeperTables(t)
		mustKeep(t, &k, rules.IPv6) // a new socket
		wantKeeperTables(t, "ip6")
		if err := k.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestKeeperLooksLike compares the output of `nft list table`.
func TestKeeperLooksLike(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		var k Keeper
		defer k.Close()
		mustKeep(t, &k, rules.IPv4, rules.IPv6)
		for _, family := range []string{"ip", "ip6"} {
			// The version of nft decides which priorities have names.
			got := nstest.Command(t, "nft", "--numeric-priority", "list", "table", family, KeeperTable)
			flags := "flags owner"
			if versions.NamelessOwner.Here() {
				flags = "flags ,"
			}
			for _, want := range []string{
				flags, "type nat hook prerouting priority -99; policy accept;", "type nat hook input priority 101; policy accept;",
				"type nat hook output priority -99; policy accept;", "type nat hook postrouting priority 101; policy accept;",
				"chain unused {\n\t\tmasquerade\n\t}", keeperComment,
			} {
				if !strings.Contains(got, want) {
					t.Errorf("nft does not show %q:\n%s", want, got)
				}
			}
		}
	})
}

// TestKeeperNameIsTaken: another process has a table of that name, with an owner
// or without. Our existing tables stay, and the next try succeeds once the name
// is free.
func TestKeeperNameIsTaken(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		var k, other Keeper
		defer k.Close()
		nstest.Command(t, "nft", "add", "table", "ip", KeeperTable)
		mustKeep(t, &other, rules.IPv6)
		for range 3 {
			for _, f := range rules.Families() {
				if err := k.Keep(f); !errors.Is(err, ErrKeeperTaken) {
					t.Errorf("%s: %v, want that the name is taken", f, err)
				}
				if err := k.Release(f); err != nil {
					t.Errorf("releasing %s, which is not ours: %v", f, err)
				}
			}
		}
		wantKeeperTables(t, "ip", "ip6")
		nstest.Command(t, "nft", "delete", "table", "ip", KeeperTable)
		mustKeep(t, &k, rules.IPv4)
		if err := other.Close(); err != nil {
			t.Error(err)
		}
		mustKeep(t, &k, rules.IPv6)
		wantKeeperTables(t, "ip", "ip6")
	})
}

// TestKeeperCommitsAreOwn: a watcher distinguishes these commits from others',
// and they are no evidence for a backend.
func TestKeeperCommitsAreOwn(t *testing.T) {
	for _, backend := range []Backend{NFT, Legacy} {
		t.Run(string(backend), func(t *testing.T) {
			nstest.Run(t, func(t *testing.T) {
				nstest.NeedProgram(t, "nft", "iptables-"+string(backend))
				iptablesCommand(t, backend, rules.IPv4, "-t nat -A POSTROUTING -j MASQUERADE")
				k := openKernel(t, Config{Backend: backend})
				s, err := k.Subscribe()
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				before := mustChoose(t)
				mustKeep(t, k.Keeper(), rules.IPv4, rules.IPv6)
				if diff := cmp.Diff(before, mustChoose(t), cmpopts.IgnoreUnexported(Evidence{})); diff != "" {
					t.Errorf("the evidence for a backend (-without +with a keeper):\n%s", diff)
				}
				if err := k.Keeper().Release(rules.IPv6); err != nil {
					t.Error(err)
				}
				nstest.Command(t, "nft", "add", "table", "ip", "foreign")
				for i, own := range []bool{true, true, true, false} {
					if c, err := s.Receive(); err != nil || c.Own != own {
						t.Errorf("commit %d: own %t (%v), want %t", i, c.Own, err, own)
					}
				}
			})
		})
	}
}

func mustChoose(t *testing.T) Evidence {
	t.Helper()
	e, err := Choose(t.Context(), ChooseConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// TestKeeperRefusals: an error about a refusal contains the remedy.
func TestKeeperRefusals(t *testing.T) {
	for _, c := range []struct {
		about uint32
		errno syscall.Errno
		want  error
		says  string
	}{
		{aboutBatch, unix.EOPNOTSUPP, ErrKeeperKernel, "no nf_tables"},
		{aboutBatch, unix.EPERM, nft.ErrPermission, "CAP_NET_ADMIN"},
		{aboutTable, unix.EPERM, ErrKeeperTaken, KeeperTable},
		{aboutTable, unix.EEXIST, ErrKeeperTaken, KeeperTable},
		{aboutTable, unix.EINVAL, ErrKeeperKernel, "Linux 5.12"},
		{aboutTable, unix.EOPNOTSUPP, ErrKeeperKernel, "Linux 5.12"},
		{3, unix.ENOENT, ErrKeeperKernel, "nft_chain_nat"},
		{8, unix.ENOENT, ErrKeeperKernel, "nft_masq"},
		{3, unix.ENOMEM, unix.ENOMEM, "refused"},
	} {
		if err := keeperRefused(c.about, c.errno); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v about message %d: %v, want %v that says %q", c.errno, c.about, err, c.want, c.says)
		}
	}
}

// TestKeeperAfterTroubleOfTheSocket: an error of the socket says nothing about
// the table. The next Keep must recognise existing tables, and make missing ones.
func TestKeeperAfterTroubleOfTheSocket(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft")
		var k Keeper
		defer k.Close()
		mustKeep(t, &k, rules.IPv4)
		// The buffer is the smallest possible, and gets more complaints than it
		// holds. So the next receive returns ENOBUFS.
		if err := unix.SetsockoptInt(k.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil {
			t.Fatal(err)
		}
		for range 50 {
			if err := keeperBatch(rules.IPv4).SendOver(k.fd); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := unix.Recvfrom(k.fd, make([]byte, 1), unix.MSG_DONTWAIT); !errors.Is(err, unix.ENOBUFS) {
			t.Fatalf("the socket did not overflow: %v", err)
		}
		mustKeep(t, &k, rules.IPv4, rules.IPv6)
		wantKeeperTables(t, "ip", "ip6")
		if err := k.Release(rules.IPv6); err != nil {
			t.Error(err)
		}
		nstest.Command(t, "nft", "add", "table", "ip6", KeeperTable)
		if err := k.Keep(rules.IPv6); err == nil {
			t.Error("another's table passes for ours")
		}
	})
}
