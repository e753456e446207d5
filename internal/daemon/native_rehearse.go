package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/native"
	"github.com/canaryd/canaryd/pkg/tableid"
)

const (
	// rehearseMost is how many rules and elements are rehearsed at a time. The kernel takes as
	// long as for a replay, 5 ms at 100 services and 0.4 s at 1,000. Meanwhile it lets no
	// process write (Linux 6.18). A larger table is rehearsed in pieces.
	rehearseMost = 2000
	// rehearseEvery is how often one table is rehearsed. rehearseShare is how long the next
	// piece waits, in times of the last one's duration.
	rehearseEvery = time.Minute
	rehearseShare = 49
)

// A rehearsal checks, piece by piece, whether the kernel would take a table again.
type rehearsal struct {
	at    time.Time     // of the next piece; zero: there is none
	of    *native.Table // under rehearsal; nil: the next one begins
	from  int           // where the next piece begins
	began time.Time
	found []native.Held // refused so far
	whole error         // a piece was refused as a whole
	first error
}

// plan plans a rehearsal of content that adopt has learned, once in rehearseEvery. It follows a
// rehearsal that is under way.
func (h *rehearsal) plan(now time.Time) {
	if h.at.IsZero() {
		h.at = now
		if !h.began.IsZero() {
			h.at = pace.Latest(now, h.began.Add(rehearseEvery))
		}
	}
}

// rehearseAt returns when the next piece of a native table is rehearsed; zero: none is.
func (r *nativeRealm) rehearseAt() (at time.Time) {
	for _, t := range r.tables {
		at = pace.Earliest(at, t.rehearsal.at)
	}
	return at
}

// rehearseNative checks whether the kernel would take the learned native tables again, and
// reports the parts that it would refuse.
func (d *Daemon) rehearseNative(ctx context.Context, st *state) {
	r := &st.native
	for _, id := range r.ids() {
		if t := r.tables[id]; pace.Due(t.rehearsal.at, time.Now()) {
			d.rehearse(ctx, st, id, t)
			return
		}
	}
}

// rehearse rehearses one piece of a table. After the last piece it reports the refused parts,
// and plans another rehearsal if the content has changed.
func (d *Daemon) rehearse(ctx context.Context, st *state, id tableid.TableID, t *nativeTable) {
	h, start := &t.rehearsal, time.Now()
	if h.of == nil {
		*h = rehearsal{of: t.want, began: start}
	}
	piece, next := h.of.Piece(h.from, rehearseMost)
	err := d.cfg.Native.Rehearse(piece)
	end := time.Now()
	wait := end.Add(rehearseShare * end.Sub(start))
	for _, other := range st.native.tables { // one at a time
		if !other.rehearsal.at.IsZero() {
			other.rehearsal.at = pace.Latest(other.rehearsal.at, wait)
		}
	}
	var refused *native.UnreplayableError
	switch {
	case errors.As(err, &refused):
		h.take(refused)
	case err != nil: // there is no result now
		h.of, h.from, h.at = nil, 0, end.Add(rehearseEvery)
		return
	}
	if h.from = next; next != 0 {
		h.at = wait
		return
	}
	h.report(ctx, id, t)
	done := h.of
	*h = rehearsal{began: h.began}
	if done != t.want && done.Digest() != t.digest {
		h.plan(end)
	}
}

// take notes the refused parts of a piece. A part that several pieces name counts once.
func (h *rehearsal) take(e *native.UnreplayableError) {
	if h.first == nil {
		h.first = e.Why
	}
	if len(e.Parts) == 0 && h.whole == nil {
		h.whole = e
	}
	known := map[string]bool{}
	for _, p := range h.found {
		known[p.Text] = true
	}
	for _, p := range e.Parts {
		if !known[p.Text] {
			h.found = append(h.found, p)
		}
	}
}

// report logs the parts of a table that the kernel would refuse, and notes them for the status
// and for rides.
func (h *rehearsal) report(ctx context.Context, id tableid.TableID, t *nativeTable) {
	log := klog.FromContext(ctx)
	t.refusedParts = nil
	if h.first == nil {
		if t.refused.Over() {
			severity.Notices(log).Info("The kernel would accept all parts of a native table again; canaryd would put the whole table back after a loss", "table", id.NFT())
		}
		return
	}
	err := error(&native.UnreplayableError{Table: id, Why: h.first, Parts: h.found})
	if h.whole != nil {
		err = h.whole
	} else {
		t.refusedParts = h.found
	}
	if t.refused.Met(err, time.Now()) {
		severity.Warnings(log).Error(err, "A native table could not be put back if it were lost", "table", id.NFT(), "parts", fmt.Sprint(len(h.found)))
	}
}
