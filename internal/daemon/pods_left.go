package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/pods"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// lookAtPods reads libcni's files, at most once in each poll interval, so that rules of pods
// that are gone are no loss.
func (d *Daemon) lookAtPods(ctx context.Context, st *state) {
	if time.Since(st.pods.ReadAt) >= d.cfg.PollInterval {
		d.readPods(ctx, st)
	}
}

// readPods reads libcni's present files, and reports whether that worked. Without them no
// container counts as gone or robbed.
func (d *Daemon) readPods(ctx context.Context, st *state) bool {
	if d.cfg.Attachments == nil {
		return false
	}
	w, now := &st.pods, time.Now()
	r, known := w.Read(ctx, d.cfg.Attachments, now)
	if !known {
		return false
	}
	if edition := st.generation.edition; w.LacksRules(edition) {
		w.HaveRules(edition, st.want())
	}
	if w.Take(ctx, r, now) && st.loss == nil {
		st.examineAll(now)
	}
	return true
}

// forgetContainers removes containers that are gone from the learned generation, so that no
// replay brings back their rules.
func (st *state) forgetContainers(gone map[protect.Attachment]bool, now time.Time) {
	if len(gone) == 0 {
		return
	}
	st.relearn(st.generation.learned.WithoutAttachments(gone), now, slices.Collect(maps.Values(st.families))...)
	st.pods.Forget(gone)
}

// removeGoneContainers removes the rules of containers that were removed while, or shortly
// after, a replay put their rules back.
func (d *Daemon) removeGoneContainers(ctx context.Context, st *state) {
	w := &st.pods
	w.RemoveAt = time.Time{}
	if !d.readPods(ctx, st) {
		return // the next reading plans this again
	}
	w.RemoveAt = time.Time{}
	job := d.job(st, d.cfg.Kernel.Families()...)
	if job.GoneContainers = w.Leftovers(); len(job.GoneContainers) == 0 {
		return
	}
	names := w.Names(job.GoneContainers)
	result, err := d.replayer(ctx, st).RemoveContainers(ctx, job)
	for f, fr := range result {
		d.applyResult(ctx, st, f, fr)
		err = errors.Join(err, fr.Err)
		if v := fr.Tables[rules.Nat].Finding.Verdict; fr.Err == nil && v != canary.Intact && v != canary.Changed {
			err = errors.Join(err, fmt.Errorf("%s nat is %s", f, v))
		}
	}
	st.looking.plan(time.Now())
	w.Untaken.Report(pace.Warnings(ctx), err, "A replay brought back rules of removed pods; canaryd could not delete these rules, and tries again",
		"table", rules.Nat, "pods", names, "retryIn", d.cfg.PollInterval)
	if err != nil {
		w.RemoveAt = time.Now().Add(d.cfg.PollInterval)
		return
	}
	st.forgetContainers(job.GoneContainers, time.Now())
	for _, fr := range result {
		if fr.Outcome != reload.Skipped {
			severity.Notices(klog.FromContext(ctx)).Info("A replay wrote rules of pods that are gone; they are removed", "pods", names)
			return
		}
	}
}

// gonePods returns the containers whose rules are not to be replayed: they are known to be gone
// right before the tables are read. nil: none are, or that is not known.
func (d *Daemon) gonePods(ctx context.Context, st *state) map[protect.Attachment]bool {
	if !d.readPods(ctx, st) {
		return nil
	}
	return st.pods.Gone()
}

// forgetLeftOut forgets the containers that a replay left out, unless their rules are in place:
// then these were not lost.
func (st *state) forgetLeftOut(result reload.Result, gone map[protect.Attachment]bool, now time.Time) {
	gone = maps.Clone(gone)
	for _, fr := range result {
		for a := range protect.Attachments(fr.Tables[rules.Nat].Section) {
			delete(gone, a)
		}
	}
	st.forgetContainers(gone, now)
}

// followRobberies notes the evidence about the living pods in nat, as a full read with that
// finding showed it. It reports whether the rules of a pod count as lost from now on: judge
// then examines the read again.
func (d *Daemon) followRobberies(ctx context.Context, st *state, f rules.Family, nat rules.Section, finding canary.Finding, now time.Time) bool {
	w, fs := &st.pods, st.families[f]
	if d.cfg.Attachments == nil || finding.MarkLost || finding.Verdict == canary.Unknown {
		return false
	}
	lacks, looked := map[protect.Attachment]protect.Lack{}, !st.pause.on()
	if finding.Verdict != canary.Intact && !st.pause.on() {
		lacks = w.Lacking(st.want()[f.Table(rules.Nat)], nat)
		if len(lacks) > 0 && !d.readPods(ctx, st) {
			clear(lacks)
			looked = false
		}
	}
	upto := culprit.Read{Digest: fs.examined.digest, At: fs.examined.at}
	return w.Follow(ctx, pods.Sight{
		Family: f, Lacks: lacks, Looked: looked, InForce: cmp.Or(fs.known.at, st.absence.lastRun), Read: upto, Now: now,
		Inquire: func() culprit.Inquiry { return d.inquire(ctx) },
	})
}

// followWritten is followRobberies for the read after a write. That read may be the first to
// show rules that another process removed meanwhile, and nothing else would examine it.
func (d *Daemon) followWritten(ctx context.Context, st *state, id rules.TableID, nat rules.Section, now time.Time) {
	d.followRobberies(ctx, st, id.Family, d.supplement(ctx, st, id, nat), canary.Finding{Verdict: canary.Changed}, now)
	if _, due := st.pods.KeptFor(id.Family); !due.IsZero() {
		st.families[id.Family].examined.plan(pace.Latest(due, now))
	}
}
