package iptablestest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/iptables/iptablestest"
	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	v4 = rules.IPv4
	v6 = rules.IPv6
)

// canaryText plants a canary, and a chain with a jump to it.
const canaryText = `*nat
:CANARY - [0:0]
:SVC - [0:0]
-A SVC -s 10.0.0.1 -j RETURN
-A OUTPUT -j SVC
-A CANARY -m comment --comment canaryd-canary:1
COMMIT
`

var backends = []iptables.Backend{iptables.NFT, iptables.Legacy}

// onBoth runs a test with a Fake of each backend that contains canaryText.
func onBoth(t *testing.T, test func(t *testing.T, f *iptablestest.Fake)) {
	for _, backend := range backends {
		t.Run(string(backend), func(t *testing.T) {
			f := iptablestest.NewFake(backend)
			must(t, f.RestoreNoflush(v4, canaryText))
			test(t, f)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: error is %v, want %v", what, got, want)
	}
}

func read(t *testing.T, s interface {
	Read(context.Context, rules.Family) (iptables.Snapshot, error)
}, family rules.Family,
) iptables.Snapshot {
	t.Helper()
	snap, err := s.Read(t.Context(), family)
	must(t, err)
	return snap
}

func begin(t *testing.T, f *iptablestest.Fake) iptables.Session {
	t.Helper()
	s, err := f.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// TestFakeSnapshotStays: programs write while a test still has a snapshot and a copy, which
// share the Fake's memory. No write, not even a failed one, may change them.
func TestFakeSnapshotStays(t *testing.T) {
	for _, lines := range [][]string{
		{"-A SVC -s 192.0.2.1/32 -j ACCEPT", "-A NEW -j RETURN"},
		{"-I SVC -j RETURN", "-D SVC 1", "-D SVC 1"},
		{"-R SVC 1 -j RETURN"},
		{"-F SVC", "-A SVC -j DROP"},
		{"-F", "-X"},
		{"-I SVC -j RETURN", "-A SVC -j RETURN", "-D SVC 1000"},
	} {
		onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
			snap, copied := read(t, f, v4), f.Copy()
			want := fmt.Sprint(snap.Tables[rules.Nat].Chains)
			saved := f.Save(v4)
			err := f.RestoreNoflush(v4, "*nat\n:NEW - [0:0]\n"+strings.Join(lines, "\n")+"\nCOMMIT\n")
			if moved := f.Save(v4) != saved; moved == (err != nil) {
				t.Errorf("%q: %v, and the table has changed: %t", lines, err, moved)
			}
			if diff := cmp.Diff(want, fmt.Sprint(snap.Tables[rules.Nat].Chains)); diff != "" {
				t.Errorf("the snapshot after %q (-want +got):\n%s", lines, diff)
			}
			if diff := cmp.Diff(saved, copied.Save(v4)); diff != "" {
				t.Errorf("the copy after %q (-want +got):\n%s", lines, diff)
			}
		})
	}
}

func TestFakeNoFamily(t *testing.T) {
	f := iptablestest.NewFake(iptables.NFT, v4)
	ctx := t.Context()
	_, err := f.Stamp(ctx, v6)
	wantErr(t, "Stamp", err, iptables.ErrNoFamily)
	_, err = f.Probe(ctx, v6, nil)
	wantErr(t, "Probe", err, iptables.ErrNoFamily)
	_, err = f.Read(ctx, v6)
	wantErr(t, "Read", err, iptables.ErrNoFamily)
	wantErr(t, "Restore", f.Restore(v6, canaryText), iptables.ErrNoFamily)
	wantErr(t, "DeleteTable", f.DeleteTable(v6, rules.Nat), iptables.ErrNoFamily)
	_, err = write(t, begin(t, f), v6, filterText)
	wantErr(t, "a session's Restore", err, iptables.ErrNoFamily)
	if diff := cmp.Diff([]rules.Family{v4}, f.Families()); diff != "" {
		t.Errorf("families (-want +got):\n%s", diff)
	}
}

// TestFakeCommits: programs write to a namespace; listeners must hear who committed, and how
// often.
func TestFakeCommits(t *testing.T) {
	for _, backend := range backends {
		t.Run(string(backend), func(t *testing.T) {
			f := iptablestest.NewFake(backend)
			var got []nft.Commit
			f.OnCommit(func(c nft.Commit) { got = append(got, c) })
			who := f.As(77, "a-name-that-is-too-long")
			must(t, f.Restore(v4, canaryText))
			must(t, f.Flush(v4, rules.Filter, ""))
			must(t, who.RestoreNoflush(v4, canaryText+"*mangle\n:X - [0:0]\nCOMMIT\n"))
			want := []nft.Commit{
				{Genid: 2, PID: 4242, Comm: "iptables"},
				{Genid: 3, PID: 77, Comm: "a-name-that-is-"},
				{Genid: 4, PID: 77, Comm: "a-name-that-is-"},
				{Genid: 5, PID: 77, Comm: "a-name-that-is-"},
			}
			err := who.FlushRuleset()
			if backend == iptables.Legacy {
				want = nil
				if err == nil {
					t.Error("FlushRuleset works on legacy")
				}
			}
			must(t, who.SetPolicy(v4, rules.Filter, "FORWARD", "DROP"))
			if backend == iptables.NFT {
				want = append(want, nft.Commit{Genid: 6, PID: 77, Comm: "a-name-that-is-"})
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("commits (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFakeConcurrent is for the race detector.
func TestFakeConcurrent(t *testing.T) {
	onBoth(t, func(t *testing.T, f *iptablestest.Fake) {
		f.OnCommit(func(nft.Commit) { f.Save(v4) })
		f.OnUnlock(func() { f.Save(v6) })
		f.LockWait(time.Minute)
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				for range 20 {
					if err := f.RestoreNoflush(v4, canaryText); err != nil {
						t.Error(err)
					}
					if _, err := f.Probe(t.Context(), v4, []iptables.Place{{Table: rules.Nat, Chain: "SVC"}}); err != nil {
						t.Error(err)
					}
				}
			})
			all.Go(func() {
				for range 20 {
					s, err := f.Begin(t.Context())
					if err != nil {
						t.Error(err)
						return
					}
					if _, err := s.Read(t.Context(), v6); err != nil {
						t.Error(err)
					}
					text := fmt.Sprintf("*nat\n:C%d - [0:0]\nCOMMIT\n", i)
					if _, err := write(t, s, v6, text); err != nil && !errors.Is(err, nft.ErrStale) {
						t.Error(err)
					}
					if err := s.Close(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
	})
}

// TestFakeLock: a program holds the xtables lock; exactly the calls that need the lock must wait
// or fail.
func TestFakeLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := iptablestest.NewFake(iptables.Legacy)
		var unlocks atomic.Int32
		f.OnUnlock(func() { unlocks.Add(1) })
		release := f.HoldLock()
		_, err := f.Begin(t.Context())
		wantErr(t, "Begin", err, iptables.ErrLocked)
		f.ReadsNeedLock(true)
		_, err = f.Read(t.Context(), v4)
		wantErr(t, "Read", err, iptables.ErrLocked)
		f.ReadsNeedLock(false)
		read(t, f, v4)

		f.LockWait(5 * time.Second)
		start := time.Now()
		_, err = f.Begin(t.Context())
		wantErr(t, "Begin", err, iptables.ErrLocked)
		if waited := time.Since(start); waited != 5*time.Second {
			t.Errorf("Begin waited %v, want 5s", waited)
		}

		written := make(chan error, 1)
		go func() { written <- f.RestoreNoflush(v4, canaryText) }()
		synctest.Wait()
		if text := f.SaveTable(v4, rules.Nat); text != "" {
			t.Errorf("written through a held lock:\n%s", text)
		}
		must(t, f.Bypassing().RestoreNoflush(v4, "*mangle\n:X - [0:0]\nCOMMIT\n"))
		if f.SaveTable(v4, rules.Mangle) == "" {
			t.Error("a bypassing writer wrote nothing")
		}
		if unlocks.Load() != 0 {
			t.Errorf("%d unlocks while the lock is held", unlocks.Load())
		}
		release()
		must(t, <-written)

		s, err := f.Begin(t.Context())
		must(t, err)
		f.ReadsNeedLock(true)
		read(t, s, v4) // a session's own read needs no second lock
		must(t, s.Close())
		must(t, s.Close())
		if unlocks.Load() != 3 { // HoldLock, the writer's one table, the session
			t.Errorf("%d unlocks, want 3", unlocks.Load())
		}
	})
}
