package daemon

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/pkg/reload"
	"github.com/canaryd/canaryd/pkg/rules"
)

// podsListed is how many pods one record names.
const podsListed = 50

// A LostPod is a pod whose host ports a flush took. Its names are empty where Kubernetes
// did not make the container.
type LostPod struct {
	Namespace string   `json:"namespace,omitempty"`
	Name      string   `json:"name,omitempty"`
	Container string   `json:"container"`
	HostPorts []string `json:"hostPorts"`
	// Gone: it was removed during the outage, so its host ports were not put back.
	Gone bool `json:"gone,omitempty"`
}

// String names the pod as people know it, with its host ports.
func (p LostPod) String() string {
	name := p.Container
	if p.Name != "" {
		name = strings.TrimPrefix(p.Namespace+"/"+p.Name, "/")
	}
	name += " (" + strings.Join(p.HostPorts, ", ") + ")"
	if p.Gone {
		name += ", which is gone"
	}
	return name
}

// addPods names in a record the pods whose host ports one table lost.
func (w *podWatch) addPods(r *Flush, lost reload.Lost) {
	r.Pods = slices.Clone(r.Pods) // who was handed the record before keeps what it has
	for a := range lostPods(lost) {
		w.addPod(r, a, false)
	}
	r.sortPods()
}

// addGone names in a record the pods whose host ports did not come back.
func (w *podWatch) addGone(r *Flush, gone map[rules.Attachment]bool) {
	r.Pods = slices.Clone(r.Pods)
	for a := range gone {
		w.addPod(r, a, true)
	}
	r.sortPods()
}

func (w *podWatch) addPod(r *Flush, a rules.Attachment, gone bool) {
	k, ok := w.known[a]
	if !ok || len(k.HostPorts) == 0 {
		return
	}
	i := slices.IndexFunc(r.Pods, func(p LostPod) bool { return p.Container == a.Container })
	switch {
	case i >= 0:
		r.Pods[i].Gone = r.Pods[i].Gone || gone
	case len(r.Pods) == podsListed:
		r.MorePods++
	default:
		r.Pods = append(r.Pods, LostPod{k.Namespace, k.Name, a.Container, k.HostPorts, gone})
	}
}

func (r *Flush) sortPods() {
	slices.SortFunc(r.Pods, func(a, b LostPod) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Container, b.Namespace+"/"+b.Name+"/"+b.Container)
	})
}

// podTexts are the pods of a record as the log has them.
func podTexts(r Flush) []string {
	var list []string
	for _, p := range r.Pods[:min(len(r.Pods), namesKept)] {
		list = append(list, p.String())
	}
	return list
}
