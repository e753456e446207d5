package daemon

import (
	"fmt"
	"time"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// generation is what was learned, and when what ought to be in force last changed.
type generation struct {
	learned  reload.Learned
	captured time.Time   // when what is learned or declared last changed
	edition  int         // how often it, or what the generation on disk depends on, did
	changes  int         // how often it did
	made     reload.Made // what changed it last
}

// change notes that what want returns is another than before.
func (g *generation) change(at time.Time) {
	g.captured = at
	g.edition++
	g.changes++
}

// relearn takes up what is learned by now, for which another process is the reason. It is
// written, and the marks of these families are renewed.
func (st *state) relearn(learned reload.Learned, now time.Time, families ...*familyState) {
	st.generation.learned = learned
	st.generation.change(now)
	st.planSave(now)
	for _, fs := range families {
		fs.rotation.plan(now)
	}
}

// own returns what the claimed chains ought to be; without Claims that is not known. A
// declaration is no measure before it was written. The kernel may refuse it, and what a flush
// takes meanwhile must come back all the same.
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

// want returns the generation that ought to be in force.
func (st *state) want() rules.Generation {
	own := st.own()
	if own.Claims == nil {
		return st.generation.learned.Generation
	}
	return own.Generation.Join(st.generation.learned.Generation)
}

// claimed returns what declared sources own of the generation.
func (st *state) claimed(g rules.Generation) rules.Generation {
	for id, s := range g {
		own, _ := s.Split(st.declared.now.Claims)
		g = g.With(id, own)
	}
	return g
}

// unclaimed returns the generation without what declared sources own.
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
