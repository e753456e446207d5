package daemon

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/internal/onrequest"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// errStopped answers requests after a cleanup.
var errStopped = errors.New("`canaryd cleanup` removed canaryd's marks, and canaryd guards nothing; restart it to begin again")

// errDeclared answers a request for a generation that a declared source would
// undo as drift at once.
var errDeclared = errors.New("a declared source is in use: change its rules instead of restoring an older generation")

// askGuard runs do between the loop's steps, for a request, and publishes the state after it.
// It fails after a cleanup.
func (d *Daemon) askGuard(ctx context.Context, do func(context.Context, *state) error) error {
	var failed error
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if st.removed {
			failed = errStopped
			return
		}
		failed = do(ctx, st)
		d.publish(st)
	})
	return errors.Join(err, failed)
}

// Look looks now, examines everything, and returns the Status of then: `canaryd check` and
// tests call it.
func (d *Daemon) Look(ctx context.Context) (api.Status, error) {
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		if st.removed {
			return
		}
		now := time.Now()
		st.looking.hint(now)
		d.look(ctx, st)
		if st.loss == nil {
			for _, fs := range st.families {
				if !fs.looked.trouble.There() {
					fs.examined.plan(now)
				}
			}
			d.examine(ctx, st)
		}
		if d.guardsNative() {
			st.native.asked = time.Time{}
			d.lookNative(ctx, st)
		}
		d.publish(st)
	})
	return d.Status(), err
}

// Restore replays the generation that ought to be in force, or the stored generation of the
// requested ID, without waiting for any grace.
func (d *Daemon) Restore(ctx context.Context, r api.RestoreRequest) (reply api.RestoreReply, err error) {
	if r.Generation, err = d.fullID(r.Generation); err != nil {
		return api.RestoreReply{}, err
	}
	if r.DryRun { // it marks rules that are not in the baseline
		if err := d.awaitBaseline(ctx); err != nil {
			return api.RestoreReply{}, err
		}
	}
	kept, isNative, err := d.nativeGeneration(r.Generation)
	if err != nil {
		return api.RestoreReply{}, err
	}
	err = d.askGuard(ctx, func(ctx context.Context, st *state) (err error) {
		if isNative {
			reply, err = d.returnNative(ctx, st, r, kept)
		} else {
			reply, err = d.restoreNow(ctx, st, r)
		}
		switch {
		case err != nil || reply.Refused != "":
		case r.Generation == "": // a generation is of iptables' rules, or of one native table
			reply.Native = d.restoreNative(ctx, st, r.DryRun)
		case !r.DryRun && reply.Proved():
			d.dropUnread(ctx, st, func(u reload.Unread) bool { return u.Native == isNative && (!isNative || u.Table == kept.Name) })
		}
		if err == nil && reply.Refused == "" && !r.DryRun && !isNative {
			onrequest.LogRestored(ctx, reply, "outcomes", reply.Outcomes)
		}
		return err
	})
	return reply, err
}

// restoreNow is Restore for the tables of iptables, in a step of the loop. Without a named
// generation it puts back lost parts, like the loop. With one, the tables become exactly that
// generation. The present generation is forced, too, if learning is stopped for a table: Heal
// could take the loss for an owner's decision.
func (d *Daemon) restoreNow(ctx context.Context, st *state, r api.RestoreRequest) (reply api.RestoreReply, err error) {
	if r.Generation == "" && !r.DryRun && st.mayWrite() && !st.declared.retry.At.IsZero() {
		d.apply(ctx, st) // the obstacle may be gone by now
	}
	job := d.job(st, d.cfg.Kernel.Families()...)
	// Observe mode has replanted the marks of lost tables; Heal would take the loss for an
	// owner's decision.
	force := r.Generation != "" || st.anyFamily((*familyState).learningStopped)
	if r.Generation != "" && r.Generation != st.want().ID() {
		if job.Generation, err = d.olderGeneration(st, r.Generation); err != nil {
			return api.RestoreReply{}, err
		}
	}
	gone := d.gonePods(ctx, st)
	job.Generation = protect.DetachAll(job.Generation, gone)
	if st.loss != nil {
		st.loss.gone = gone
	}
	for f := range st.families {
		job.Quiet[f] = true
	}
	ctx, done := finishing(ctx)
	defer done()
	var result reload.Result
	if !force && st.mode == api.Heal && !r.DryRun { // as the loop does by itself: there is nothing to agree to
		if result, err = d.replayer(ctx, st).Heal(ctx, job); result != nil {
			reply = onrequest.ReplyOf(job.Generation.ID(), result)
		}
	} else {
		undo := d.keepForUndo(ctx, st, job, r)
		reply, result, err = onrequest.Restore(ctx, d.replayer(ctx, st), force, job, r, st.baseline.Base)
		reply.Baseline, reply.Undo = st.baseline.Name(), undo
	}
	if result == nil {
		reply.Undo = "" // nothing was written
		return reply, err
	}
	d.takeReplay(ctx, st, job, result, reply)
	if gone, any := onrequest.RemovalBy(reply, result, time.Now()); any {
		d.takeRemoval(ctx, st, gone, reply)
	}
	st.addRefused(&reply)
	return d.restored(ctx, st, r.Generation, reply, result), err
}

