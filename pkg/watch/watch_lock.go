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

// lockMask is what happens to the lock's inode. Who uses the lock opens it,
// flocks it and closes it without a write, so the close is the only sign that
// the tables may have changed. ATTRIB and the SELFs say that the path leads to
// another inode from now on.
const lockMask = unix.IN_OPEN | unix.IN_CLOSE_WRITE | unix.IN_CLOSE_NOWRITE |
	unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF

// rearmEvery is how often the watch is laid again without a reason. It finds
// what sends no event: a folder that appears late, and one that is mounted over.
// It costs two system calls, which do nothing while the inodes are the same.
const rearmEvery = 5 * time.Second

// A LockWatcher turns every release of the xtables lock into a hint: the
// legacy backend shows its changes in no other way.
//
// The lock need not exist when it starts, nor its folder: a lock that appears
// is watched at once, a folder that appears within rearmEvery. A lock that is
// deleted or replaced is watched again.
type LockWatcher struct {
	Path    string // the lock file, such as /run/xtables.lock
	Hints   *Hints
	Writers *Writers // who used the lock; see openerWatch and lockHolder

	proc string // procFolder unless a test says otherwise; then nothing but proc names who holds the lock
}

// Run watches until ctx ends and then returns nil.
func (w *LockWatcher) Run(ctx context.Context) error {
	watchAgain(ctx, "xtables lock", w.Hints, w.watch)
	return nil
}

// watch follows one pair of inotify instances until one fails or ctx ends:
// our own on the lock, which fsnotify cannot watch (it hides opens and
// closes), and fsnotify's on the lock's folder.
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

// openers lets the kernel name the users of the lock, where that is allowed; else it returns nil.
func (w *LockWatcher) openers(ctx context.Context) *openerWatch {
	if w.proc != "" {
		return nil // a test asks for what happens without
	}
	openers, err := newOpenerWatch(w.Writers)
	if err != nil {
		// Most nodes: the capability is more than canaryd asks for.
		klog.FromContext(ctx).V(1).Info("Users of the xtables lock are looked up in /proc/locks, which misses the quickest users", "reason", err)
		return nil
	}
	return openers
}

// noteHolders notes who holds the lock each time that it was opened, until
// opened is closed. It is a goroutine of its own because to read /proc/locks
// waits for an RCU grace period (percpu_down_write in locks_start): 5 to 15 ms
// (Linux 6.18, 2 cores), by which every hint would come later.
func (w *LockWatcher) noteHolders(opened <-chan time.Time) {
	proc := cmp.Or(w.proc, procFolder)
	for at := range opened {
		if holder, found := lockHolder(proc, filepath.Clean(w.Path)); found {
			holder.Time = at
			w.Writers.Note(holder)
		}
	}
}

// handle answers one event of the lock's inode. That a process opened it goes to
// opened, unless the answer to an earlier one has not begun yet.
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
		// Under another name it is the lock no longer; a deleted one is
		// watched until its last holder closes it.
		armed.lock.forget(event.watch)
		armed.again(ctx)
	default:
		armed.again(ctx)
	}
}

// armedLock keeps both watches on what the lock's path leads to now.
type armedLock struct {
	path   string
	folder *fsnotify.Watcher
	lock   *inodeWatch
	hints  *Hints
	// openers names who uses the lock, where that is allowed; else nil.
	openers *openerWatch

	current int32 // the lock's watch; 0 while there is no lock
	named   bool  // whether openers watches it
	warned  bool  // a watch was refused, and it was logged
}

// again lays both watches again. The folder comes first: a lock created in
// between is then seen by one of them. A new inode is a hint, because its
// first holder may have been quicker than the watch.
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

// warn logs the first refusal that is not plain absence, most likely
// fs.inotify.max_user_watches; the poll goes on without the watch.
func (a *armedLock) warn(ctx context.Context, err error) {
	if err == nil || a.warned || errors.Is(err, fs.ErrNotExist) {
		return
	}
	a.warned = true
	klog.FromContext(ctx).Error(err, "The xtables lock could not be watched; trying again", "path", a.path, "every", rearmEvery)
}
