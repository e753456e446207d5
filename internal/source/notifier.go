package source

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
)

// A notifier watches places through fsnotify. Without it (the user may have no inotify instance
// left) the Watcher still checks the files from time to time.
type notifier struct {
	log     klog.Logger
	watcher *fsnotify.Watcher // nil while there is none
	places  []place
	warned  bool
}

func newNotifier(ctx context.Context) *notifier { return &notifier{log: klog.FromContext(ctx)} }

// close ends the watch; the next watch opens it again. Run polls meanwhile.
func (n *notifier) close() {
	if n.watcher != nil {
		_ = n.watcher.Close() // nothing was written to it
	}
	n.watcher = nil
}

// events returns the channel of changes; nil, which never delivers, while nothing is watched.
func (n *notifier) events() <-chan fsnotify.Event {
	if n.watcher == nil {
		return nil
	}
	return n.watcher.Events
}

// errors returns the channel of fsnotify's errors; nil, which never delivers, while nothing is
// watched.
func (n *notifier) errors() <-chan error {
	if n.watcher == nil {
		return nil
	}
	return n.watcher.Errors
}

// failed handles an error of fsnotify. After an overflow, the next check finds the lost
// changes. After any other error, watch begins again.
func (n *notifier) failed(err error) {
	if errors.Is(err, fsnotify.ErrEventOverflow) {
		return
	}
	n.warn(err)
	n.close()
}

// watch watches the folders of these places and no others. It reports whether a folder is new:
// a file may have changed there before the watch began. Failures are logged, and the files are
// still polled.
func (n *notifier) watch(places []place) (added bool) {
	n.places = places
	if n.watcher == nil {
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			n.warn(err)
			return false
		}
		n.watcher = watcher
	}
	watched := n.watcher.WatchList()
	for _, p := range places {
		// A folder may have been moved away and created again, so all are added each time. For
		// a folder that is watched already, Add does nothing.
		err := n.watcher.Add(p.folder)
		n.warn(err)
		if err == nil && !slices.Contains(watched, p.folder) {
			watched, added = append(watched, p.folder), true
		}
	}
	for _, folder := range watched {
		if !slices.ContainsFunc(places, func(p place) bool { return p.folder == folder }) {
			_ = n.watcher.Remove(folder) // the folder and its watch may be gone
		}
	}
	return added
}

// warn logs the first error other than a missing folder.
func (n *notifier) warn(err error) {
	if err == nil || n.warned || errors.Is(err, fs.ErrNotExist) {
		return
	}
	n.warned = true
	severity.Warnings(n.log).Error(err, "Could not watch all files of declared rules; changes are noticed when they are checked", "every", defaultTiming.again)
}

// concerns reports whether an event may change the files' content.
func (n *notifier) concerns(event string) bool {
	return slices.ContainsFunc(n.places, func(p place) bool { return p.concerns(event) })
}

// mayMove reports whether the event is about a link, a folder or a missing name on the way to
// files. Other folders may have to be watched then.
func (n *notifier) mayMove(event string) bool {
	return slices.ContainsFunc(n.places, func(p place) bool { return p.name != "" && p.concerns(event) })
}
