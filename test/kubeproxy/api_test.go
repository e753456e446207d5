package kubeproxy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/canaryd/canaryd/pkg/rules/kube"
)

// apiAddress is the API server's address in each namespace.
const apiAddress = "127.0.0.1:6080"

// The lists that kube-proxy 1.36 requests, by path.
const (
	services  = "/api/v1/services"
	nodes     = "/api/v1/nodes"
	slicesOf  = "/apis/discovery.k8s.io/v1/endpointslices"
	addresses = "/apis/networking.k8s.io/v1/servicecidrs"
)

var kinds = map[string]string{services: "Service", nodes: "Node", slicesOf: "EndpointSlice", addresses: "ServiceCIDR"}

// An api is an API server for kube-proxy's lists and watches. It ignores selectors, because it
// has only objects that kube-proxy would select. Its methods may be called at any time.
type api struct {
	mu      sync.Mutex
	version int64
	moved   chan struct{} // the next change closes it
	objects map[string]map[string]object
	// log has all changes since the start, so that a watch may begin at any version.
	log map[string][]change
}

// An object is an element of a list.
type object struct {
	value any
	meta  *kube.ObjectMeta // of value
}

// MarshalJSON returns the JSON of the value.
func (o object) MarshalJSON() ([]byte, error) { return json.Marshal(o.value) }

// A change is one event of a watch.
type change struct {
	version int64
	text    []byte
}

func newAPI() *api {
	a := &api{moved: make(chan struct{}), objects: map[string]map[string]object{}, log: map[string][]change{}}
	for list := range kinds {
		a.objects[list] = map[string]object{}
	}
	return a
}

// set adds an object to a list, or changes it.
func (a *api) set(list string, o object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := o.meta.Namespace + "/" + o.meta.Name
	event := "MODIFIED"
	if _, there := a.objects[list][key]; !there {
		event = "ADDED"
	}
	a.objects[list][key] = o
	a.note(list, event, o)
}

// remove removes an object from a list that has it.
func (a *api) remove(list, namespace, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	key := namespace + "/" + name
	o := a.objects[list][key]
	delete(a.objects[list], key)
	a.note(list, "DELETED", o)
}

// note appends a change to the log. a.mu must be held.
func (a *api) note(list, event string, o object) {
	a.version++
	o.meta.ResourceVersion = strconv.FormatInt(a.version, 10)
	text, err := json.Marshal(map[string]any{"type": event, "object": o})
	if err != nil {
		panic(fmt.Sprintf("%s has no JSON: %v", o.meta.Name, err)) // an error of the test
	}
	a.log[list] = append(a.log[list], change{a.version, text})
	close(a.moved)
	a.moved = make(chan struct{})
}

// since returns the changes of a list after a version, and a channel that the next change
// closes.
func (a *api) since(list string, version int64) ([]change, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	log := a.log[list]
	i, _ := slices.BinarySearchFunc(log, version+1, func(c change, v int64) int { return int(c.version - v) })
	return slices.Clone(log[i:]), a.moved
}

// ServeHTTP answers lists, watches, and the events that kube-proxy posts.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	list, kind := r.URL.Path, kinds[r.URL.Path]
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.Method == http.MethodPost && strings.HasSuffix(list, "/events"):
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"kind":"Event","apiVersion":"events.k8s.io/v1"}`)
	case r.Method != http.MethodGet || kind == "":
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
	case r.URL.Query().Get("watch") != "":
		a.watch(w, r, list)
	default:
		a.mu.Lock()
		text, err := json.Marshal(map[string]any{
			"kind": kind + "List", "apiVersion": apiVersion(list), "metadata": map[string]string{"resourceVersion": strconv.FormatInt(a.version, 10)},
			"items": slices.Collect(maps.Values(a.objects[list])),
		})
		a.mu.Unlock()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(text) // kube-proxy may have ended
	}
}

// apiVersion returns the group and version in a list's path.
func apiVersion(list string) string {
	words := strings.Split(list, "/")
	return strings.Join(words[2:len(words)-1], "/")
}

// watch sends a list's changes until the client or the server ends.
func (a *api) watch(w http.ResponseWriter, r *http.Request, list string) {
	version, err := strconv.ParseInt(r.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	out := http.NewResponseController(w)
	for {
		news, moved := a.since(list, version)
		for _, c := range news {
			if _, err := w.Write(append(c.text, '\n')); err != nil {
				return
			}
			version = c.version
		}
		if err := out.Flush(); err != nil {
			return
		}
		select {
		case <-moved:
		case <-r.Context().Done():
			return
		}
	}
}

// serve serves the API on a listener in each of the namespaces, until the test ends.
func (a *api) serve(t *testing.T, spaces ...*space) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	server := &http.Server{Handler: a, ReadHeaderTimeout: time.Minute, BaseContext: func(net.Listener) context.Context { return ctx }}
	var serving sync.WaitGroup
	for _, s := range spaces {
		var listener net.Listener
		err := s.in(func() (err error) { listener, err = net.Listen("tcp4", apiAddress); return err })
		if err != nil {
			t.Fatalf("listening in %s: %v", s.name, err)
		}
		serving.Go(func() { _ = server.Serve(listener) }) // ends with ErrServerClosed
	}
	t.Cleanup(func() { stop(); _ = server.Close(); serving.Wait() })
}
