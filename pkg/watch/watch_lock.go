package watch

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// lockMask selects the events of the lock's inode. A user of the lock opens it,
// flocks it and closes it without a write. So the close is the only sign that the
// tables may have changed. After ATTRIB and the SELFs the path leads to another
// inode.
const lockMask = unix.IN_OPEN | unix.IN_CLOSE_WRITE | unix.IN_CLOSE_NOWRITE |
	unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF

// rearmEvery is the interval at which the watch is set again without a reason.
// That finds changes without an event: a folder that appears late, and a mount
// over the lock. It costs two system calls, which do nothing while the inodes are
// the same.
const rearmEvery = 5 * time.Second

// A LockWatcher turns every release of the xtables lock into a hint: the legacy
// backend gives no other sign of a change.
//
// At its start the lock and its folder may be missing. It watches a new lock at
// once, and a new folder within rearmEvery. It watches a lock again after a
// deletion or replacement.
type LockWatcher struct {
	Path    string // the lock file, such as /run/xtables.lock
	Hints   *Hints
	Writers *Writers // users of the lock; see openerWatch and lockHolder

	proc string // procFolder, except in tests; there only proc names the lock's holders
}

// Run watches until ctx ends and then returns nil.
func (w *LockWatcher) Run(ctx context.Context) error {
	watchAgain(ctx, "xtables lock", w.Hints, w.watch)
	return nil
}

// watch follows a pair of inotify instances until one fails or ctx ends. Its own watches the
// lock, because fsnotify hides opens and closes. fsnotify's watches the lock's folder. worked
// reports whether an event was received; see watchAgain.
func (w *LockWatcher) watch(ctx context.Context) (worked bool, err error) {
	folder, err := fsnotify.NewWatcher()
	if err != nil {
		return false, err
	}
	defer folder.Close()
	lock, err := newInodeWatch()
	if err != nil {
		return false, err
	}
	var reader sync.WaitGroup
	defer reader.Wait()
	opened := make(chan time.Time, 1)
	defer close(opened)
	reader.Go(func() { w.noteHolders(opened) })
	defer lock.close() // ends read
	events, failed := make(chan inodeEvent), make(chan error, 2)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	reader.Go(func() { failed <- lock.read(ctx, events) })

	armed := armedLock{path: filepath.Clean(w.Path), folder: folder, lock: lock, hints: w.Hints}
	if openers := w.openers(ctx); openers != nil {
		defer openers.close()
		armed.openers = openers
		reader.Go(func() { failed <- openers.read() })
	}
	armed.again(ctx)
	w.Hints.Give(SourceLock)
	rearm := time.NewTicker(rearmEvery)
	defer rearm.Stop()
	for {
		select {
		case <-ctx.Done():
			return worked, ctx.Err()
		case err := <-failed:
			return worked, err
		case <-rearm.C:
			armed.again(ctx)
		case event, open := <-folder.Events:
			if !open {
				return worked, fsnotify.ErrClosed
			}
			if filepath.Clean(event.Name) == armed.path {
				armed.again(ctx)
			}
		case err := <-folder.Errors:
			if !errors.Is(err, fsnotify.ErrEventOverflow) {
				return worked, err
			}
			w.Hints.Give(SourceOverflow)
			armed.again(ctx)
		case event := <-events:
			worked = true
			w.handle(ctx, event, &armed, opened)
		}
	}
}

// openers returns a watch that names the users of the lock, nil if the kernel does not allow
// it. Without it, noteHolders looks them up.
func (w *LockWatcher) openers(ctx context.Context) *openerWatch {
	if w.proc != "" {
		return nil // a test runs the other path
	}
	openers, err := newOpenerWatch(w.Writers)
	if err != nil {
		// This is so on most nodes, because canaryd does not require the
		// capability.
		klog.FromContext(ctx).V(1).Info("Users of the xtables lock are looked up in /proc/locks, which misses the quickest users", "reason", err)
		return nil
	}
	return openers
}

// noteHolders notes the lock's holder after each opening, until opened is closed.
// It has a goroutine of its own so that it does not delay hints. A read of
// /proc/locks waits 5 to 15 ms for an RCU grace period (percpu_down_write in
// locks_start; Linux 6.18, 2 cores).
func (w *LockWatcher) noteHolders(opened <-chan time.Time) {
	proc := cmp.Or(w.proc, procFolder)
	for at := range opened {
		if holder, found := lockHolder(proc, filepath.Clean(w.Path)); found {
			holder.Time = at
			w.Writers.Note(holder)
		}
	}
}

// handle handles one event of the lock's inode. It reports an opening to opened,
// unless an earlier report still waits there.
func (w *LockWatcher) handle(ctx context.Context, event inodeEvent, armed *armedLock, opened chan<- time.Time) {
	switch {
	case event.mask&unix.IN_Q_OVERFLOW != 0:
		w.Hints.Give(SourceOverflow)
		armed.again(ctx)
	case event.mask&unix.IN_OPEN != 0:
		if armed.named {
			return
		}
		select {
		case opened <- time.Now():
		default:
		}
	case event.mask&(unix.IN_CLOSE_WRITE|unix.IN_CLOSE_NOWRITE) != 0:
		w.Hints.Give(SourceLock)
	case event.mask&unix.IN_MOVE_SELF != 0:
		// A moved file is not the lock any more. A deleted file is watched until
		// its last holder closes it.
		armed.lock.forget(event.watch)
		armed.again(ctx)
	default:
		armed.again(ctx)
	}
}

// armedLock keeps both watches on the present files of the lock's path.
type armedLock struct {
	path   string
	folder *fsnotify.Watcher
	lock   *inodeWatch
	hints  *Hints
	// openers names the users of the lock; nil if that is not allowed.
	openers *openerWatch

	current int32 // the lock's watch; 0 while there is no lock
	named   bool  // whether openers watches it
	warned  bool  // a watch was refused, which was logged
}

// again sets both watches again. It begins with the folder, so that one of them
// notices a lock created in between. A new inode gives a hint, because its first
// holder may have been quicker than the watch.
func (a *armedLock) again(ctx context.Context) {
	a.warn(ctx, a.folder.Add(filepath.Dir(a.path)))
	watch, err := a.lock.add(a.path)
	a.warn(ctx, err)
	if watch != a.current && watch != 0 {
		a.named = a.openers != nil && a.openers.arm(a.path) == nil
		a.hints.Give(SourceLock)
	}
	a.current = watch
}

// warn logs the first refusal other than absence, most likely because of
// fs.inotify.max_user_watches; nil is none. The poll continues without the watch.
func (a *armedLock) warn(ctx context.Context, err error) {
	if err == nil || a.warned || errors.Is(err, fs.ErrNotExist) {
		return
	}
	a.warned = true
	klog.FromContext(ctx).Error(err, "The xtables lock could not be watched; trying again", "path", a.path, "every", rearmEvery)
}
