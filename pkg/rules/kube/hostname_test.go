package kube

import (
	"strings"
	"testing"
)

// TestHostnameByTheOnlyNode: the node's name decides which endpoints are local. If no flag sets
// it, a manifest with a single Node object does. With several Node objects a guess would be
// wrong.
func TestHostnameByTheOnlyNode(t *testing.T) {
	node := func(name string) string {
		return "apiVersion: v1\nkind: Node\nmetadata: {name: " + name + ", labels: {topology.kubernetes.io/zone: z-" + name + "}}\n"
	}
	for _, test := range []struct {
		name, override, objects string
		want, refused           string
	}{
		{"one node", "", node("a"), "a", ""},
		{"one node, and another name", "B", node("a"), "b", ""},
		{"no node", "", "", "", ""},
		{"two nodes", "", node("a") + "---\n" + node("b"), "", "hostname-override: there are 2 Node objects"},
		{"two nodes, one named", "b", node("a") + "---\n" + node("b"), "b", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			objects, err := Decode("cluster.yaml", []byte(test.objects))
			if err != nil {
				t.Fatal(err)
			}
			options := DefaultOptions()
			options.HostnameOverride = test.override
			nodes, err := options.nodes(objects)
			if test.refused != "" {
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Fatalf("got error %v, want one with %q", err, test.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if nodes[0].name != test.want {
				t.Errorf("this node is %q, want %q", nodes[0].name, test.want)
			}
		})
	}
}
