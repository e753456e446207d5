package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
)

// A node is a machine of the cluster that ought to have a canaryd.
type node struct {
	name string
	pod  string // "" if there is none
	why  string // why it cannot be queried; "" if it can
	info podInfo
}

// A podInfo is a pod's part of a bug report.
type podInfo struct {
	Node     string `json:"node"`
	Pod      string `json:"pod,omitempty"`
	Phase    string `json:"phase,omitempty"`
	State    string `json:"state,omitempty"` // of the container
	Image    string `json:"image,omitempty"`
	Restarts int    `json:"restarts"`
	Leaving  bool   `json:"leaving,omitempty"` // it is being deleted
}

// A fleet has the nodes that a command is about.
type fleet struct {
	*options
	kubectl kubectl
	nodes   []node
	// without is the number of the DaemonSet's nodes that have no pod.
	without int
}

// open lists canaryd's pods for a command, and returns the named or selected nodes, or all with
// a pod. A node without a pod stays in the list, and why says so.
func (o *options) open(ctx context.Context, to streams) (*fleet, error) {
	f := &fleet{options: o, kubectl: kubectl{o.program, o.global}}
	pods, err := f.list(ctx, to, "PodList", "/api/v1/namespaces/"+url.PathEscape(o.namespace)+"/pods", o.pods)
	if err != nil {
		return nil, err
	}
	have := nodesOf(pods, o.container)
	switch {
	case o.nodes != "":
		chosen, err := f.list(ctx, to, "NodeList", "/api/v1/nodes", o.nodes)
		if err != nil {
			return nil, err
		}
		if len(chosen) == 0 {
			return nil, fmt.Errorf("no node has the labels %s", o.nodes)
		}
		for _, item := range chosen {
			o.names = append(o.names, item.Metadata.Name)
		}
		fallthrough
	case len(o.names) > 0:
		slices.Sort(o.names)
		for _, name := range slices.Compact(o.names) {
			n, ok := have[name]
			if !ok {
				n = node{name: name, why: "there is no pod of canaryd", info: podInfo{Node: name}}
			}
			f.nodes = append(f.nodes, n)
		}
		return f, nil
	}
	f.nodes = slices.SortedFunc(maps.Values(have), func(a, b node) int { return cmp.Compare(a.name, b.name) })
	if len(f.nodes) == 0 {
		return nil, fmt.Errorf("no pod in the namespace %s has the labels %s: name others with -n and --pods", o.namespace, o.pods)
	}
	f.countMissing(ctx, to)
	return f, nil
}

// An item is a pod, a node or a DaemonSet, with the fields that this program needs.
type item struct {
	Metadata struct {
		Name              string
		DeletionTimestamp string
	}
	Spec struct {
		NodeName string
		Affinity struct {
			NodeAffinity struct {
				Required struct {
					NodeSelectorTerms []struct {
						MatchFields []struct {
							Key    string
							Values []string
						}
					}
				} `json:"requiredDuringSchedulingIgnoredDuringExecution"`
			}
		}
	}
	Status struct {
		Phase, Reason          string
		ContainerStatuses      []containerStatus
		InitContainerStatuses  []containerStatus // sidecars
		DesiredNumberScheduled int
	}
}

type containerStatus struct {
	Name, Image  string
	RestartCount int
	Ready        bool
	State        struct {
		Running             *struct{}
		Waiting, Terminated *struct{ Reason string }
	}
}

const (
	pageSize = 500
	mostPods = 200_000
)

// list returns the objects with some labels; kind is the kind of the list, such as PodList. It
// reads them page by page, because kubectl get would hold all of them in memory, twice.
func (f *fleet) list(ctx context.Context, to streams, kind, path, labels string) ([]item, error) {
	var all []item
	for next := ""; ; {
		query := url.Values{"labelSelector": {labels}, "limit": {strconv.Itoa(pageSize)}}
		if next != "" {
			query.Set("continue", next)
		}
		// kubectl may ask for credentials, so it talks to the user directly.
		a := f.kubectl.runWith(ctx, to.login, to.err, mostPage, "get", "--raw", path+"?"+query.Encode())
		if a.err != nil {
			return nil, a.err
		}
		if a.code != 0 { // kubectl has named the reason
			return nil, fmt.Errorf("listing %s failed", path)
		}
		items, more, err := readList(a.out, kind)
		if err != nil {
			return nil, fmt.Errorf("listing %s: %w", path, err)
		}
		all = append(all, items...)
		switch {
		case more == "":
			return all, nil
		case more == next || len(all) > mostPods:
			return nil, fmt.Errorf("listing %s: the list does not end", path)
		}
		next = more
	}
}

