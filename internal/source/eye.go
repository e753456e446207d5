package source

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// An eye watches places through fsnotify. Without it (the user's inotify
// instances may be used up) the Watcher still looks from time to time.
type eye struct {
	log     klog.Logger
	watcher *fsnotify.Watcher // nil while there is none
	places  []place
	warned  bool
}

func newEye(ctx context.Context) *eye { return &eye{log: klog.FromContext(ctx)} }

func (e *eye) close() {
	if e.watcher != nil {
		_ = e.watcher.Close() // it was read from only
	}
	e.watcher = nil
}

func (e *eye) events() <-chan fsnotify.Event {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Events
}

func (e *eye) errors() <-chan error {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Errors
}

// failed answers an error of fsnotify: of an overflow the next look makes up
// for what was lost; after anything else the watches are laid anew.
func (e *eye) failed(err error) {
	if errors.Is(err, fsnotify.ErrEventOverflow) {
		return
	}
	e.warn(err)
	e.close()
}

// aim watches the folders of these places and no others. It is true when a
// folder was not watched before.
func (e *eye) aim(places []place) (added bool) {
	e.places = places
	if e.watcher == nil {
		watcher, err := fsnotify.NewWatcher()
		if err != nil {
			e.warn(err)
			return false
		}
		e.watcher = watcher
	}
	watched := e.watcher.WatchList()
	for _, p := range places {
		// A folder that was moved away and made again is another one, so
		// all are added each time; it does nothing to one that is watched.
		err := e.watcher.Add(p.folder)
		e.warn(err)
		if err == nil && !slices.Contains(watched, p.folder) {
			watched, added = append(watched, p.folder), true
		}
	}
	for _, folder := range watched {
		if !slices.ContainsFunc(places, func(p place) bool { return p.folder == folder }) {
			_ = e.watcher.Remove(folder) // it may be gone, and its watch with it
		}
	}
	return added
}

// warn logs the first refusal that is not plain absence.
func (e *eye) warn(err error) {
	if err == nil || e.warned || errors.Is(err, fs.ErrNotExist) {
		return
	}
	e.warned = true
	e.log.Error(err, "Declared rules cannot be watched well; their files are looked at all the same", "every", patience.again)
}

// concerned reports whether an event changes what is read.
func (e *eye) concerned(event string) bool {
	return slices.ContainsFunc(e.places, func(p place) bool { return p.concerns(event) })
}

// leads reports whether the name is one that leads to files: a link, a folder,
// or what is missing. The folders to watch may then be others.
func (e *eye) leads(event string) bool {
	return slices.ContainsFunc(e.places, func(p place) bool { return p.name != "" && p.concerns(event) })
}
