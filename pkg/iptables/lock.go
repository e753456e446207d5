package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is the interval of attempts while another process holds the lock. A wait in the
// kernel (LOCK_EX without LOCK_NB) could not end at a deadline.
const lockPoll = 10 * time.Millisecond

// takeLock takes the xtables lock as iptables-legacy does: open, flock; Begin calls it. It
// waits for at most wait, then returns ErrLocked. Closing the descriptor fd (-1 after an error)
// releases the lock; children do not inherit it.
func takeLock(ctx context.Context, path string, wait time.Duration) (fd int, err error) {
	deadline := time.Now().Add(wait)
	for {
		fd, err := tryLock(path)
		if err == nil {
			return fd, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, errMoved) && !errors.Is(err, unix.EINTR) {
			return -1, fmt.Errorf("taking the xtables lock %s: %w", path, err)
		}
		if !time.Now().Before(deadline) {
			return -1, fmt.Errorf("%w: %s, waited %v", ErrLocked, path, wait)
		}
		select {
		case <-ctx.Done():
			return -1, ctx.Err()
		case <-time.After(lockPoll):
		}
	}
}

var errMoved = errors.New("the file was replaced")

// tryLock locks the file or fails at once, with EWOULDBLOCK if another process has the lock. A
// file that was replaced meanwhile is the wrong one (errMoved): a process that opens the path
// now locks another inode. takeLock then tries again.
func tryLock(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return -1, err
	}
	var locked, named unix.Stat_t
	if err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err == nil {
		err = unix.Fstat(fd, &locked)
	}
	if err == nil && (unix.Stat(path, &named) != nil || locked.Ino != named.Ino || locked.Dev != named.Dev) {
		err = errMoved
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// lockVariable names another lock file for iptables-legacy (1.8.6).
const lockVariable = "XTABLES_LOCKFILE"