// olderGeneration returns the generation of that ID as it may be restored here: only protected
// rules. Declared rules stay as they are.
func (d *Daemon) olderGeneration(st *state, id string) (rules.Generation, error) {
	if st.declared.now.Generation != nil && !st.decision.of(id) {
		return nil, errDeclared
	}
	if d.cfg.Store == nil {
		return nil, fmt.Errorf("%w: %s, no state folder is in use", api.ErrNoGeneration, id)
	}
	load := d.cfg.Store.Load
	if w := st.decision; w.of(id) && w.backend == d.cfg.Kernel.Info().Backend {
		// Rules that another version of iptables wrote are read again once they are written.
		// Nothing else can bring back the rules that wait for a decision.
		load = d.cfg.Store.LoadHere
	}
	stored, err := load(id)
	if errors.Is(err, reload.ErrNothingStored) {
		return nil, fmt.Errorf("%w: %s; %s", api.ErrNoGeneration, id, d.cfg.Store.Offer())
	}
	if err != nil {
		return nil, err
	}
	narrow := d.protection(st).Narrow(stored.Generation) // another --protect may have been in use
	if own := st.own(); own.Claims != nil {
		return own.Generation.Join(st.unclaimed(narrow)), nil
	}
	return narrow, nil
}

// keepForUndo saves the generation that ought to be in force before the job's generation takes
// its place, and returns its ID for the reply. It returns "" if it is not on disk, or stays in
// force.
func (d *Daemon) keepForUndo(ctx context.Context, st *state, job reload.Job, r api.RestoreRequest) string {
	id := st.want().ID()
	if r.DryRun || d.cfg.Store == nil || id == job.Generation.ID() || !d.sound(st) {
		return ""
	}
	err := d.cfg.Store.Save(d.toStore(st))
	d.countStateError(err)
	if err != nil {
		severity.Warnings(klog.FromContext(ctx)).Error(err, "The generation that is about to be replaced is not on disk")
		return ""
	}
	st.disk.written = st.generation.changes
	return id
}

// takeReplay takes a requested replay into the state. If it is proved, its generation is
// learned. An open loss is concluded as after a heal; without one, a drill that is under way is
// void.
func (d *Daemon) takeReplay(ctx context.Context, st *state, job reload.Job, result reload.Result, reply api.RestoreReply) {
	if reply.Proved() {
		another := reply.Generation != st.want().ID()
		st.generation.learned.Generation = st.unclaimed(job.Generation)
		st.generation.change(time.Now())
		if another {
			defer func() { st.generation.made = reload.MadeRestored }() // whatever the proof still shows
		}
	}
	st.looking.plan(time.Now())
	if st.loss != nil {
		st.loss.asked = true
		if d.concludeHeal(ctx, st, &nativeRide{}, result, nil); st.loss != nil {
			st.loss.asked = false // it ends by another try
		}
	} else {
		d.drillUndone(ctx, st, "canaryd restore undid the drill before canaryd noticed it")
		st.pods.SetReturned(result, time.Now())
		for f, fr := range result {
			d.applyResult(ctx, st, f, fr)
			d.cfg.Metrics.ObserveReplay(f, fr.Outcome, fr.Took)
			d.countRefusal(f, fr.Err)
		}
	}
	d.resumeLearning(ctx, st, worst(result), true)
}

