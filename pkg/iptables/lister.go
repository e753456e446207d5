package iptables

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/rules"
)

const (
	// listTimeout bounds one list. It takes about 1 ms, 20 ms beside 20,000
	// rules on legacy.
	listTimeout = 10 * time.Second
	// listLockWait is for the private lock, which only our own restores take.
	listLockWait = 5 // seconds
	// killEvery is how often a list that must end is killed: it may not have
	// been started yet.
	killEvery = 10 * time.Millisecond
)

// A lister lists one family's chains through go-iptables. It may be used
// concurrently.
//
// go-iptables hands its children our own environment, so what moves their lock
// must be in it; see privateLockForAll. It gives them no deadline either: list
// does.
type lister struct {
	family  rules.Family
	program *goiptables.IPTables
}

func newLister(ctx context.Context, family rules.Family, path string) (*lister, error) {
	program, err := openProgram(ctx, path, family)
	if err != nil {
		return nil, err
	}
	return &lister{family, program}, nil
}

// list returns the chain's lines as "iptables -S" prints them. On legacy it
// creates a table that is not there. An error means nothing but that it failed.
func (l *lister) list(ctx context.Context, place Place) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	var lines []string
	var err error
	thread, done := make(chan int, 1), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the child is then this thread's
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		lines, err = l.program.List(string(place.Table), place.Chain)
	}()
	select {
	case <-done:
		return lines, err
	case <-ctx.Done():
	}
	for tid := <-thread; ; {
		killChildren(tid)
		select {
		case <-done:
			return nil, fmt.Errorf("listing %v %s %s: %w", l.family, place.Table, place.Chain, ctx.Err())
		case <-time.After(killEvery):
		}
	}
}

// killChildren kills the children that one of our threads has started and not
// yet waited for. Where the kernel does not list them (CONFIG_PROC_CHILDREN)
// they end by themselves.
func killChildren(tid int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", tid))
	if err != nil {
		return
	}
	for _, word := range strings.Fields(string(text)) {
		if pid, err := strconv.Atoi(word); err == nil {
			_ = unix.Kill(pid, unix.SIGKILL) // gone already: fine
		}
	}
}

// lockVariable is what makes iptables-legacy use another lock (1.8.6).
const lockVariable = "XTABLES_LOCKFILE"

// privateLockForAll sets the environment of every child that this process
// starts from now on, and returns how to undo it. A list on the common lock
// would wake who watches that lock, which lists again: 3,525 execs followed one
// flush. Whoever takes the common lock in this process (Begin) names it.
func privateLockForAll(path string) (undo func() error, err error) {
	before, was := os.LookupEnv(lockVariable)
	if err := os.Setenv(lockVariable, path); err != nil {
		return nil, err
	}
	return func() error {
		if was {
			return os.Setenv(lockVariable, before)
		}
		return os.Unsetenv(lockVariable)
	}, nil
}
