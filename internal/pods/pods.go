// Package pods tracks the containers that CNI plugins attached. It knows the containers that are
// gone, the rules of such containers that a replay put back, and the running containers that lost
// their rules.
//
// [Watch.Read] reads libcni's files, and [Watch.HaveRules] notes which attachments the generation
// has rules for. Before a replay [Watch.Gone] names the containers whose rules stay away; after it
// [Watch.Leftovers] names those whose rules came back. [Watch.Follow] takes up a full read, and
// [Watch.LostSince] returns a table's pods whose rules count as lost.
//
// If the files cannot be read, no container counts as gone. A Watch belongs to the loop's
// goroutine.
package pods

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/canaryd/canaryd/internal/api"
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

// Watch is what is known of the containers that CNI plugins attached.
type Watch struct {
	Grace  time.Duration // --jump-grace
	Folder string        // which one was read; empty: none yet
	known  map[protect.Attachment]attached
	// rules are the attachments that the generation has rules for, of that edition.
	rules    map[protect.Attachment]bool
	edition  int
	ReadAt   time.Time // when the folder was read last
	unread   pace.Trouble
	Untaken  pace.Trouble                  // why rules of the gone stand
	robbed   map[robberyKey]Robbery        // of pods that live
	followed map[rules.Family]culprit.Read // the last that showed who was robbed
	RemoveAt time.Time                     // when rules are removed that should not have come back; zero: none are
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

// Read reads what libcni keeps now. known is false if that cannot be read: it says nothing of any
// pod then.
func (w *Watch) Read(ctx context.Context, files Attachments, now time.Time) (r cniresults.Reading, known bool) {
	w.ReadAt = now
	r, err := files.Read()
	if err != nil {
		if w.Folder != "" && w.unread.Met(err, now) {
			severity.Warnings(klog.FromContext(ctx)).Info("libcni's files cannot be read any more; canaryd does not know which pods are removed during an outage", "reason", err)
		}
		return r, false
	}
	w.unread.Over()
	if w.Folder != r.Folder || w.known == nil {
		w.Folder, w.known = r.Folder, map[protect.Attachment]attached{}
	}
	return r, true
}

// Take takes up what libcni keeps. It reports whether the file of an attachment is gone that the
// generation has rules for.
func (w *Watch) Take(ctx context.Context, r cniresults.Reading, now time.Time) (gone bool) {
	for a, pod := range r.Attached {
		w.known[a] = attached{Pod: pod, returned: w.known[a].returned, returnedTo: w.known[a].returnedTo}
	}
	if vanished, cleared := w.vanished(r); cleared {
		for _, a := range vanished {
			delete(w.known, a)
		}
		severity.Warnings(klog.FromContext(ctx)).Info("All of libcni's files are gone at once; canaryd does not take their pods for gone", "files", len(vanished))
	} else {
		for _, a := range vanished {
			k := w.known[a]
			k.gone = now
			w.known[a] = k
			gone = gone || w.rules[a]
		}
	}
	maps.DeleteFunc(w.known, func(a protect.Attachment, k attached) bool { return !k.gone.IsZero() && !w.rules[a] })
	if len(w.Leftovers()) > 0 && !w.Untaken.There() {
		w.RemoveAt = pace.Earliest(w.RemoveAt, now)
	}
	return gone
}

// LacksRules reports whether it is not known yet which attachments the generation of that edition
// has rules for.
func (w *Watch) LacksRules(edition int) bool { return w.rules == nil || w.edition != edition }

// HaveRules takes up which attachments the generation of that edition has rules for.
func (w *Watch) HaveRules(edition int, want rules.Generation) {
	w.rules, w.edition = protect.AllAttachments(want, maps.Keys(w.known)), edition
}

// vanished returns the attachments whose file was there and is not any more. cleared: these are all
// of several files. No runtime removes pods so, but a script that empties the folder does.
func (w *Watch) vanished(r cniresults.Reading) (list []protect.Attachment, cleared bool) {
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

// Gone returns the attachments that the generation has rules for, and whose container is
// gone.
func (w *Watch) Gone() map[protect.Attachment]bool {
	list := map[protect.Attachment]bool{}
	for a, k := range w.known {
		if !k.gone.IsZero() && w.rules[a] {
			list[a] = true
		}
	}
	return list
}

// Leftovers returns those of the gone of which a replay put rules back.
func (w *Watch) Leftovers() map[protect.Attachment]bool {
	list := w.Gone()
	maps.DeleteFunc(list, func(a protect.Attachment, _ bool) bool { return !w.known[a].cameBack() })
	return list
}

// Disbelieve forgets the containers whose rules a full read showed after their file had gone. A
// DEL removes the rules first, so such a file was removed by something else.
func (w *Watch) Disbelieve(standing rules.Section, finding canary.Finding, since time.Time) {
	if finding.MarkLost || finding.Verdict == canary.Unknown || len(w.Gone()) == 0 {
		return
	}
	for a := range protect.Attachments(standing) {
		if k, ok := w.known[a]; ok && !k.gone.IsZero() && !k.cameBack() && !since.Before(k.gone) {
			delete(w.known, a)
		}
	}
}

// LostPods returns the attachments of which a table lost rules.
func LostPods(lost reload.Lost) map[protect.Attachment]bool {
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

// SetReturned notes of which containers a replay put rules back.
func (w *Watch) SetReturned(result reload.Result, now time.Time) {
	for f, fr := range result {
		tr := fr.Tables[rules.Nat]
		if !tr.Replayed {
			continue
		}
		for a := range LostPods(tr.Lost) {
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

// Forget forgets attachments.
func (w *Watch) Forget(gone map[protect.Attachment]bool) {
	for a := range gone {
		delete(w.known, a)
	}
}

// name is a pod as people know it.
func (w *Watch) name(a protect.Attachment) string {
	return podName(w.known[a].Pod, a.Container)
}

// Names are pods as people know them, in order.
func (w *Watch) Names(list map[protect.Attachment]bool) []string {
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

// Kept returns the containers of which a restart must not forget that they had a file:
// those for which the generation has rules.
func (w *Watch) Kept() []reload.AttachedPod {
	var list []reload.AttachedPod
	for a, k := range w.known {
		if w.rules[a] {
			list = append(list, reload.AttachedPod{
				Attachment: a, Namespace: k.Namespace, Name: k.Name, HostPorts: k.HostPorts, Gone: !k.gone.IsZero(), Returned: !k.returned.IsZero(),
			})
		}
	}
	slices.SortFunc(list, func(a, b reload.AttachedPod) int {
		return strings.Compare(a.Network+"/"+a.Container, b.Network+"/"+b.Container)
	})
	return list
}

// Recall takes up what the last run knew of pods.
func (w *Watch) Recall(known reload.Owners) {
	w.Folder, w.known = known.Folder, map[protect.Attachment]attached{}
	for _, p := range known.Pods {
		k := attached{Pod: cniresults.Pod{Namespace: p.Namespace, Name: p.Name, HostPorts: p.HostPorts}}
		if p.Returned {
			k.returned = time.Now()
		}
		if p.Gone {
			k.gone = time.Now()
		}
		w.known[p.Attachment] = k
	}
}

// podsListed is how many pods one record names.
const podsListed = 50

// AddPods names in a record, in order, the pods of a list that lost host ports. gone: these did not
// come back.
func (w *Watch) AddPods(r *api.Flush, list map[protect.Attachment]bool, gone bool) {
	r.Pods = slices.Clone(r.Pods) // a copy of the record may be in use
	for a := range list {
		k, ok := w.known[a]
		if !ok || len(k.HostPorts) == 0 {
			continue
		}
		i := slices.IndexFunc(r.Pods, func(p api.LostPod) bool { return p.Container == a.Container })
		switch {
		case i >= 0:
			r.Pods[i].Gone = r.Pods[i].Gone || gone
		case len(r.Pods) == podsListed:
			r.MorePods++
		default:
			r.Pods = append(r.Pods, api.LostPod{Namespace: k.Namespace, Name: k.Name, Container: a.Container, HostPorts: k.HostPorts, Gone: gone})
		}
	}
	slices.SortFunc(r.Pods, func(a, b api.LostPod) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
}
