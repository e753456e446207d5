package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/internal/culprit"
	"github.com/canaryd/canaryd/internal/pace"
	"github.com/canaryd/canaryd/internal/severity"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A CNI plugin's DEL that comes while rules are flushed finds nothing to remove, so the tables
// do not show that a pod has gone. libcni's files do: the container runtime removes a pod's file
// when its DEL is done.
//
// A pod that is being added has rules before it has a file. So a missing file means that
// the pod is gone only if the file was there before, and went while its rules were lost
// or behind a replay that had brought them back. A file that goes while its rules stand as
// their owner wrote them was removed by something else than a DEL, and says nothing.

// Attachments reads libcni's files: *cniresults.Folder.
type Attachments interface {
	Read() (cniresults.Reading, error)
}

// podWatch is what is known of the containers that CNI plugins attached.
type podWatch struct {
	folder string // which one was read; empty: none yet
	known  map[protect.Attachment]attached
	// rules are the attachments that the generation has rules for, of that edition.
	rules    map[protect.Attachment]bool
	edition  int
	readAt   time.Time // when the folder was read last
	unread   pace.Trouble
	untaken  pace.Trouble                  // why rules of the gone stand
	robbed   map[robberyKey]robbery        // of pods that live
	followed map[rules.Family]culprit.Read // the last that showed who was robbed
	removeAt time.Time                     // when rules are removed that should not have come back; zero: none are
}

// attached is one container of which a file was read.
type attached struct {
	cniresults.Pod
	gone time.Time // when its file was first missing; zero: it is there
	// returned is when a replay last put rules of it back, and returnedTo the same of one family;
	// zero: none did.
	returned   time.Time
	returnedTo map[rules.Family]time.Time
}

// returnedFor is for how long behind a replay a file may go that was to go before it: a
// runtime repeats a DEL that failed. After that a file that goes while its rules stand was
// removed by something else, whatever a replay once did.
const returnedFor = time.Hour

// cameBack reports whether a replay put rules of it back not long before its file went.
func (k attached) cameBack() bool {
	return !k.returned.IsZero() && k.gone.Sub(k.returned) < returnedFor
}

// lookAtPods reads libcni's files, at most once in each poll interval.
func (d *Daemon) lookAtPods(ctx context.Context, st *state) {
	if time.Since(st.pods.readAt) >= d.cfg.PollInterval {
		d.readPods(ctx, st)
	}
}

// readPods takes in what libcni keeps now, and reports whether that is known. A folder
// that cannot be read says nothing of any pod.
func (d *Daemon) readPods(ctx context.Context, st *state) bool {
	if d.cfg.Attachments == nil {
		return false
	}
	w, now := &st.pods, time.Now()
	w.readAt = now
	r, err := d.cfg.Attachments.Read()
	if err != nil {
		if w.folder != "" && w.unread.Met(err, now) {
			severity.Warnings(klog.FromContext(ctx)).Info("libcni's files cannot be read any more; pods that are removed during an outage are not known", "reason", err)
		}
		return false
	}
	w.unread.Over()
	if w.folder != r.Folder || w.known == nil {
		w.folder, w.known = r.Folder, map[protect.Attachment]attached{}
	}
	d.haveRules(st)
	for a, pod := range r.Attached {
		w.known[a] = attached{Pod: pod, returned: w.known[a].returned, returnedTo: w.known[a].returnedTo}
	}
	if vanished, cleared := w.vanished(r); cleared {
		for _, a := range vanished {
			delete(w.known, a)
		}
		severity.Warnings(klog.FromContext(ctx)).Info("All of libcni's files are gone at once, which is no sign that the pods are", "files", len(vanished))
	} else {
		for _, a := range vanished {
			k := w.known[a]
			k.gone = now
			w.known[a] = k
			if w.rules[a] && st.loss == nil {
				st.examineAll(now)
			}
		}
	}
	maps.DeleteFunc(w.known, func(a protect.Attachment, k attached) bool { return !k.gone.IsZero() && !w.rules[a] })
	if len(w.leftovers()) > 0 && !w.untaken.There() {
		w.removeAt = pace.Earliest(w.removeAt, now)
	}
	return true
}

// haveRules takes up which attachments the generation has rules for.
func (d *Daemon) haveRules(st *state) {
	if w := &st.pods; w.rules == nil || w.edition != st.generation.edition {
		w.rules, w.edition = protect.AllAttachments(st.want(), maps.Keys(w.known)), st.generation.edition
	}
}

// vanished returns the attachments whose file was there and is not any more. cleared: these are all
// of several files. No runtime removes pods so, but a script that empties the folder does.
func (w *podWatch) vanished(r cniresults.Reading) (list []protect.Attachment, cleared bool) {
	stay := false
	for a, k := range w.known {
		switch {
		case !k.gone.IsZero():
		case r.Keeps(a):
			stay = true
		default:
			list = append(list, a)
		}
	}
	return list, len(list) > 1 && !stay
}

// gone returns the attachments that the generation has rules for, and whose container is
// gone.
func (w *podWatch) gone() map[protect.Attachment]bool {
	list := map[protect.Attachment]bool{}
	for a, k := range w.known {
		if !k.gone.IsZero() && w.rules[a] {
			list[a] = true
		}
	}
	return list
}

