package copies

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/internal/testkit/scenario"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/standby"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// natV4 is the table that the tests flush.
var natV4 = rules.IPv4.Table(rules.Nat)

// onNFT runs a test of an OnNFT with the scenarios' node in a namespace.
func onNFT(t *testing.T, story func(t *testing.T, s *OnNFT, follow func(write bool) Copy)) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "nft", "iptables-nft")
		programs := scenario.Programs{With: iptables.NFT}
		must(t, scenario.Load(t.Context(), programs, rules.IPv4))
		kernel, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.NFT, Families: []rules.Family{rules.IPv4}})
		must(t, err)
		defer func() { must(t, kernel.Close()) }()
		s, err := OpenNFT(kernel, nil, nil)
		must(t, err)
		defer func() { must(t, s.Close()) }()
		follow := func(write bool) Copy {
			t.Helper()
			snapshot, err := kernel.Read(t.Context(), rules.IPv4)
			must(t, err)
			var nat rules.Section
			for _, c := range snapshot.Tables[rules.Nat].Chains {
				if !rules.Builtin(rules.Nat, c.Name) && (strings.HasPrefix(c.Name, "KUBE-") || strings.HasPrefix(c.Name, "CNI-")) {
					nat.Chains = append(nat.Chains, c)
				}
			}
			return s.follow(t.Context(), Want{ID: natV4, Nat: Nat{Section: nat, Digest: snapshot.Digest, Write: write}})
		}
		story(t, s, follow)
	})
}

// follow follows a table, and writes its copy at once.
func (s *OnNFT) follow(ctx context.Context, want Want) Copy {
	all, write := s.Follow(ctx, want)
	if write == nil {
		return all[want.ID]
	}
	write.Run()
	return write.Take()[want.ID]
}

// gate moves the gate and fails unless its state is then as wanted.
func (s *OnNFT) gate(t *testing.T, open, want bool, commits int) {
	t.Helper()
	order := Shut
	if open {
		order = Open
	}
	got, err := s.Gate(Want{ID: natV4}, order)
	must(t, err)
	if got.Open != want || got.Commits != commits {
		t.Errorf("open: %t after %d commits, want %t after %d", got.Open, got.Commits, want, commits)
	}
}

// TestOnNFT: the gate opens once for the lost rules, again when more are lost, and not while
// all rules are in force.
func TestOnNFT(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		if _, err := s.Gate(Want{ID: natV4}, Open); !errors.Is(err, standby.ErrNotBuilt) {
			t.Errorf("a gate without a copy: %v", err)
		}
		copied := follow(true)
		must(t, copied.Err)
		if copied.Chains < 50 {
			t.Errorf("%d chains are copied", copied.Chains)
		}
		if s.pending[natV4].copy != s.tables.Held(natV4) {
			t.Error("the rules of what was written stay in memory")
		}
		s.gate(t, true, false, 0)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F", "PREROUTING")
		s.gate(t, true, true, 0)
		s.gate(t, true, true, 0)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		s.gate(t, true, true, 0)
		s.gate(t, false, false, 1)
		s.gate(t, false, false, 0)
		must(t, s.Release(natV4))
		if tables := nstest.Command(t, "nft", "list", "tables"); strings.Contains(tables, standby.TableName) {
			t.Errorf("there is still a table:\n%s", tables)
		}
	})
}

// TestStandbyCopiesOnlyWhatWasExamined: another process has written since the examination, with
// or without a flush; the standby must copy nothing.
func TestStandbyCopiesOnlyWhatWasExamined(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		held := s.tables.Held(natV4)
		snapshot, err := s.kernel.Read(t.Context(), rules.IPv4)
		must(t, err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		got := s.follow(context.Background(), Want{ID: natV4, Nat: Nat{Digest: snapshot.Digest, Write: true}})
		if !errors.Is(got.Err, ErrMoved) {
			t.Errorf("it says %+v", got)
		}
		if s.tables.Held(natV4) != held {
			t.Error("the copy is another one")
		}
	})
}

// TestStandbyThatCannotFollow: a copy that becomes unavailable must leave no table behind.
func TestStandbyThatCannotFollow(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		if err := follow(true).Err; !errors.Is(err, standby.ErrUnavailable) {
			t.Errorf("it says %v", err)
		}
		if tables := nstest.Command(t, "nft", "list", "tables"); strings.Contains(tables, standby.TableName) {
			t.Errorf("there is still a table:\n%s", tables)
		}
	})
}

