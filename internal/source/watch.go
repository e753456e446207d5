package source

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// timing is how patient a Watcher is.
type timing struct {
	quiet time.Duration // files are read once nothing happened to them this long,
	most  time.Duration // but after this long all the same
	again time.Duration // broken files are read again, and missed events found
}

var patience = timing{quiet: 200 * time.Millisecond, most: 2 * time.Second, again: 10 * time.Second}

// A Watcher loads sources and loads them again when their files change.
//
// Every source stands for itself: while the files of one are broken, its last
// good rules stay and those of the others follow their files.
type Watcher struct {
	timing
	changes chan Declared
	failed  func(source string)
	states  []*state
	id      string // of what was returned or sent last; empty before Load and Start
	// Shelf keeps what sources said; to be set before Start.
	Shelf     Shelf
	keptBadly bool
	problems  chan []Problem
	reported  []Problem // what was sent last
}

// A state is what a Watcher knows about one source.
type state struct {
	Source
	good   Declared // what was read last without an error
	stamp  string   // of the files when they were read last
	broken string   // why they could not be used; empty if they could
	busy   int      // how often in a row somebody was writing them
	skips  string   // what was logged of them

	instead   Instead   // of what is broken
	since     time.Time // when it broke
	documents []Problem // of single documents; the rest of the files counts
	unkept    bool      // good is not on disk
}

// NewWatcher returns a Watcher of the sources. failed is told the name of a
// source each time its files could not be used, and may be nil.
func NewWatcher(failed func(source string), sources ...Source) *Watcher {
	w := &Watcher{timing: patience, changes: make(chan Declared, 1), problems: make(chan []Problem, 1), failed: failed}
	for _, s := range sources {
		w.states = append(w.states, &state{Source: s})
	}
	return w
}

// Load loads sources once.
func Load(ctx context.Context, sources ...Source) (Declared, error) {
	return NewWatcher(nil, sources...).Load(ctx)
}

// Changes delivers what is declared now, each time that it is something else.
// Who reads late gets the newest only.
func (w *Watcher) Changes() <-chan Declared { return w.changes }

// Load loads all sources. An error says on one line what is wrong where. It, or
// Start, must have succeeded before Run.
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
		w.tellSkips(ctx, s)
	}
	w.id = all.id()
	return all, nil
}

// Start loads all sources, as Load does, but broken files do not end it: in their
// place counts what is on the Shelf, or nothing. Problems reports them, and Run goes
// on reading them.
func (w *Watcher) Start(ctx context.Context) Declared {
	deadline := time.Now().Add(w.most)
	all := Declared{Generation: rules.Generation{}}
	for _, s := range w.states {
		declared, err := w.loadFirst(ctx, s, deadline)
		next := Declared{}
		if err == nil {
			next, err = Combine(all, declared)
		}
		if err == nil {
			s.good, s.unkept, all = declared, true, next
			w.tellSkips(ctx, s)
			continue
		}
		s.instead = Nothing
		stored, storedErr := w.Shelf.recall(s)
		if storedErr == nil {
			next, storedErr = Combine(all, stored)
		}
		if storedErr == nil {
			s.good, s.instead, all = stored, Stored, next
		} else if !errors.Is(storedErr, errNotKept) {
			klog.FromContext(ctx).Error(storedErr, "What the source said to an earlier run is not known", "source", s.Name())
		}
		w.fail(ctx, s, err)
	}
	w.id = all.id()
	w.report()
	return all
}

// loadFirst loads a source, and waits while its files are being written.
func (w *Watcher) loadFirst(ctx context.Context, s *state, deadline time.Time) (Declared, error) {
	declared, stamp, err := s.load()
	for isBusy(err) && time.Now().Before(deadline) && sleep(ctx, w.quiet) {
		declared, stamp, err = s.load()
	}
	s.stamp = stamp
	return declared, err
}

