package source

import (
	"slices"
	"strings"
	"time"
)

// A Problem is what is wrong with the files of a source.
type Problem struct {
	Source string
	Where  string // file and line, or as much as is known
	Reason string // in one line; it may quote the file
	// Instead is what counts in the place of what the files say.
	Instead Instead
	Since   time.Time
}

// Instead says what counts while files cannot be used.
type Instead string

// What may count while files cannot be used.
const (
	LastGood Instead = "last_good" // what they said before
	Stored   Instead = "stored"    // what they said to an earlier run
	Nothing  Instead = "nothing"   // nothing: what they said is not known
	TheRest  Instead = "rest"      // all of them but one document
)

// Problems delivers what is wrong now with all sources, each time that it is something
// else, and first what Start found. Who reads late gets the newest only.
func (w *Watcher) Problems() <-chan []Problem { return w.problems }

// problemsNow returns what is wrong with all sources.
func (w *Watcher) problemsNow() []Problem {
	var all []Problem
	for _, s := range w.states {
		if s.broken != "" {
			all = append(all, s.problem())
		}
		all = append(all, s.documents...)
	}
	return all
}

// report offers what is wrong now, in the place of what was not yet taken.
func (w *Watcher) report() {
	now := w.problemsNow()
	if slices.Equal(now, w.reported) {
		return
	}
	w.reported = now
	select {
	case <-w.problems:
	default:
	}
	w.problems <- now // nobody else sends
}

// problem describes why the source's files cannot be used.
func (s *state) problem() Problem {
	p := Problem{Source: s.Name(), Where: s.path(), Reason: s.broken, Instead: s.instead, Since: s.since}
	// Errors begin with the file, and the line where there is one.
	if where, _, found := strings.Cut(s.broken, ": "); found && strings.HasPrefix(where, s.path()) {
		p.Where = where
	}
	return p
}
