package pods

import (
	"slices"
	"strings"
	"time"

	"github.com/canaryd/canaryd/internal/cniresults"
	"github.com/canaryd/canaryd/pkg/protect"
	"github.com/canaryd/canaryd/pkg/reload"
)

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
