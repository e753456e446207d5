package source

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// timing are the times of a Watcher.
type timing struct {
	quiet time.Duration // files are read after this long without a change,
	most  time.Duration // or after this long in any case
	again time.Duration // between reads of broken files, and checks for missed events
}

var defaultTiming = timing{quiet: 200 * time.Millisecond, most: 2 * time.Second, again: 10 * time.Second}

// A Watcher loads sources, and loads them again when their files change. Sources are
// independent: while the files of one are broken, its last good rules stay, and other sources
// follow their files.
type Watcher struct {
	timing
	changes chan Declared
	failed  func(source string)
	states  []*state
	id      string // of the last declaration, returned or sent; empty before Load and Start
	// Cache keeps the declarations of sources. Set it before Start.
	Cache     Cache
	keptBadly bool
	problems  chan []Problem
	reported  []Problem // the last ones sent
}

// A state is the Watcher's knowledge about one source.
type state struct {
	Source
	good   Declared // the last result without an error
	stamp  string   // of the files when they were last read
	broken string   // why the files cannot be used; empty if they can
	busy   int      // how many times in a row another process was writing them
	skips  string   // the last logged skips

	instead   Instead   // the rules in use while the files are broken
	since     time.Time // when they broke
	documents []Problem // problems of single documents; the rest of the files is used
	unkept    bool      // good is not on disk
}

// NewWatcher returns a Watcher of the sources. It calls failed, which may be nil, with the name
// of a source each time the source's files cannot be used.
func NewWatcher(failed func(source string), sources ...Source) *Watcher {
	w := &Watcher{timing: defaultTiming, changes: make(chan Declared, 1), problems: make(chan []Problem, 1), failed: failed}
	for _, s := range sources {
		w.states = append(w.states, &state{Source: s})
	}
	return w
}

// Load loads the sources once.
func Load(ctx context.Context, sources ...Source) (Declared, error) {
	return NewWatcher(nil, sources...).Load(ctx)
}

// Changes delivers each new declaration of all sources. A slow reader gets only the newest.
func (w *Watcher) Changes() <-chan Declared { return w.changes }

// Load loads all sources. The error names the mistakes and their places in one line. Run needs
// a Load or Start without an error.
func (w *Watcher) Load(ctx context.Context) (Declared, error) {
	deadline := time.Now().Add(w.most)
	for _, s := range w.states {
		declared, err := w.loadFirst(ctx, s, deadline)
		if err != nil {
			return Declared{}, &sourceError{s.Name(), err}
		}
		s.good = declared
	}
	all, err := w.combine(nil, Declared{})
	if err != nil {
		return Declared{}, &sourceError{"sources", err}
	}
	for _, s := range w.states {
		w.logSkips(ctx, s)
	}
	w.id = all.id()
	return all, nil
}

// Start loads all sources, like Load, but continues if files are broken: it takes the
// declaration on the Cache in their place, or nothing. Problems reports them, and Run reads
// them again.
func (w *Watcher) Start(ctx context.Context) Declared {
	deadline := time.Now().Add(w.most)
	all := Declared{Generation: rules.Generation{}}
	for _, s := range w.states {
		declared, err := w.loadFirst(ctx, s, deadline)
		next := Declared{}
		if err == nil {
			next, err = combine(all, declared)
		}
		if err == nil {
			s.good, s.unkept, all = declared, true, next
			w.logSkips(ctx, s)
			continue
		}
		s.instead = Nothing
		stored, storedErr := w.Cache.recall(s)
		if storedErr == nil {
			next, storedErr = combine(all, stored)
		}
		if storedErr == nil {
			s.good, s.instead, all = stored, Stored, next
		} else if !errors.Is(storedErr, errNotKept) {
			severity.Warnings(klog.FromContext(ctx)).Error(storedErr, "The rules that the source declared in an earlier run could not be read", "source", s.Name())
		}
		w.fail(ctx, s, err)
	}
	w.id = all.id()
	w.report()
	return all
}

// loadFirst loads a source for Load and Start. While its files are being written, it waits
// until they are quiet, at most until deadline. It notes the stamp of the files in s also after
// an error.
func (w *Watcher) loadFirst(ctx context.Context, s *state, deadline time.Time) (Declared, error) {
	declared, stamp, err := s.load()
	for isBusy(err) && time.Now().Before(deadline) && sleep(ctx, w.quiet) {
		declared, stamp, err = s.load()
	}
	s.stamp = stamp
	return declared, err
}

// load loads a source, and returns the stamp of its files before the read. It reads all files
// before it makes rules of them. If they change meanwhile, the error is a busyError, and the
// caller tries again.
func (s *state) load() (Declared, string, error) {
	before := s.files().stat().stamp
	files, err := s.files().read()
	if s.files().stat().stamp != before {
		err = &busyError{"the files", "they changed while they were read"}
	}
	if err != nil {
		return Declared{}, before, err
	}
	declared, err := s.declare(files, s.good)
	return declared, before, err
}

func isBusy(err error) bool {
	busy := (*busyError)(nil)
	return errors.As(err, &busy)
}

// combine combines the last good declarations of all sources, but takes part for the state
// changed. changed is nil if none changed. An error means that they contradict each other.
func (w *Watcher) combine(changed *state, part Declared) (Declared, error) {
	parts := make([]Declared, len(w.states))
	for i, s := range w.states {
		parts[i] = s.good
		if s == changed {
			parts[i] = part
		}
	}
	return combine(parts...)
}

