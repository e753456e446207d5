// Package pods tracks the containers that CNI plugins attached. It knows the containers that are
// gone, the rules of such containers that a replay put back, and the running containers that lost
// their rules.
//
// [Watch.Read] reads libcni's files, and [Watch.HaveRules] notes the attachments that the
// generation has rules for. Before a replay [Watch.Gone] names the containers whose rules stay
// away; after it [Watch.Leftovers] names the containers whose rules were restored anyway.
// [Watch.Follow] processes a full read, and [Watch.LostSince] returns a table's pods whose
// rules count as lost.
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
	"github.com/canaryd/canaryd/internal/sorting"
	"github.com/canaryd/canaryd/pkg/canary"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// A CNI plugin's DEL during a flush finds no rules to remove, so the tables do not show that
// the pod is gone. libcni's files do, because the container runtime removes a pod's file when
// its DEL is done.
//
// A new pod has rules before it has a file. So a missing file means that the pod is gone only
// if the file existed before. It must also have disappeared while the pod's rules were lost, or
// after a replay brought them back. If a file disappears while its rules are in force, as their
// owner wrote them, another program removed it, and that proves nothing.

// Attachments reads libcni's files: *cniresults.Folder.
type Attachments interface {
	Read() (cniresults.Reading, error)
}

// Watch is the loop's knowledge about the containers that CNI plugins attached.
type Watch struct {
	Grace  time.Duration // --jump-grace
	Folder string        // the folder that was read; empty: none yet
	known  map[protect.Attachment]attached
	// rules are the attachments that the generation of that edition has rules for.
	rules    map[protect.Attachment]bool
	edition  int
	ReadAt   time.Time // when the folder was read last
	unread   pace.Trouble
	Untaken  pace.Trouble                  // why rules of pods that are gone are still there
	robbed   map[robberyKey]Robbery        // of pods that live
	followed map[rules.Family]culprit.Read // the last reads that showed the robberies
	RemoveAt time.Time                     // when wrongly restored rules are removed, or zero
}

// attached is one container whose file was read.
type attached struct {
	cniresults.Pod
	gone time.Time // when its file was first missing; zero: it exists
	// returned is when a replay last put its rules back, and returnedTo is that time for each
	// family; zero if none did.
	returned   time.Time
	returnedTo map[rules.Family]time.Time
}

// returnedFor is how long after a replay a disappearing file still shows a DEL, because a
// runtime repeats a DEL that failed. After that, a file that disappears while its rules are in
// force was removed by another program, regardless of the replay.
const returnedFor = time.Hour

// cameBack reports whether a replay put its rules back not long before its file disappeared.
func (k attached) cameBack() bool {
	return !k.returned.IsZero() && k.gone.Sub(k.returned) < returnedFor
}

// Read reads libcni's files for the loop, which gives r to Take. known is false if it cannot;
// the pods' state is then unknown. The first error of a series is logged.
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

// Take takes the content of libcni's folder into the Watch. It reports whether the file of an
// attachment disappeared for which the generation has rules. The loop then reads all tables.
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

// LacksRules reports whether HaveRules must be called for the generation of that edition.
func (w *Watch) LacksRules(edition int) bool { return w.rules == nil || w.edition != edition }

// HaveRules notes the attachments that the generation of that edition has rules for.
func (w *Watch) HaveRules(edition int, want rules.Generation) {
	w.rules, w.edition = protect.AllAttachments(want, maps.Keys(w.known)), edition
}

// vanished returns for Take the attachments whose file has disappeared. cleared means that
// several files existed and all have disappeared: no runtime removes pods in that way, but a
// script that empties the folder does.
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

// Gone returns the attachments that the generation has rules for, and whose container is gone.
// A replay leaves out their rules.
func (w *Watch) Gone() map[protect.Attachment]bool {
	list := map[protect.Attachment]bool{}
	for a, k := range w.known {
		if !k.gone.IsZero() && w.rules[a] {
			list[a] = true
		}
	}
	return list
}

// Leftovers returns the attachments of Gone whose rules a replay put back. No DEL removes these
// rules again, so the loop removes them (removeGoneContainers).
func (w *Watch) Leftovers() map[protect.Attachment]bool {
	list := w.Gone()
	maps.DeleteFunc(list, func(a protect.Attachment, _ bool) bool { return !w.known[a].cameBack() })
	return list
}

// Disbelieve forgets the containers whose rules a full read showed after their file had
// disappeared. A DEL removes the rules first, so another program removed such a file.
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

// LostPods returns the attachments that lost rules in a table. Flush records name them, and
// SetReturned notes them after a replay.
func LostPods(lost reload.Lost) map[protect.Attachment]bool {
	was, is := rules.Section{Jumps: lost.Jumps}, rules.Section{}
	for _, c := range lost.Chains {
		if protect.IsCNIChain(c.Name) {
			was.Chains = append(was.Chains, rules.Chain{Name: c.Name, Rules: c.Was})
			is.Chains = append(is.Chains, rules.Chain{Name: c.Name, Rules: c.Is})
		}
	}
	all, left := protect.Attachments(was), protect.Attachments(is)
	maps.DeleteFunc(all, func(a protect.Attachment, _ bool) bool { return left[a] })
	return all
}

// SetReturned notes the containers whose rules a replay put back. Leftovers and removedAgain
// use the time.
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

// Forget forgets attachments whose rules the loop has taken out of the generation, because
// their containers are gone.
func (w *Watch) Forget(gone map[protect.Attachment]bool) {
	for a := range gone {
		delete(w.known, a)
	}
}

// name returns the name of a pod for people.
func (w *Watch) name(a protect.Attachment) string {
	return podName(w.known[a].Pod, a.Container)
}

// Names returns the names of pods for log lines, sorted.
func (w *Watch) Names(list map[protect.Attachment]bool) []string {
	var names []string
	for a := range list {
		names = append(names, w.name(a))
	}
	slices.Sort(names)
	return names
}

// podName returns namespace and name. A container that Kubernetes did not create has its ID as
// its name.
func podName(p cniresults.Pod, container string) string {
	if p.Name == "" {
		return container
	}
	return strings.TrimPrefix(p.Namespace+"/"+p.Name, "/")
}

// Kept returns the containers with rules in the generation, sorted. The daemon stores this
// knowledge when it has changed, and Recall takes it up after a restart.
func (w *Watch) Kept() []reload.AttachedPod {
	var list []reload.AttachedPod
	for a, k := range w.known {
		if w.rules[a] {
			list = append(list, reload.AttachedPod{
				Attachment: a, Namespace: k.Namespace, Name: k.Name, HostPorts: k.HostPorts, Gone: !k.gone.IsZero(), Returned: !k.returned.IsZero(),
			})
		}
	}
	sorting.Stable(list, func(a, b reload.AttachedPod) int {
		return strings.Compare(a.Network+"/"+a.Container, b.Network+"/"+b.Container)
	})
	return list
}

// Recall restores the last run's knowledge about pods at the start. The times of removals and
// replays were not stored: the present time replaces them.
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

// AddPods adds the pods of a list that lost host ports to a record, in order. gone means that
// their host ports were not put back.
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
	sorting.Stable(r.Pods, func(a, b api.LostPod) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
}
