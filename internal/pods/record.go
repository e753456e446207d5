package pods

import (
	"slices"
	"strings"

	"github.com/canaryd/canaryd/internal/api"
	"github.com/canaryd/canaryd/pkg/protect"
)

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