// readList decodes one page of a list of the API server. next is the token of the next page; ""
// after the last.
func readList(text []byte, kind string) (items []item, next string, err error) {
	var list struct {
		Kind     string
		Metadata struct{ Continue string }
		Items    []item
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, "", err
	}
	if list.Kind != kind {
		return nil, "", fmt.Errorf("kubectl printed %q instead of a %s", clip(list.Kind), kind)
	}
	return list.Items, list.Metadata.Continue, nil
}

// nodesOf returns the nodes of pods by name, for open. If a node has several pods, the running
// one counts. container is the name of canaryd's container.
func nodesOf(pods []item, container string) map[string]node {
	all := map[string]node{}
	for _, p := range pods {
		n := nodeOf(p, container)
		if old, ok := all[n.name]; !ok || worth(n) > worth(old) {
			all[n.name] = n
		}
	}
	return all
}

// worth orders pods of one node: a running pod, then a running one that is being deleted, then
// others.
func worth(n node) int {
	switch {
	case n.why == "" && !n.info.Leaving:
		return 2
	case n.why == "":
		return 1
	default:
		return 0
	}
}

// nodeOf returns the node of a pod; its why is "" if the container runs, and commands can query
// it. A pod that is not scheduled yet has the node's name in its affinity, because the
// controller of DaemonSets puts it there.
func nodeOf(p item, container string) node {
	n := node{name: p.Spec.NodeName, pod: p.Metadata.Name}
	n.info = podInfo{Pod: clip(p.Metadata.Name), Phase: clip(p.Status.Phase), Leaving: p.Metadata.DeletionTimestamp != ""}
	for _, term := range p.Spec.Affinity.NodeAffinity.Required.NodeSelectorTerms {
		for _, field := range term.MatchFields {
			if n.name == "" && field.Key == "metadata.name" && len(field.Values) == 1 {
				n.name = field.Values[0]
			}
		}
	}
	n.name = cmp.Or(n.name, "(of pod "+clip(p.Metadata.Name)+")")
	n.info.Node = clip(n.name)
	if !isName(n.pod) {
		n.why = "its pod has no proper name"
		return n
	}
	n.why = fmt.Sprintf("its pod is %s, without a container %s", cmp.Or(n.info.Phase, "unknown"), container)
	for _, c := range slices.Concat(p.Status.ContainerStatuses, p.Status.InitContainerStatuses) {
		if c.Name != container {
			continue
		}
		n.info.Image, n.info.Restarts = clip(c.Image), c.RestartCount
		switch s := c.State; {
		case s.Running != nil:
			n.info.State, n.why = "Running", ""
		case s.Waiting != nil:
			n.info.State = clip(cmp.Or(s.Waiting.Reason, "Waiting"))
		case s.Terminated != nil:
			n.info.State = clip(cmp.Or(s.Terminated.Reason, "Terminated"))
		default:
			n.info.State = "unknown"
		}
		if n.why != "" {
			n.why = "its container is not running: " + n.info.State
		}
	}
	return n
}

// countMissing counts in f.without the nodes on which the DaemonSet should have a pod and has
// none. A user who may not list DaemonSets gets a note.
func (f *fleet) countMissing(ctx context.Context, to streams) {
	path := "/apis/apps/v1/namespaces/" + url.PathEscape(f.namespace) + "/daemonsets"
	a := f.kubectl.run(ctx, mostPage, "get", "--raw", path+"?"+url.Values{"labelSelector": {f.pods}}.Encode())
	err := a.failed()
	var sets []item
	if err == nil {
		sets, _, err = readList(a.out, "DaemonSetList")
	}
	if err != nil {
		say(to, "it is not known how many nodes should have a pod: "+err.Error())
		return
	}
	wanted := 0
	for _, s := range sets {
		wanted += s.Status.DesiredNumberScheduled
	}
	f.without = max(0, wanted-len(f.nodes))
}

// exec runs canaryd in a node's pod.
func (f *fleet) exec(ctx context.Context, n node, most int, words ...string) answer {
	return f.bounded(ctx, n, most, append([]string{"exec", "--namespace=" + f.namespace, "--container=" + f.container, n.pod, "--", "canaryd"}, words...)...)
}

// bounded runs kubectl for a node, for at most --timeout, and reads at most most bytes of its
// answer. Without a running pod (why) it fails at once.
func (f *fleet) bounded(ctx context.Context, n node, most int, words ...string) answer {
	if n.why != "" {
		return answer{err: errors.New(n.why)}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("no answer within %s", f.timeout))
	defer cancel()
	return f.kubectl.run(ctx, most, words...)
}
