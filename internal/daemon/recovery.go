package daemon

import (
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/flushes"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// A recovery is what the tries of one loss have put back so far. Where one family or table
// keeps a loss open, the others may long be intact by then.
type recovery struct {
	back     map[rules.TableID]time.Time // since when tables that were hit are intact
	replayed bool                        // a table was written and proved
	raced    bool                        // and another process wrote meanwhile
	ridden   time.Time                   // when native tables of the same record were proved
}

// afterTry takes up the result of another try.
func (r *recovery) afterTry(hit flushes.Verdicts, result reload.Result) {
	for id, tr := range flushes.TablesOf(result) {
		v := tr.Finding.Verdict
		switch {
		case hit[id] == "" || !tr.Proved && v == canary.Unknown:
		case !tr.Proved && v.Loss():
			delete(r.back, id)
		case r.back[id].IsZero():
			r.back = tableid.With(r.back, id, result[id.Family].Done)
		}
		r.replayed = r.replayed || tr.Proved
	}
	for _, fr := range result {
		r.raced = r.raced || fr.Outcome == reload.Raced
	}
}

// outcome returns what became of the whole loss, after a last try.
func (r recovery) outcome(result reload.Result) api.Outcome {
	switch outcome := worst(result); {
	case outcome != reload.Skipped || !r.replayed:
		return outcome
	case r.raced:
		return reload.Raced
	default:
		return reload.Proved
	}
}

// provedAt returns when the last table that was hit was intact again, native ones included.
func (r recovery) provedAt() time.Time {
	last := r.ridden
	for _, at := range r.back {
		last = pace.Latest(last, at)
	}
	return last
}