// leftovers returns those of the gone of which a replay put rules back.
func (w *podWatch) leftovers() map[protect.Attachment]bool {
	list := w.gone()
	maps.DeleteFunc(list, func(a protect.Attachment, _ bool) bool { return !w.known[a].cameBack() })
	return list
}

// disbelieve forgets the containers whose rules a full read showed after their file had gone. A
// DEL removes the rules first, so such a file was removed by something else.
func (w *podWatch) disbelieve(standing rules.Section, finding canary.Finding, since time.Time) {
	if finding.MarkLost || finding.Verdict == canary.Unknown || len(w.gone()) == 0 {
		return
	}
	for a := range protect.Attachments(standing) {
		if k, ok := w.known[a]; ok && !k.gone.IsZero() && !k.cameBack() && !since.Before(k.gone) {
			delete(w.known, a)
		}
	}
}

// lostPods returns the attachments of which a table lost rules.
func lostPods(lost reload.Lost) map[protect.Attachment]bool {
	var was, is rules.Section
	for _, c := range lost.Chains {
		was.Chains = append(was.Chains, rules.Chain{Name: c.Name, Rules: c.Was})
		is.Chains = append(is.Chains, rules.Chain{Name: c.Name, Rules: c.Is})
	}
	was.Jumps = lost.Jumps
	all, left := protect.Attachments(was), protect.Attachments(is)
	maps.DeleteFunc(all, func(a protect.Attachment, _ bool) bool { return left[a] })
	return all
}

// setReturned notes of which containers a replay put rules back.
func (w *podWatch) setReturned(result reload.Result, now time.Time) {
	for f, fr := range result {
		tr := fr.Tables[rules.Nat]
		if !tr.Replayed {
			continue
		}
		for a := range lostPods(tr.Lost) {
			if tr.Proved {
				delete(w.robbed, robberyKey{f, a})
			}
			if k, ok := w.known[a]; ok {
				if k.returned = now; k.returnedTo == nil {
					k.returnedTo = map[rules.Family]time.Time{}
				}
				k.returnedTo[f] = now
				w.known[a] = k
			}
		}
	}
}

// forgetContainers takes containers that are gone out of what is learned.
func (st *state) forgetContainers(gone map[protect.Attachment]bool, now time.Time) {
	if len(gone) == 0 {
		return
	}
	st.relearn(st.generation.learned.WithoutAttachments(gone), now, slices.Collect(maps.Values(st.families))...)
	for a := range gone {
		delete(st.pods.known, a)
	}
}

// removeGoneContainers removes the rules of containers that were removed while, or shortly
// after, a replay put their rules back.
func (d *Daemon) removeGoneContainers(ctx context.Context, st *state) {
	w := &st.pods
	w.removeAt = time.Time{}
	if !d.readPods(ctx, st) {
		return // the next reading asks again
	}
	w.removeAt = time.Time{}
	job := d.job(st, d.cfg.Kernel.Families()...)
	if job.GoneContainers = w.leftovers(); len(job.GoneContainers) == 0 {
		return
	}
	pods := w.names(job.GoneContainers)
	result, err := d.replayer(ctx, st).RemoveContainers(ctx, job)
	for f, fr := range result {
		d.applyResult(ctx, st, f, fr)
		err = errors.Join(err, fr.Err)
		if v := fr.Tables[rules.Nat].Finding.Verdict; fr.Err == nil && v != canary.Intact && v != canary.Changed {
			err = errors.Join(err, fmt.Errorf("%s nat is %s", f, v))
		}
	}
	st.looking.plan(time.Now())
	w.untaken.Report(pace.Warnings(ctx), err, "Rules of pods that are gone came back with a replay, and could not be removed yet", "pods", pods)
	if err != nil {
		w.removeAt = time.Now().Add(d.cfg.PollInterval)
		return
	}
	st.forgetContainers(job.GoneContainers, time.Now())
	for _, fr := range result {
		if fr.Outcome != reload.Skipped {
			severity.Notices(klog.FromContext(ctx)).Info("Rules of pods that were removed during the outage had come back with it; they are removed", "pods", pods)
			return
		}
	}
}

// gonePods returns the containers of which nothing is to be replayed: those that are known
// to be gone right before the tables are read.
func (d *Daemon) gonePods(ctx context.Context, st *state) map[protect.Attachment]bool {
	if !d.readPods(ctx, st) {
		return nil
	}
	return st.pods.gone()
}

// forgetLeftOut forgets the containers that a replay left out, unless their rules stand:
// those were not lost.
func (st *state) forgetLeftOut(result reload.Result, gone map[protect.Attachment]bool, now time.Time) {
	gone = maps.Clone(gone)
	for _, fr := range result {
		for a := range protect.Attachments(fr.Tables[rules.Nat].Section) {
			delete(gone, a)
		}
	}
	st.forgetContainers(gone, now)
}

// name is a pod as people know it.
func (w *podWatch) name(a protect.Attachment) string {
	return podName(w.known[a].Pod, a.Container)
}

// names are pods as people know them, in order.
func (w *podWatch) names(list map[protect.Attachment]bool) []string {
	var names []string
	for a := range list {
		names = append(names, w.name(a))
	}
	slices.Sort(names)
	return names
}

// podName is namespace and name, or where Kubernetes did not make it the container's ID.
func podName(p cniresults.Pod, container string) string {
	if p.Name == "" {
		return container
	}
	return strings.TrimPrefix(p.Namespace+"/"+p.Name, "/")
}
