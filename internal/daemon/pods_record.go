package daemon

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
)

// podsListed is how many pods one record names.
const podsListed = 50

// addPods names in a record the pods whose host ports one table lost.
func (w *podWatch) addPods(r *api.Flush, lost reload.Lost) {
	r.Pods = slices.Clone(r.Pods) // a copy of the record may be in use
	for a := range lostPods(lost) {
		w.addPod(r, a, false)
	}
	sortPods(r)
}

// addGone names in a record the pods whose host ports did not come back.
func (w *podWatch) addGone(r *api.Flush, gone map[protect.Attachment]bool) {
	r.Pods = slices.Clone(r.Pods)
	for a := range gone {
		w.addPod(r, a, true)
	}
	sortPods(r)
}

// addPod names one pod in a record, if it has host ports.
func (w *podWatch) addPod(r *api.Flush, a protect.Attachment, gone bool) {
	k, ok := w.known[a]
	if !ok || len(k.HostPorts) == 0 {
		return
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

// sortPods orders the pods of a record by name.
func sortPods(r *api.Flush) {
	slices.SortFunc(r.Pods, func(a, b api.LostPod) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
}

// podTexts are the pods of a record as the log has them.
func podTexts(r api.Flush) []string {
	var list []string
	for _, p := range r.Pods[:min(len(r.Pods), namesKept)] {
		list = append(list, p.String())
	}
	return list
}
