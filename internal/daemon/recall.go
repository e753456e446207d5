package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/quarantine"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// recall takes up the last run's state, if it is of this boot, namespace, backend and version.
// The first look shows whether the rules are still in force. Lost rules that are too old are
// not taken up: `canaryd restore` can bring them back.
func (d *Daemon) recall(ctx context.Context, st *state) {
	st.looking.at, st.marks.retry.At = time.Now(), time.Now()
	if d.cfg.Store == nil {
		return
	}
	log := klog.FromContext(ctx)
	st.disk.stored = storedOf(d.cfg.Store.List())
	d.recallOwners(ctx, st)
	d.recallUnread(ctx, st)
	d.recallDecision(ctx, st)
	known, stored, err := d.cfg.Store.LoadState()
	d.narrow(st, &known, &stored)
	d.recallPause(ctx, st, known.Pause) // also where the generation is not used
	if again := d.recallBehind(ctx, st, &known, &stored, err); again {
		return
	}
	if err := d.cfg.Store.Unwritable(); err != nil {
		st.disk.marks = known.Marks
		d.tookSave(ctx, st, err)
	}
	switch {
	case errors.Is(err, reload.ErrNothingStored):
		return
	case err != nil:
		pace.Unusable(log, err).Error(err, "The stored generation is not used; canaryd starts from the rules in the kernel")
		d.suspect(ctx, st, err.Error())
		return
	}
	age := d.cfg.Uptime() - known.Uptime
	// A negative age is of another clock: that of a container's own time.
	if (age > d.cfg.MaxStoredAge || age < 0) && !d.marksStand(ctx, st, known.Marks) {
		severity.Warnings(log).Info("The marks of the last run are gone, and its generation is too old for a replay; `canaryd restore --generation` puts it back",
			"generation", stored.ID, "age", age.Round(time.Second), "maxStoredAge", d.cfg.MaxStoredAge)
		d.suspect(ctx, st, fmt.Sprintf("the rules were last seen in force longer ago than --max-stored-age (%s)", d.cfg.MaxStoredAge))
		return
	}
	st.absence.lastRun = d.inForceAt(known.Uptime)
	st.generation.learned.Generation, st.marks.current = st.unclaimed(stored.Generation), known.Marks
	if st.declared.now.Generation != nil {
		st.declared.inForce = st.declared.now.with(st.claimed(stored.Generation))
	}
	st.generation.made = stored.Made
	st.generation.change(stored.Captured)
	st.absence.confirmed, st.absence.uptime, st.disk.marks = known.Confirmed, known.Uptime, known.Marks
	st.disk.keptAt, st.disk.written, st.disk.kept = known.Confirmed, st.generation.changes, st.generation.changes
	st.marks.madeTables = known.MadeTables
	for id, ts := range st.tables() {
		ts.policies.Known = known.Policies[id.Family][id.Name]
	}
	d.cfg.Store.Resume(stored.ID)
	st.disk.saveAt = time.Now().Add(confirmEvery) // also if nothing is learned that is new
	for id, list := range known.Quarantine {
		if st.families[id.Family] != nil {
			d.setQuarantine(ctx, st, id, list, nil, quarantine.Recall)
		}
	}
	d.recallSets(ctx, st)
	log.Info("Took up the stored generation", "generation", stored.ID, "age", age.Round(time.Second))
}

// marksStand reports whether all marks of an earlier run are in place; false also if they
// cannot be probed. If they are, nothing was flushed since, and old rules may be taken up.
func (d *Daemon) marksStand(ctx context.Context, st *state, marks canary.Marks) bool {
	for f := range st.families {
		seen, err := d.cfg.Kernel.Probe(ctx, f, marks.Places(f, d.cfg.Canary))
		if err != nil || !marks.Standing(f, d.cfg.Canary, seen) {
			return false
		}
	}
	return true
}

// narrow leaves out the rules of the last run that --protect does not name any more, also those
// in quarantine.
func (d *Daemon) narrow(st *state, known *reload.State, stored *reload.Stored) {
	p := d.protection(st)
	stored.Generation = p.Narrow(stored.Generation)
	for id, list := range known.Quarantine {
		known.Quarantine[id] = slices.DeleteFunc(list, func(q reload.QuarantinedRule) bool {
			builtin := rules.Builtin(id.Name, q.Chain)
			chain := q.Chain
			if builtin {
				chain = q.Rule.Target
			}
			_, there := stored.Generation[id].Chain(chain) // a chain that protected rules lead to
			return !there && !p.Chain(chain) && (!builtin || p.Rule == nil || !p.Rule(id.Name, q.Chain, q.Rule))
		})
	}
}