// TestStandbyOpensWithWhatIsOutstanding: an opened copy must include a change that was
// translated but not yet written.
func TestStandbyOpensWithWhatIsOutstanding(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-I", "KUBE-SERVICES", "-d", "203.0.113.77", "-p", "tcp", "-j", "DNAT", "--to-destination", "203.0.113.78:80")
		must(t, follow(false).Err)
		shown := func() bool {
			return strings.Contains(nstest.Command(t, "nft", "list", "chain", "ip", standby.TableName, "KUBE-SERVICES"), "203.0.113.77")
		}
		if shown() {
			t.Error("it was written before it was asked for")
		}
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F", "PREROUTING")
		s.gate(t, true, true, 1)
		if !shown() {
			t.Error("what is open lacks the last change")
		}
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		s.gate(t, true, true, 0) // nothing is outstanding any more
	})
}

// TestStandbyOpensDuringAWrite: a change is being written when the rules are flushed. The gate
// opens without a commit and stays open, and the change follows.
func TestStandbyOpensDuringAWrite(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-I", "KUBE-SERVICES", "-d", "203.0.113.77", "-p", "tcp", "-j", "DNAT", "--to-destination", "203.0.113.78:80")
		must(t, follow(false).Err)
		all, write := s.Follow(t.Context(), Want{ID: natV4, Nat: Nat{Known: true, Write: true}})
		if !all[natV4].Writing || write == nil {
			t.Fatalf("it is not to be written: %+v", all)
		}
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		s.gate(t, true, true, 0)
		write.Run()
		if copied := write.Take()[natV4]; copied.Err != nil || copied.Unfinished || copied.Chains < 50 {
			t.Errorf("the write says %+v", copied)
		}
		if !strings.Contains(nstest.Command(t, "nft", "list", "chain", "ip", standby.TableName, "KUBE-SERVICES"), "203.0.113.77") {
			t.Error("the change did not follow")
		}
		s.gate(t, true, true, 0)
		s.gate(t, false, false, 1)
	})
}

// TestStandbyOpensCurrentDuringAWrite: the copy is too old to be opened without the change that is
// being written, so both come in one transaction. The write then has nothing to do.
func TestStandbyOpensCurrentDuringAWrite(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-I", "KUBE-SERVICES", "-d", "203.0.113.77", "-p", "tcp", "-j", "DNAT", "--to-destination", "203.0.113.78:80")
		must(t, follow(false).Err)
		_, write := s.Follow(t.Context(), Want{ID: natV4, Nat: Nat{Known: true, Write: true}})
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		got, err := s.Gate(Want{ID: natV4}, OpenCurrent)
		must(t, err)
		if !got.Open || got.Commits != 1 {
			t.Errorf("opened: %+v", got)
		}
		before := s.tables.Commits()
		write.Run()
		must(t, write.Take()[natV4].Err)
		if got := s.tables.Commits() - before; got != 0 {
			t.Errorf("the write then committed %d times", got)
		}
		s.gate(t, false, false, 1)
	})
}

// TestStandbyShutsWhatMustNotBeOpen: another owner writes rules to nat that the packets of an
// open hook must not bypass; the hook must shut.
func TestStandbyShutsWhatMustNotBeOpen(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F", "PREROUTING")
		s.gate(t, true, true, 0)
		nstest.CommandInput(t, "*nat\n-F POSTROUTING\n-A POSTROUTING -s 203.0.113.9 -j ACCEPT\nCOMMIT\n", "iptables-nft-restore", "--noflush")
		s.gate(t, true, false, 1)
		if limit := s.limits[natV4]; limit != nil {
			t.Error("the limit of a gate that is shut goes on")
		}
		s.gate(t, true, false, 0)
	})
}

// TestStandbyShutsByItself: a gate that the loop does not shut shuts after the limit. A gate
// that the loop shuts has no limit any more.
func TestStandbyShutsByItself(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		s.gate(t, true, true, 0)
		s.gate(t, false, false, 1)
		if diff := cmp.Diff(0, len(s.limits)); diff != "" {
			t.Errorf("limits of gates that are shut (-want +got):\n%s", diff)
		}
		s.limit = 200 * time.Millisecond
		s.gate(t, true, true, 0)
		s.ending.Wait()
		ended := time.Now()
		if open := s.tables.Status(natV4).Open; len(open) > 0 {
			t.Errorf("%v are open behind the limit", open)
		}
		got, err := s.Gate(Want{ID: natV4}, Shut)
		must(t, err)
		if got.Shut.IsZero() || got.Shut.After(ended) {
			t.Errorf("it was shut at %s, want by its limit", got.Shut)
		}
		s.gate(t, true, true, 0)
		must(t, s.tables.Remove(natV4)) // as the limit does if the kernel refuses
		if got, err := s.Gate(Want{ID: natV4}, Shut); !errors.Is(err, standby.ErrNotBuilt) || got.Open {
			t.Errorf("a gate whose table is gone: %+v, %v", got, err)
		}
	})
}