// load loads a source, and says what its files looked like. They are read in
// one go, before anything is made of them, so that they belong together.
func (s *state) load() (Declared, string, error) {
	before := s.look().stamp
	files, err := s.read()
	if s.look().stamp != before {
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

// combine combines the last good parts, with part in the place of changed's.
func (w *Watcher) combine(changed *state, part Declared) (Declared, error) {
	parts := make([]Declared, len(w.states))
	for i, s := range w.states {
		parts[i] = s.good
		if s == changed {
			parts[i] = part
		}
	}
	return Combine(parts...)
}

// Run watches the files until ctx ends, and then returns nil.
func (w *Watcher) Run(ctx context.Context) error {
	if w.id == "" {
		return errors.New("the sources were not loaded")
	}
	eye := newEye(ctx)
	defer eye.close()
	w.keepAll(ctx) // and not in Start: who watches them goes by them
	defer w.keepAll(ctx)
	again := time.NewTicker(w.again)
	defer again.Stop()
	due := time.NewTimer(w.quiet) // something may have happened since Load
	defer due.Stop()
	since := time.Now() // the first event that is not answered; zero if all are
	touch := func() {
		if since.IsZero() {
			since = time.Now()
		}
		due.Reset(max(0, min(w.quiet, w.most-time.Since(since))))
	}
	eye.aim(w.places())
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, open := <-eye.events():
			switch {
			case !open:
				eye.close() // opened again by the next aim
			case !eye.concerned(event.Name):
				continue
			case eye.leads(event.Name):
				eye.aim(w.places())
			}
			for _, s := range w.states {
				s.busy = 0
			}
			touch()
		case err := <-eye.errors():
			eye.failed(err)
			touch()
		case <-again.C:
			eye.aim(w.places())
			w.keepAll(ctx) // no more often: at 5,000 services it is 10 MB
			touch()
		case <-due.C:
			// A folder that came into sight was not watched while it was filled.
			if eye.aim(w.places()) && time.Since(since) < w.most {
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

func (w *Watcher) places() []place {
	var all []place
	for _, s := range w.states {
		all = append(all, s.look().places...)
	}
	return all
}

// reload loads the sources whose files changed or are broken, and sends what
// has become of it. It is true when somebody is writing files, which are to be
// read soon.
func (w *Watcher) reload(ctx context.Context) (soon bool) {
	for _, s := range w.states {
		if s.broken == "" && s.busy == 0 && s.look().stamp == s.stamp {
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
		s.good, s.unkept = declared, true
		s.mended(ctx)
		w.tellSkips(ctx, s)
		w.send(all)
	}
	w.report()
	return soon
}

// fail counts an error, and logs it if it is another one than before.
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
			LastGood: "Declared rules cannot be used; the last good ones stay",
			Stored:   "Declared rules cannot be used; those that an earlier run took from the same files stay",
			Nothing:  "Declared rules cannot be used, and none that were good are known; nothing of this source is in force",
		}[s.instead], "source", s.Name(), "reason", text)
	}
	s.broken = text
}

func (s *state) mended(ctx context.Context) {
	if s.broken != "" {
		klog.FromContext(ctx).Info("Declared rules can be used again", "source", s.Name())
	}
	s.broken, s.instead = "", ""
}

// send offers what is declared now, in the place of what was not yet taken.
func (w *Watcher) send(d Declared) {
	id := d.id()
	if id == w.id {
		return
	}
	w.id = id
	select {
	case <-w.changes:
	default:
	}
	w.changes <- d // nobody else sends
}

// shownSkips is how many objects one change logs.
const shownSkips = 20

// tellSkips logs the objects that have no part in the rules, if they are
// others than before. Those that are none of kube-proxy's business are told to
// who asks for more. Those of a kind that declares nothing are errors.
func (w *Watcher) tellSkips(ctx context.Context, s *state) {
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
	w.tellUnknown(ctx, s, unknown)
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

// sleep waits for d and reports whether ctx is still alive then.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
