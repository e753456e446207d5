package watch

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/canaryd/canaryd/internal/testkit/nstest"
	"github.com/canaryd/canaryd/pkg/iptables"
	"github.com/canaryd/canaryd/pkg/nft"
)

// TestBothWatchers: a commit watcher and a lock watcher give hints to one Hints and note in one
// Writers, each only its own.
func TestBothWatchers(t *testing.T) {
	source, lock := newFakeSource(), filepath.Join(t.TempDir(), "lock")
	all := Watchers{
		Hints: NewHints(), Writers: new(Writers), Lock: lock,
		Subscribe: func() (CommitSource, error) { return source, nil },
	}
	begin := time.Now()
	stop := start(func(ctx context.Context) error { return all.Run(ctx, Signs{Commits: true, Lock: true}) })
	counted := func(s Source, n uint64) func() bool {
		return func() bool { return all.Hints.Counts()[s] >= n }
	}
	eventually(t, counted(SourceNFT, 1))

	drain(t, all.Hints)
	source.events <- nft.Commit{Genid: 7, Comm: "nft"}
	waitHint(all.Hints)
	eventually(t, counted(SourceNFT, 2))
	if got := all.Writers.Between(6, 7); len(got) != 1 || got[0].Comm != "nft" {
		t.Errorf("writers of commits: %+v", got)
	}

	release := holdLock(t, lock)
	eventually(t, counted(SourceLock, 1))
	before := all.Hints.Counts()[SourceLock]
	drain(t, all.Hints)
	release()
	waitHint(all.Hints)
	eventually(t, counted(SourceLock, before+1))
	for _, w := range all.Writers.Holders(begin) {
		if w.Genid != 0 {
			t.Errorf("a commit is taken for a holder of the lock: %+v", w)
		}
	}
	stop()
	select {
	case <-source.closed:
	default:
		t.Error("the commit watcher did not end")
	}
}

// TestOnlyTheWatcherThatIsNeeded: without native tables, nothing subscribes to commits.
func TestOnlyTheWatcherThatIsNeeded(t *testing.T) {
	all := Watchers{
		Hints: NewHints(), Writers: new(Writers), Lock: filepath.Join(t.TempDir(), "lock"),
		Subscribe: func() (CommitSource, error) {
			t.Error("it subscribed to commits")
			return newFakeSource(), nil
		},
	}
	stop := start(func(ctx context.Context) error { return all.Run(ctx, Signs{Lock: true}) })
	holdLock(t, all.Lock)()
	eventually(t, func() bool { return all.Hints.Counts()[SourceLock] > 0 })
	stop()
	if n := all.Hints.Counts()[SourceNFT]; n != 0 {
		t.Errorf("%d hints of a commit watcher", n)
	}
}

// TestBothWatchersOnTheKernel: on iptables-legacy, commits to native tables give
// hints, too.
func TestBothWatchersOnTheKernel(t *testing.T) {
	nstest.Run(t, func(t *testing.T) {
		nstest.NeedProgram(t, "iptables-legacy", "nft")
		lock := filepath.Join(t.TempDir(), "lock")
		k, err := iptables.Open(t.Context(), iptables.Config{Backend: iptables.Legacy, LockFile: lock})
		if err != nil {
			t.Fatal(err)
		}
		defer k.Close()
		all := Watchers{
			Hints: NewHints(), Writers: new(Writers), Lock: lock,
			Subscribe: func() (CommitSource, error) { return k.Subscribe() },
		}
		defer start(func(ctx context.Context) error { return all.Run(ctx, Signs{Commits: true, Lock: true}) })()
		eventually(t, func() bool { return all.Hints.Counts()[SourceNFT] > 0 })
		nstest.Command(t, "nft", "add", "table", "inet", "native")
		eventually(t, func() bool { return len(all.Writers.Between(1, 2)) == 1 })
		t.Setenv("XTABLES_LOCKFILE", lock)
		nstest.Command(t, "iptables-legacy", "-w", "-N", "A")
		eventually(t, func() bool { return all.Hints.Counts()[SourceLock] > 0 })
	})
}