// TestStandbyAfterItsSocketWasClosed: the standby dials again, and the next try builds the
// copy.
func TestStandbyAfterItsSocketWasClosed(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, follow func(bool) Copy) {
		must(t, follow(true).Err)
		must(t, s.tables.Close())
		if err := follow(true).Err; !errors.Is(err, net.ErrClosed) {
			t.Errorf("it says %v", err)
		}
		must(t, follow(true).Err)
		nstest.Command(t, "iptables-nft", "-t", "nat", "-F")
		s.gate(t, true, true, 0)
		s.gate(t, false, false, 1)
	})
}

// nativeNAT is a native table that translates.
const nativeNAT = `table ip proxy {
	set clients { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1h; elements = { CLIENT } }
	chain nat { type nat hook prerouting priority PRIORITY; ip daddr 10.2.0.1 update @clients { ip saddr } dnat to ADDRESS; }
}
`

// proxyOf loads nativeNAT and returns it as captured.
func proxyOf(t *testing.T, s *OnNFT, priority, address, client string) Want {
	t.Helper()
	id := tableid.IPv4.Table("proxy")
	text := strings.NewReplacer("PRIORITY", priority, "ADDRESS", address, "CLIENT", client).Replace(nativeNAT)
	nstest.CommandInput(t, "table ip proxy {}\ndelete table ip proxy\n"+text, "nft", "-f", "-")
	r, err := native.Capture(s.conn, func(of nft.Table) bool { return of.Family.Table(of.Name) == id })
	must(t, err)
	return Want{ID: id, Native: Native{r.Tables[id], r.Digest(id)}}
}

// followNative follows a native table until its copy is complete, and returns the number of
// steps.
func (s *OnNFT) followNative(t *testing.T, want Want) (steps int) {
	t.Helper()
	for {
		copied := s.follow(t.Context(), want)
		must(t, copied.Err)
		if steps++; !copied.Unfinished {
			return steps
		}
	}
}

// TestNativeStandbyThatTakesNoChange: an opened copy includes the outstanding changes. A
// difference that the copy cannot take is reported, and with OpenCurrent the gate stays shut.
// The next time, the copy is built again in steps.
func TestNativeStandbyThatTakesNoChange(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, _ func(bool) Copy) {
		first := proxyOf(t, s, "dstnat", "10.3.0.1", "10.9.0.1")
		built := s.followNative(t, first)
		for _, story := range []struct {
			priority, address string
			order             Order
			open              bool
			outdated, err     error
		}{
			{"dstnat", "10.3.0.2", OpenCurrent, true, nil, nil},
			{"dstnat - 5", "10.3.0.2", OpenCurrent, false, nil, ErrOutdated},
			{"dstnat - 5", "10.3.0.2", Open, true, native.ErrWhole, nil},
		} {
			want := proxyOf(t, s, story.priority, story.address, "10.9.0.1")
			nstest.Command(t, "nft", "delete", "table", "ip", "proxy")
			got, err := s.Gate(want, story.order)
			if got.Open != story.open || !errors.Is(got.Outdated, story.outdated) || !errors.Is(err, story.err) {
				t.Errorf("open: %t, outdated: %v, error: %v, want %+v", got.Open, got.Outdated, err, story)
			}
			_, err = s.Gate(want, Shut)
			must(t, err)
		}
		whole := proxyOf(t, s, "dstnat - 5", "10.3.0.2", "10.9.0.1")
		if diff := cmp.Diff([]int{built + 1, 1}, []int{s.followNative(t, whole), s.followNative(t, whole)}); diff != "" {
			t.Errorf("steps until it is built again, and once it is (-want +got):\n%s", diff)
		}
	})
}

// TestAnOpeningTranslatesChangesOnly: a new value of a table with the same content is not
// translated again. Clients of a Service cause a read every 2 s.
func TestAnOpeningTranslatesChangesOnly(t *testing.T) {
	onNFT(t, func(t *testing.T, s *OnNFT, _ func(bool) Copy) {
		first := proxyOf(t, s, "dstnat", "10.3.0.1", "10.9.0.1")
		s.followNative(t, first)
		held := s.tables.Held(first.ID)
		for name, story := range map[string]struct {
			address, client string
			same            bool
		}{
			"nothing":  {"10.3.0.1", "10.9.0.1", true},
			"a client": {"10.3.0.1", "10.9.0.2", true},
			"a rule":   {"10.3.0.2", "10.9.0.1", false},
		} {
			want := proxyOf(t, s, "dstnat", story.address, story.client)
			s.pending[want.ID] = pendingCopy{held, first.Native.Digest}
			got, err := s.translateNative(want)
			must(t, err)
			if diff := cmp.Diff(story.same, got == held); diff != "" {
				t.Errorf("%s: the copy is the one that is held (-want +got):\n%s", name, diff)
			}
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
