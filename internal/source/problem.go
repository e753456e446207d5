package source

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// A Problem is a defect of a source's files.
type Problem struct {
	Source string
	Where  string // file and line, or as much as is known
	Reason string // in one line; it may quote the file
	// Instead names the rules that are used in place of the files'.
	Instead Instead
	Since   time.Time
}

// Instead names the rules that are used while files cannot be read.
type Instead string

// The values of Instead.
const (
	LastGood Instead = "last_good" // the last good rules of this run
	Stored   Instead = "stored"    // the last good rules of an earlier run
	Nothing  Instead = "nothing"   // no rules: no earlier ones are known
	TheRest  Instead = "rest"      // the files without one document
)

// Problems delivers the problems of all sources: first those found by Start, and then each new
// list. A slow reader gets only the newest.
func (w *Watcher) Problems() <-chan []Problem { return w.problems }

// report sends the problems of all sources to Problems if they changed; an empty list means
// that all are over.
func (w *Watcher) report() {
	var now []Problem
	for _, s := range w.states {
		if s.broken != "" {
			now = append(now, s.problem())
		}
		now = append(now, s.documents...)
	}
	if slices.Equal(now, w.reported) {
		return
	}
	w.reported = now
	replace(w.problems, now)
}

// problem describes why the source's files cannot be used, for a Status: Where is the file and
// line, as far as the error names them.
func (s *state) problem() Problem {
	p := Problem{Source: s.Name(), Where: s.files().path, Reason: s.broken, Instead: s.instead, Since: s.since}
	// Errors begin with the file, and the line if it is known.
	if where, _, found := strings.Cut(s.broken, ": "); found && strings.HasPrefix(where, s.files().path) {
		p.Where = where
	}
	return p
}

// shownDocuments is how many documents of one source are named. In a file of `kubectl get all`,
// most are of kinds that declare nothing.
const shownDocuments = 20

// reportUnknown makes a problem of each object whose kind declares nothing, and counts and logs
// new ones. The rest of the file is used.
func (w *Watcher) reportUnknown(ctx context.Context, s *state, unknown []kube.Skip) {
	log := klog.FromContext(ctx)
	before := map[string]time.Time{}
	for _, p := range s.documents {
		before[p.Reason] = p.Since
	}
	s.documents = nil
	for i, skip := range unknown {
		if i == shownDocuments {
			rest := fmt.Sprintf("%d more objects are of kinds that declare no rules", len(unknown)-i)
			s.documents = append(s.documents, Problem{Source: s.Name(), Where: s.files().path, Reason: rest, Instead: TheRest, Since: time.Now()})
			severity.Warnings(log).Error(nil, "More objects declare nothing", "source", s.Name(), "count", len(unknown)-i)
			break
		}
		p := Problem{Source: s.Name(), Where: skip.Where, Reason: skip.String(), Instead: TheRest, Since: time.Now()}
		since, known := before[p.Reason]
		if known {
			p.Since = since
		} else {
			severity.Warnings(log).Error(nil, "An object declares nothing; the rest of its file counts", "source", s.Name(), "reason", p.Reason)
			if w.failed != nil {
				w.failed(s.Name())
			}
		}
		s.documents = append(s.documents, p)
	}
}