// Run watches the files until ctx ends, and then returns nil. It sends changed declarations to
// Changes and broken files to Problems.
func (w *Watcher) Run(ctx context.Context) error {
	if w.id == "" {
		return errors.New("the sources were not loaded")
	}
	notify := newNotifier(ctx)
	defer notify.close()
	w.keepAll(ctx) // not in Start: a process that does not run the Watcher must not store
	defer w.keepAll(ctx)
	again := time.NewTicker(w.again)
	defer again.Stop()
	due := time.NewTimer(w.quiet) // files may have changed since Load
	defer due.Stop()
	since := time.Now() // the first event that is not handled yet; zero if all are
	touch := func() {
		if since.IsZero() {
			since = time.Now()
		}
		due.Reset(max(0, min(w.quiet, w.most-time.Since(since))))
	}
	notify.watch(w.places())
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, open := <-notify.events():
			switch {
			case !open:
				notify.close() // the next notify.watch opens it again
			case !notify.concerns(event.Name):
				continue
			case notify.mayMove(event.Name):
				notify.watch(w.places())
			}
			for _, s := range w.states {
				s.busy = 0
			}
			touch()
		case err := <-notify.errors():
			notify.failed(err)
			touch()
		case <-again.C:
			notify.watch(w.places())
			w.keepAll(ctx) // not more often: at 5,000 services it writes 10 MB
			touch()
		case <-due.C:
			// A new folder was not watched while it was filled.
			if notify.watch(w.places()) && time.Since(since) < w.most {
				touch()
				continue
			}
			since = time.Time{}
			if w.reload(ctx) {
				touch()
			}
		}
	}
}

// places returns the places to watch of all sources, for the notifier.
func (w *Watcher) places() []place {
	var all []place
	for _, s := range w.states {
		all = append(all, s.files().stat().places...)
	}
	return all
}

// reload loads the sources whose files changed or are broken, and sends the result. soon means
// that another process is writing files, and that they must be read again soon.
func (w *Watcher) reload(ctx context.Context) (soon bool) {
	for _, s := range w.states {
		if s.broken == "" && s.busy == 0 && s.files().stat().stamp == s.stamp {
			continue
		}
		declared, stamp, err := s.load()
		if isBusy(err) && s.busy < int(w.most/w.quiet) {
			s.busy++
			soon = true
			continue
		}
		s.stamp = stamp
		if !isBusy(err) {
			s.busy = 0
		}
		all := Declared{}
		if err == nil {
			all, err = w.combine(s, declared)
		}
		if err != nil {
			w.fail(ctx, s, err)
			continue
		}
		if s.broken != "" {
			severity.Notices(klog.FromContext(ctx)).Info("Declared rules can be used again", "source", s.Name())
		}
		s.broken, s.instead = "", ""
		s.good, s.unkept = declared, true
		w.logSkips(ctx, s)
		w.send(all)
	}
	w.report()
	return soon
}

// fail notes an error of a source's files, and logs it if it differs from the last one. Until
// the files can be used again, the rules in s.good stay declared.
func (w *Watcher) fail(ctx context.Context, s *state, err error) {
	if w.failed != nil {
		w.failed(s.Name())
	}
	text := oneLine(err)
	if s.broken == "" {
		s.since = time.Now()
	}
	if s.instead == "" {
		s.instead = LastGood
	}
	if text != s.broken {
		klog.FromContext(ctx).Error(nil, map[Instead]string{
			LastGood: "Declared rules cannot be used; the last good rules stay in force",
			Stored:   "Declared rules cannot be used; the rules that an earlier run read from the same files stay in force",
			Nothing:  "Declared rules cannot be used, and canaryd has no earlier good rules; nothing of this source is in force",
		}[s.instead], "source", s.Name(), "reason", text)
	}
	s.broken = text
}

// send sends the combined declaration to the loop (Changes) if it differs from the last one
// sent.
func (w *Watcher) send(d Declared) {
	id := d.id()
	if id == w.id {
		return
	}
	w.id = id
	replace(w.changes, d)
}

// replace sends news in place of a value that was not yet received. It must be the only sender.
func replace[T any](to chan T, news T) {
	select {
	case <-to:
	default:
	}
	to <- news
}

// shownSkips is how many objects one change logs.
const shownSkips = 20

// logSkips logs the objects that have no part in the rules, if they changed. Objects that
// kube-proxy ignores by design are logged at -v=2. Objects of kinds that declare nothing are
// problems.
func (w *Watcher) logSkips(ctx context.Context, s *state) {
	log := klog.FromContext(ctx)
	var all strings.Builder
	var broken, others, unknown []kube.Skip
	for _, skip := range s.good.Skips {
		all.WriteString(skip.String() + "\n")
		switch {
		case skip.Unknown:
			unknown = append(unknown, skip)
		case skip.Broken:
			broken = append(broken, skip)
		default:
			others = append(others, skip)
		}
	}
	if all.String() == s.skips {
		return
	}
	s.skips = all.String()
	w.reportUnknown(ctx, s, unknown)
	for i, skip := range broken {
		if i == shownSkips {
			log.Info("More objects are left out", "source", s.Name(), "count", len(broken)-i)
			break
		}
		log.Info("An object is left out, as kube-proxy would", "source", s.Name(), "reason", skip.String())
	}
	for _, skip := range others {
		log.V(2).Info("An object has no part in the rules", "source", s.Name(), "reason", skip.String())
	}
}

// sleep waits for d, and reports whether ctx is still alive then; false ends the caller's wait.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
