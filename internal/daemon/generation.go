package daemon

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// generation is the learned generation, with the time and the number of changes.
type generation struct {
	learned  reload.Learned
	captured time.Time   // when the learned or declared rules last changed
	edition  int         // changes of the rules, and of other data that the disk keeps with them
	changes  int         // changes of the rules only
	made     reload.Made // the cause of the last change
}

// change notes that want returns another generation than before: status, inventory and copies
// follow edition, and the disk follows changes.
func (g *generation) change(at time.Time) {
	g.captured = at
	g.edition++
	g.changes++
}

// relearn replaces the learned generation after another process changed the rules. It plans to
// save the generation, and to renew the marks of these families.
func (st *state) relearn(learned reload.Learned, now time.Time, families ...*familyState) {
	st.generation.learned = learned
	st.generation.change(now)
	st.planSave(now)
	for _, fs := range families {
		fs.rotation.plan(now)
	}
}

// own returns the declaration that the claimed chains must match; without Claims there is none
// yet. In heal mode a declaration counts only once it was written. The kernel may refuse it,
// and rules that a flush takes meanwhile must come back anyway.
func (st *state) own() Declaration {
	switch {
	case st.mode == api.Observe:
		return st.declared.now
	case st.declared.inForce != nil:
		return *st.declared.inForce
	default:
		return Declaration{}
	}
}

// want returns the generation that ought to be in force: the learned rules, with those of the
// declaration in its claimed chains.
func (st *state) want() rules.Generation {
	own := st.own()
	if own.Claims == nil {
		return st.generation.learned.Generation
	}
	return own.Generation.Join(st.generation.learned.Generation)
}

// claimed returns the part of a stored generation that declared sources own, for recall.
func (st *state) claimed(g rules.Generation) rules.Generation {
	for id, s := range g {
		own, _ := s.Split(st.declared.now.Claims)
		g = g.With(id, own)
	}
	return g
}

// unclaimed returns a generation without the part that declared sources own: only that part is
// learned.
func (st *state) unclaimed(g rules.Generation) rules.Generation {
	for id, s := range g {
		_, rest := s.Split(st.declared.now.Claims)
		g = g.With(id, rest)
	}
	return g
}

// fullID returns the ID of the generation that an operator named by the beginning of its ID.
func (d *Daemon) fullID(prefix string) (string, error) {
	s := d.Status()
	ids := []string{s.Generation.ID}
	for _, g := range s.Stored {
		ids = append(ids, g.ID)
	}
	for _, g := range s.NativeStored {
		ids = append(ids, g.ID)
	}
	id, err := reload.ExpandID(prefix, ids)
	if err != nil {
		err = fmt.Errorf("%w: %w", api.ErrNoGeneration, err)
	}
	return id, err
}