// Cleanup removes canaries and witnesses, and stops the loop's work for good. With r.Rules it
// also removes the protected chains and jumps, or the part of them that r.Protect names.
func (d *Daemon) Cleanup(ctx context.Context, r api.CleanupRequest) error {
	var only protect.Selector
	if r.Protect != "" {
		words, err := protect.Split(r.Protect)
		if err == nil {
			only, err = protect.NewSelector(words)
		}
		if err != nil {
			return fmt.Errorf("--protect: %w", err)
		}
	}
	if _, auto := namesAuto(d.cfg.Protect); auto && r.Rules && r.Protect == "" {
		return fmt.Errorf("%w; it found %s", onrequest.ErrWhoseRules, api.OwnersText(d.Status().Owners, strconv.Itoa))
	}
	var failed error
	err := d.ask(ctx, func(ctx context.Context, st *state) {
		st.removed, st.pause = true, pause{}
		st.suspicion, st.unread = nil, unreads{}
		d.endDrill(ctx, st, api.DrillFailed, "canaryd cleanup removed the canaries")
		d.stopKeeping(ctx, st)
		d.stopStandby(ctx, st)
		d.interrupt(ctx, st)
		nativeFailed := d.stopNative(st)
		d.cfg.Metrics.SetCanariesGone()
		replayer := d.replayer(ctx, st)
		if r.Protect != "" {
			replayer.Protection = only.Protection()
		}
		failed = onrequest.RemoveAll(ctx, replayer, d.job(st, d.cfg.Kernel.Families()...), r.Rules)
		failed = errors.Join(failed, nativeFailed)
		onrequest.RemoveMade(ctx, d.cfg.Kernel, st.marks.madeTables)
		if d.cfg.Store != nil {
			failed = errors.Join(failed, d.cfg.Store.Forget())
		}
		if failed != nil {
			severity.Warnings(klog.FromContext(ctx)).Error(failed, "A requested cleanup did not remove everything; canaryd guards nothing until it is restarted",
				"rulesRemoved", r.Rules, "protect", r.Protect)
		} else {
			severity.Notices(klog.FromContext(ctx)).Info("canaryd's marks were removed on request; canaryd guards nothing until it is restarted",
				"rulesRemoved", r.Rules, "protect", r.Protect)
		}
		d.publish(st)
	})
	return errors.Join(err, failed)
}

// Render returns a generation as iptables-restore input for one family: the one that ought
// to be in force, or any stored one.
func (d *Daemon) Render(ctx context.Context, r api.RenderRequest) (text string, err error) {
	if r.Generation, err = d.fullID(r.Generation); err != nil {
		return "", err
	}
	var want rules.Generation
	err = d.ask(ctx, func(_ context.Context, st *state) { want = st.want() })
	if err != nil {
		return "", err
	}
	if r.Generation == "" || r.Generation == want.ID() {
		return onrequest.RenderFamilies(want, r.Family), nil
	}
	if kept, isNative, err := d.nativeGeneration(r.Generation); err != nil || isNative {
		return kept.Text(d.cfg.Native.Store), err
	}
	if d.cfg.Store == nil {
		return "", fmt.Errorf("%w: %s is not in force, and no state folder is in use", api.ErrNoGeneration, r.Generation)
	}
	stored, note, err := d.cfg.Store.Show(r.Generation)
	if errors.Is(err, reload.ErrNothingStored) {
		return "", fmt.Errorf("%w: %w; canaryd status lists the stored generations", api.ErrNoGeneration, err)
	}
	if err != nil {
		return "", err
	}
	return onrequest.Heading(stored.ID, stored.Captured, note) + onrequest.RenderFamilies(stored.Generation, r.Family), nil
}

// takeRemoval records and logs the rules that a requested replay removed, as a restore to an
// older generation does.
func (d *Daemon) takeRemoval(ctx context.Context, st *state, r onrequest.Removal, reply api.RestoreReply) {
	st.journal.Remember(r.Record)
	d.write(ctx, r.Record, r.Diff)
	onrequest.LogRemoval(ctx, reply, r.Record)
}
